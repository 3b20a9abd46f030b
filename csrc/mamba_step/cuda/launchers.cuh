// The kernels of a Mamba layer's decode step as cuda.cu sees them.
#pragma once

#include "common/kernel_launch.cuh"
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

template <typename T>
cudaError_t launch_mamba_step(const MambaMambaStep& p, int kernel) {
    return launch_row<T, kMambaStepKernels>(mamba_step_table, kernel, [&](auto row) {
        if constexpr (kMambaStepKernels[decltype(row)::kRow].one_dtype) {
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
