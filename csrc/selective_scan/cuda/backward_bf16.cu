#include "selective_scan/cuda/backward.cuh"

namespace mamba {
template cudaError_t launch_selective_scan_backward<__nv_bfloat16>(const MambaSelectiveScanBackward& q, bool aligned,
                                                                   bool small);
}  // namespace mamba
