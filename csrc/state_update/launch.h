// What cuda.cu calls; the kernel itself is compiled in one file a state dtype.
#pragma once

#include "common/cuda_utils.cuh"

namespace mamba {

// One launcher a state dtype, instantiated in cuda/f32.cu, f16.cu and bf16.cu.
template <typename State>
cudaError_t selective_state_update_launch(const MambaSelectiveStateUpdate& params);

}  // namespace mamba
