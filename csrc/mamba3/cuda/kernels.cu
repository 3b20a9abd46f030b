// The kernels of Mamba-3's scan, of MAMBA_DTYPE.
#include "mamba3/cuda/launchers.cuh"

namespace mamba {
template Mamba3Launchers Mamba3Launchers::of<MAMBA_DTYPE>();
}  // namespace mamba
