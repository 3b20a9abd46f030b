// What cuda.cu runs; cuda/f32.cu, f16.cu and bf16.cu compile it, one dtype of x each.
#pragma once

#include "norm/plan.h"

namespace mamba {

struct NormLaunchers {
    cudaError_t (*forward)(const MambaNorm& params, const NormLayout& layout);
    // dweight and dbias remain to be added up where the plan has a workspace.
    cudaError_t (*backward)(const MambaNormBackward& params, const NormBackwardPlan& plan);
    cudaError_t (*swiglu)(const MambaSwiglu& params, bool backward);

    template <typename T>
    static NormLaunchers of();
};

}  // namespace mamba
