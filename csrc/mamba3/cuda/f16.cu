// The kernels of Mamba-3's scan for float16.
#include "mamba3/cuda/launchers.cuh"

namespace mamba {
template Mamba3Launchers Mamba3Launchers::of<__half>();
}  // namespace mamba
