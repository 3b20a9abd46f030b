// The kernels of Mamba-2's scan for float32.
#include "ssd/cuda/launchers.cuh"

namespace mamba {
template SsdLaunchers SsdLaunchers::of<float>();
}  // namespace mamba
