// The norm's and SwiGLU's kernels, of MAMBA_DTYPE.
#include "norm/cuda/launchers.cuh"

namespace mamba {
template NormLaunchers NormLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
