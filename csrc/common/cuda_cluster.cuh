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

// launch_programmatic_dependent of blocks in clusters of `cluster` neighbours each.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), unsigned cluster, const Grid& grid, dim3 block, size_t shared_bytes,
                            void* stream, const Arguments&... arguments) {
    bool starts_early = false;
    const cudaError_t error =
        grid.fits() ? supports_programmatic_dependent_launch(kernel, &starts_early) : cudaErrorInvalidConfiguration;
    if (error != cudaSuccess) {
        return error;
    }
    cudaLaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (starts_early) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count].val.programmaticStreamSerializationAllowed = 1;
        ++count;
    }
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = cluster;
        attributes[count].val.clusterDim.y = 1;
        attributes[count].val.clusterDim.z = 1;
        ++count;
    }
    cudaLaunchConfig_t config = launch_config(grid, block, shared_bytes, stream);
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace mamba
