#include "selective_scan/forward.cuh"

namespace mamba {
template cudaError_t launch_selective_scan_forward<__nv_bfloat16>(const MambaSelectiveScan& p, bool aligned, bool wide);
}  // namespace mamba
