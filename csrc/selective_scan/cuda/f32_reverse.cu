// The scan's kernels with reverse for float32.
#include "selective_scan/cuda/launchers.cuh"

namespace mamba {
template ScanLaunchersOf<true> ScanLaunchersOf<true>::of<float>();
}  // namespace mamba
