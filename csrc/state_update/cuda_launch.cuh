// What cuda.cu calls; the kernel itself is compiled in one file a state dtype.
#pragma once

#include "common/cuda_utils.cuh"

namespace mamba {

// One launcher a state dtype, instantiated in cuda_f32.cu, cuda_f16.cu and cuda_bf16.cu.
template <typename State>
cudaError_t selective_state_update_launch(const MambaSelectiveStateUpdate& params);

}  // namespace mamba
