#include "selective_scan/cuda/backward.cuh"

namespace mamba {
template cudaError_t launch_selective_scan_backward<__half>(const MambaSelectiveScanBackward& q, bool aligned, bool small);
}  // namespace mamba
