// Kernels whose neighbouring blocks form clusters (from 9.0 on).
#pragma once

#include "common/cuda_utils.cuh"
#include "common/ptx_cluster.cuh"

namespace mamba {

// Whether the device has clusters and this code was compiled for it.
template <typename... Parameters>
cudaError_t has_clusters(void (*kernel)(Parameters...), int device, bool* answer) {
    int attribute = 0;
    cudaError_t error = supports_programmatic_dependent_launch(kernel, answer);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&attribute, cudaDevAttrClusterLaunch, device);
    }
    *answer = *answer && attribute != 0;
    return error;
}

}  // namespace mamba
