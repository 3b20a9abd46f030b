#include "selective_scan/cuda/forward.cuh"
#include "selective_scan/cuda/forward_pipeline.cuh"

namespace mamba {
template cudaError_t launch_selective_scan_forward<__nv_bfloat16>(const MambaSelectiveScan& p, bool aligned, bool wide);
template cudaError_t launch_selective_scan_pipeline<__nv_bfloat16>(const MambaSelectiveScan& p, int channels);
}  // namespace mamba
