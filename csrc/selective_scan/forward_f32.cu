#include "selective_scan/forward.cuh"

namespace mamba {
template cudaError_t launch_selective_scan_forward<float>(const MambaSelectiveScan& p, bool aligned_rows, bool aligned_BC);
}  // namespace mamba
