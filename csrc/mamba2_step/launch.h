// What cuda.cu runs; cuda/kernels.cu compiles it once for each dtype of the state.
#pragma once

#include <cuda_runtime.h>

#include "mamba_kernels.h"

namespace mamba {

struct Mamba2StepLaunchers {
    // kernel: of kMamba2StepKernels. together: the step is complete without finish.cuh.
    cudaError_t (*step)(const MambaMamba2Step& params, int kernel, int processors, bool* together);

    template <typename State>
    static Mamba2StepLaunchers of();
};

}  // namespace mamba
