// The kernels of a Mamba layer's decode step as cuda.cu sees them.
#pragma once

#include "mamba_step/cuda/project.cuh"
#include "mamba_step/cuda/update.cuh"
#include "mamba_step/launch.h"

namespace mamba {

template <typename T>
cudaError_t launch_mamba_step(const MambaMambaStep& p) {
    const cudaError_t error = launch_step_project<T>(p);
    return error != cudaSuccess ? error : launch_step_update<T>(p);
}

template <typename T>
MambaStepLaunchers MambaStepLaunchers::of() {
    MambaStepLaunchers launchers;
    launchers.step = launch_mamba_step<T>;
    return launchers;
}

}  // namespace mamba
