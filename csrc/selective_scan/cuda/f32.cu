// The scan's kernels for float32.
#include "selective_scan/cuda/launchers.cuh"

namespace mamba {
template ScanLaunchers ScanLaunchers::of<float>();
}  // namespace mamba
