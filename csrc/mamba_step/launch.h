// What cuda.cu runs; cuda/kernels.cu compiles it once for each dtype of xz.
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
