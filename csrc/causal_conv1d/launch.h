// What cuda.cu runs; cuda/kernels.cu compiles it once for each dtype of x.
#pragma once

#include <cuda_runtime.h>

#include "causal_conv1d/kernels.h"
#include "causal_conv1d/parts.h"

namespace mamba {

// kernel: the number of a row in the table of that direction.
struct ConvLaunchers {
    cudaError_t (*forward)(const MambaCausalConv1d& params, int kernel);
    // Parts of dweight and dbias remain to be added up where the plan has several slots.
    cudaError_t (*backward)(const ConvBackward& params, const ConvBackwardPlan& plan, int kernel);
    cudaError_t (*update)(const MambaCausalConv1dUpdate& params, int kernel);

    template <typename T>
    static ConvLaunchers of();
};

}  // namespace mamba
