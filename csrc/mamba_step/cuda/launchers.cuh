// The kernels of a Mamba layer's decode step as cuda.cu sees them.
#pragma once

#include "mamba_step/cuda/project.cuh"
#include "mamba_step/cuda/update.cuh"
#include "mamba_step/launch.h"

namespace mamba {

template <typename T, class Params>
cudaError_t launch_mamba_step_as(const Params& p, const StepUpdateLayout& layout) {
    const cudaError_t error = launch_step_project<T>(p);
    return error != cudaSuccess ? error : launch_step_update<T>(p, layout);
}

template <typename T>
cudaError_t launch_mamba_step(const MambaMambaStep& p) {
    const StepUpdateLayout layout = step_update_layout<T>(p);
    if (UsualMambaStep<T>::fits(p, layout)) {
        return launch_mamba_step_as<T>(UsualMambaStep<T>{{p}}, layout);
    }
    return launch_mamba_step_as<T>(p, layout);
}

template <typename T>
MambaStepLaunchers MambaStepLaunchers::of() {
    MambaStepLaunchers launchers;
    launchers.step = launch_mamba_step<T>;
    return launchers;
}

}  // namespace mamba
