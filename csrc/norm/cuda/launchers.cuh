// The norm's and SwiGLU's kernels as cuda.cu sees them.
#pragma once

#include "norm/cuda/backward.cuh"
#include "norm/cuda/forward.cuh"
#include "norm/cuda/swiglu.cuh"
#include "norm/launch.h"

namespace mamba {

template <typename T>
NormLaunchers NormLaunchers::of() {
    NormLaunchers launchers;
    launchers.forward = launch_norm_forward<T>;
    launchers.backward = launch_norm_backward<T>;
    launchers.swiglu = launch_swiglu<T>;
    return launchers;
}

}  // namespace mamba
