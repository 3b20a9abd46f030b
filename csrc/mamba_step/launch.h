// What cuda.cu runs; cuda/f32.cu, f16.cu and bf16.cu compile it, one dtype of xz each.
#pragma once

#include <cuda_runtime.h>

#include "mamba_kernels.h"

namespace mamba {

struct MambaStepLaunchers {
    cudaError_t (*step)(const MambaMambaStep& params, int kernel);  // of kMambaStepKernels

    template <typename T>
    static MambaStepLaunchers of();
};

}  // namespace mamba
