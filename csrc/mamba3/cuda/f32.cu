// The kernels of Mamba-3's scan for float32.
#include "mamba3/cuda/launchers.cuh"

namespace mamba {
template Mamba3Launchers Mamba3Launchers::of<float>();
}  // namespace mamba
