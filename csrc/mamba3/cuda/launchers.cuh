// The kernels of Mamba-3's scan as cuda.cu sees them.
#pragma once

#include "mamba3/cuda/backward/launch_heads.cuh"
#include "mamba3/cuda/forward/launch.cuh"
#include "mamba3/cuda/step/step.cuh"
#include "mamba3/launch.h"

namespace mamba {

template <typename T>
Mamba3Launchers Mamba3Launchers::of() {
    Mamba3Launchers launchers = {};
    launchers.forward = launch_mamba3_forward<T>;
    launchers.backward = launch_mamba3_backward_heads<T>;
    launchers.step = launch_mamba3_step<T>;
    return launchers;
}

}  // namespace mamba
