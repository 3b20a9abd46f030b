// The decode step's kernel for a bfloat16 state.
#include "state_update/cuda/kernel.cuh"

namespace mamba {

template cudaError_t selective_state_update_launch<__nv_bfloat16>(const MambaSelectiveStateUpdate& params);

}  // namespace mamba
