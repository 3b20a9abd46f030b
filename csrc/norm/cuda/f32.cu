// The norm's and SwiGLU's kernels for float32.
#include "norm/cuda/launchers.cuh"

namespace mamba {
template NormLaunchers NormLaunchers::of<float>();
}  // namespace mamba
