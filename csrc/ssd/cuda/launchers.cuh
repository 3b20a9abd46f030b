// The kernels of Mamba-2's scan as cuda.cu sees them.
#pragma once

#include "ssd/cuda/launch_backward.cuh"
#include "ssd/cuda/launch_forward.cuh"
#include "ssd/launch.h"

namespace mamba {

template <typename T>
SsdLaunchers SsdLaunchers::of() {
    SsdLaunchers launchers;
    launchers.forward = launch_ssd_forward<T>;
    launchers.backward = launch_ssd_backward<T>;
    return launchers;
}

}  // namespace mamba
