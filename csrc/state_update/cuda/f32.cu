// The decode step's kernel for a float32 state.
#include "state_update/cuda/kernel.cuh"

namespace mamba {

template cudaError_t selective_state_update_launch<float>(const MambaSelectiveStateUpdate& params);

}  // namespace mamba
