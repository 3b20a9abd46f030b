// The norm's and SwiGLU's kernels for bfloat16.
#include "norm/cuda/launchers.cuh"

namespace mamba {
template NormLaunchers NormLaunchers::of<__nv_bfloat16>();
}  // namespace mamba
