// What cuda.cu runs; cuda/f32.cu, f16.cu and bf16.cu compile it, one dtype of x each.
#pragma once

#include <cuda_runtime.h>

#include "causal_conv1d/parts.h"
#include "causal_conv1d/plan.h"

namespace mamba {

struct ConvLaunchers {
    cudaError_t (*forward)(const MambaCausalConv1d& params);
    // Parts of dweight and dbias remain to be added up where the plan has several slots.
    cudaError_t (*backward)(const ConvBackward& params, const ConvBackwardPlan& plan);
    cudaError_t (*update)(const MambaCausalConv1dUpdate& params);

    template <typename T>
    static ConvLaunchers of();
};

}  // namespace mamba
