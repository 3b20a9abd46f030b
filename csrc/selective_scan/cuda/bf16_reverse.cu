// The scan's kernels with reverse for bfloat16.
#include "selective_scan/cuda/launchers.cuh"

namespace mamba {
template ScanLaunchersOf<true> ScanLaunchersOf<true>::of<__nv_bfloat16>();
}  // namespace mamba
