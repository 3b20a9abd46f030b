// The scan's kernels for float32.
#include "selective_scan/cuda/launchers.cuh"

namespace mamba {
template ScanLaunchersOf<false> ScanLaunchersOf<false>::of<float>();
}  // namespace mamba
