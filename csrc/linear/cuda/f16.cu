// The linear layer's kernels for float16.
#include "linear/cuda/kernel.cuh"

namespace mamba {
template LinearLaunchers LinearLaunchers::of<__half>();
}  // namespace mamba
