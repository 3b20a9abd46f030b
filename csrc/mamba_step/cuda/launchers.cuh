// The kernels of a Mamba layer's decode step as cuda.cu sees them.
#pragma once

#include "common/kernel_launch.cuh"
#include "mamba_step/cuda/cluster.cuh"
#include "mamba_step/cuda/project.cuh"
#include "mamba_step/cuda/update.cuh"
#include "mamba_step/kernels.h"
#include "mamba_step/launch.h"

namespace mamba {

template <typename T, class Params>
cudaError_t launch_mamba_step_as(const Params& p) {
    const cudaError_t error = launch_step_project<T>(p);
    return error != cudaSuccess ? error : launch_step_update<T>(p);
}

// GPUs without clusters run two kernels.
template <typename T, class Params>
cudaError_t launch_mamba_step_cluster(const Params& p) {
    bool together = false;
    const cudaError_t error = has_clusters(step_cluster_kernel<T, Params>, p.run.device, &together);
    if (error != cudaSuccess) {
        return error;
    }
    return together ? launch_step_cluster<T>(p) : launch_mamba_step_as<T>(p);
}

template <typename T>
cudaError_t launch_mamba_step(const MambaMambaStep& p, int kernel) {
    return launch_row<T, kMambaStepKernels>(mamba_step_table, kernel, [&](auto row) {
        constexpr MambaStepKernel k = kMambaStepKernels[decltype(row)::kRow];
        if constexpr (k.cluster) {
            return launch_mamba_step_cluster<T>(MambaStepOfOneDtype<T>{{{p}}});
        } else if constexpr (k.one_dtype) {
            return launch_mamba_step_as<T>(MambaStepOfOneDtype<T>{{{p}}});
        } else {
            return launch_mamba_step_as<T>(p);
        }
    });
}

template <typename T>
MambaStepLaunchers MambaStepLaunchers::of() {
    MambaStepLaunchers launchers;
    launchers.step = launch_mamba_step<T>;
    return launchers;
}

}  // namespace mamba
