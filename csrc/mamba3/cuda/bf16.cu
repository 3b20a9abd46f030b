// The kernels of Mamba-3's scan for bfloat16.
#include "mamba3/cuda/launchers.cuh"

namespace mamba {
template Mamba3Launchers Mamba3Launchers::of<__nv_bfloat16>();
}  // namespace mamba
