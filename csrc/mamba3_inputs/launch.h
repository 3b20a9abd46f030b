// What cuda.cu runs; cuda/kernels.cu compiles it once for each dtype of the projection.
#pragma once

#include <cuda_runtime.h>

#include "mamba3_inputs/plan.h"

namespace mamba {

struct Mamba3InputsLaunchers {
    cudaError_t (*forward)(const MambaMamba3Inputs& p, int kernel);
    cudaError_t (*backward)(const MambaMamba3InputsBackward& q, const Mamba3InputsWorkspace& workspace, int kernel);

    template <typename T>
    static Mamba3InputsLaunchers of();
};

}  // namespace mamba
