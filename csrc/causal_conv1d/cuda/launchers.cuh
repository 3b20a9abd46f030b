// From the number of a row to the kernel that was compiled for it.
#pragma once

#include "causal_conv1d/cuda/backward_channel.cuh"
#include "causal_conv1d/cuda/backward_time.cuh"
#include "causal_conv1d/cuda/forward_channel.cuh"
#include "causal_conv1d/cuda/forward_time.cuh"
#include "causal_conv1d/cuda/update_any.cuh"
#include "causal_conv1d/cuda/update_pairs.cuh"
#include "causal_conv1d/launch.h"
#include "common/kernel_launch.cuh"

namespace mamba {

template <typename T>
cudaError_t launch_conv_forward(const MambaCausalConv1d& p, int kernel) {
    return launch_row<T, kConvForwardKernels>(conv_forward_table, kernel, [&](auto row) {
        constexpr ConvForwardKernel k = kConvForwardKernels[decltype(row)::kRow];
        if constexpr (k.lanes == ConvLanes::kTime) {
            return launch_forward_time<T, k.width4_silu>(p);
        } else {
            return launch_forward_channel<T, k.channels, k.width4_silu>(p);
        }
    });
}

template <typename T>
cudaError_t launch_conv_backward(const ConvBackward& q, const ConvBackwardPlan& plan, int kernel) {
    return launch_row<T, kConvBackwardKernels>(conv_backward_table, kernel, [&](auto row) {
        constexpr ConvBackwardKernel k = kConvBackwardKernels[decltype(row)::kRow];
        if constexpr (k.lanes == ConvLanes::kTime) {
            return launch_backward_time<T, k.width4_silu>(q, plan);
        } else {
            constexpr int kChannels = k.channel_bytes == 0 ? 1 : k.channel_bytes / static_cast<int>(sizeof(T));
            return launch_backward_channel<T, kChannels, k.width4_silu>(q, plan);
        }
    });
}

template <typename T>
cudaError_t launch_conv_update(const MambaCausalConv1dUpdate& p, int kernel) {
    return launch_row<T, kConvUpdateKernels>(conv_update_table, kernel, [&](auto row) {
        constexpr ConvUpdateKernel k = kConvUpdateKernels[decltype(row)::kRow];
        if constexpr (k.pairs) {
            return launch_update_pairs<T, k.channel_last>(p);
        } else {
            return launch_update_any<T>(p);
        }
    });
}

template <typename T>
ConvLaunchers ConvLaunchers::of() {
    ConvLaunchers launchers;
    launchers.forward = launch_conv_forward<T>;
    launchers.backward = launch_conv_backward<T>;
    launchers.update = launch_conv_update<T>;
    return launchers;
}

}  // namespace mamba
