// What cuda.cu runs; cuda/kernels.cu compiles it once for each dtype of x.
#pragma once

#include "norm/kernels.h"

namespace mamba {

// kernel: the number of a row in the table of that direction.
struct NormLaunchers {
    cudaError_t (*forward)(const MambaNorm& params, const NormLayout& layout, int kernel);
    // dweight and dbias remain to be added up where the plan has a workspace.
    cudaError_t (*backward)(const MambaNormBackward& params, const NormBackwardPlan& plan, int kernel);
    cudaError_t (*swiglu)(const MambaSwiglu& params, bool backward, int kernel);

    template <typename T>
    static NormLaunchers of();
};

}  // namespace mamba
