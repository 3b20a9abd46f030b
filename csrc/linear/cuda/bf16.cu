// The linear layer's kernels for bfloat16.
#include "linear/cuda/kernel.cuh"

namespace mamba {
template LinearLaunchers LinearLaunchers::of<__nv_bfloat16>();
}  // namespace mamba
