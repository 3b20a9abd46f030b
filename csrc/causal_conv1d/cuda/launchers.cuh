// The causal convolution's kernels as cuda.cu sees them.
#pragma once

#include "causal_conv1d/cuda/backward.cuh"
#include "causal_conv1d/cuda/forward.cuh"
#include "causal_conv1d/cuda/update.cuh"
#include "causal_conv1d/launch.h"

namespace mamba {

template <typename T>
ConvLaunchers ConvLaunchers::of() {
    ConvLaunchers launchers;
    launchers.forward = launch_conv_forward<T>;
    launchers.backward = launch_conv_backward<T>;
    launchers.update = launch_conv_update<T>;
    return launchers;
}

}  // namespace mamba
