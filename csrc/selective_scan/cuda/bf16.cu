// The scan's kernels for bfloat16.
#include "selective_scan/cuda/launchers.cuh"

namespace mamba {
template ScanLaunchers ScanLaunchers::of<__nv_bfloat16>();
}  // namespace mamba
