// What cuda.cu runs; cuda/f32.cu, f16.cu and bf16.cu compile it, one dtype of the state each.
#pragma once

#include <cuda_runtime.h>

#include "mamba_kernels.h"

namespace mamba {

struct StateUpdateLaunchers {
    cudaError_t (*update)(const MambaSelectiveStateUpdate& params, int kernel, int processors);  // of kStateUpdateKernels

    template <typename State>
    static StateUpdateLaunchers of();
};

}  // namespace mamba
