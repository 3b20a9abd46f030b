// The norm's and SwiGLU's kernels for float16.
#include "norm/cuda/launchers.cuh"

namespace mamba {
template NormLaunchers NormLaunchers::of<__half>();
}  // namespace mamba
