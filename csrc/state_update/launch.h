// What cuda.cu runs; cuda/kernels.cu compiles it once for each dtype of the state.
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
