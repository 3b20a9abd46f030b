// The decode step's kernel for a float16 state.
#include "state_update/cuda/kernel.cuh"

namespace mamba {

template cudaError_t selective_state_update_launch<__half>(const MambaSelectiveStateUpdate& params);

}  // namespace mamba
