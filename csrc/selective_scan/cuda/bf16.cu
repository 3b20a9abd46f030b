// The scan's kernels for bfloat16.
#include "selective_scan/cuda/launchers.cuh"

namespace mamba {
template ScanLaunchersOf<false> ScanLaunchersOf<false>::of<__nv_bfloat16>();
}  // namespace mamba
