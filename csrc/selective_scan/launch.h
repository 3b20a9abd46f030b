// What cuda.cu runs; cuda/forward.cu and cuda/backward.cu compile it, once for each dtype of u.
#pragma once

#include <cuda_runtime.h>

#include "selective_scan/parts.h"

namespace mamba {

// kernel: the number of a row of kernels.h, see plan.h. aligned: see inputs_aligned and gradients_aligned there.
struct ScanForwardLaunchers {
    cudaError_t (*forward)(const MambaSelectiveScan& p, bool aligned, int kernel);
    // What all segments pass on, alone.
    cudaError_t (*carry)(const MambaSelectiveScan& p, bool aligned, int kernel);

    template <typename T>
    static ScanForwardLaunchers of();
};

struct ScanBackwardLaunchers {
    // Parts of gradients remain to be added up.
    cudaError_t (*backward)(const ScanBackward& q, bool aligned, int kernel);
    cudaError_t (*carry)(const ScanBackward& q, bool aligned, int kernel);

    template <typename T>
    static ScanBackwardLaunchers of();
};

}  // namespace mamba
