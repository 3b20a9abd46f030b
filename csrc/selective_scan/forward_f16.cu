#include "selective_scan/forward.cuh"

namespace mamba {
template cudaError_t launch_selective_scan_forward<__half>(const MambaSelectiveScan& p, bool aligned, bool wide);
}  // namespace mamba
