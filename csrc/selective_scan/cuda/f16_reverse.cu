// The scan's kernels with reverse for float16.
#include "selective_scan/cuda/launchers.cuh"

namespace mamba {
template ScanLaunchersOf<true> ScanLaunchersOf<true>::of<__half>();
}  // namespace mamba
