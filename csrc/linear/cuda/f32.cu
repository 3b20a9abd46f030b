// The linear layer's kernels for float32.
#include "linear/cuda/kernel.cuh"

namespace mamba {
template LinearLaunchers LinearLaunchers::of<float>();
}  // namespace mamba
