#include "ssd/cuda/launch_forward.cuh"

namespace mamba {
template cudaError_t launch_ssd_forward<__nv_bfloat16>(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace);
}  // namespace mamba
