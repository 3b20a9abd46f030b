// The kernels of Mamba-2's scan for float16.
#include "ssd/cuda/launchers.cuh"

namespace mamba {
template SsdLaunchers SsdLaunchers::of<__half>();
}  // namespace mamba
