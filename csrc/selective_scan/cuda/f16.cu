// The scan's kernels for float16.
#include "selective_scan/cuda/launchers.cuh"

namespace mamba {
template ScanLaunchers ScanLaunchers::of<__half>();
}  // namespace mamba
