// What cuda.cu runs; cuda/f32.cu, f16.cu and bf16.cu compile it, one dtype of x each.
#pragma once

#include <cuda_runtime.h>

#include "mamba_kernels.h"

namespace mamba {

struct ConvLaunchers {
    cudaError_t (*forward)(const MambaCausalConv1d& params);
    cudaError_t (*backward)(const MambaCausalConv1dBackward& params);
    cudaError_t (*update)(const MambaCausalConv1dUpdate& params);

    template <typename T>
    static ConvLaunchers of();
};

}  // namespace mamba
