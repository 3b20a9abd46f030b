#include "ssd/cuda/launch_backward.cuh"

namespace mamba {
template cudaError_t launch_ssd_backward<__half>(const MambaSsdBackward& q, const SsdPlan& plan, const SsdWorkspace& workspace);
}  // namespace mamba
