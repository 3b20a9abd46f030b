// What cuda.cu runs; cuda/kernels.cu compiles it once for each dtype.
#pragma once

#include <cuda_runtime.h>

#include "mamba_kernels.h"

namespace mamba {

struct CrossEntropyLaunchers {
    cudaError_t (*cross_entropy)(const MambaCrossEntropy& params, int kernel);  // of kCrossEntropyKernels

    template <typename T>
    static CrossEntropyLaunchers of();
};

}  // namespace mamba
