// What cuda.cu runs; cuda/kernels.cu compiles it once for each dtype.
#pragma once

#include <cuda_runtime.h>

#include "mamba_kernels.h"

namespace mamba {

struct LinearLaunchers {
    // kernel: of kLinearKernels. processors: of the GPU.
    cudaError_t (*linear)(const MambaLinear& params, int kernel, int processors);

    template <typename T>
    static LinearLaunchers of();
};

}  // namespace mamba
