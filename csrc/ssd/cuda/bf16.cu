// The kernels of Mamba-2's scan for bfloat16.
#include "ssd/cuda/launchers.cuh"

namespace mamba {
template SsdLaunchers SsdLaunchers::of<__nv_bfloat16>();
}  // namespace mamba
