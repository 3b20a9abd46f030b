// The linear layer's kernels, of MAMBA_DTYPE.
#include "linear/cuda/launch.cuh"

namespace mamba {
template LinearLaunchers LinearLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
