// What cuda.cu runs; cuda/f32.cu, f16.cu and bf16.cu compile it, one dtype each.
#pragma once

#include <cuda_runtime.h>

#include "mamba_kernels.h"

namespace mamba {

struct LinearLaunchers {
    cudaError_t (*linear)(const MambaLinear& params, int kernel);  // of kLinearKernels

    template <typename T>
    static LinearLaunchers of();
};

}  // namespace mamba
