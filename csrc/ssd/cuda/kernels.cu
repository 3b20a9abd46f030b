// The kernels of Mamba-2's scan, of MAMBA_DTYPE.
#include "ssd/cuda/launchers.cuh"

namespace mamba {
template SsdLaunchers SsdLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
