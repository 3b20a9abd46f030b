// Causal convolution, backward: which kernel a call runs.
#pragma once

#include "causal_conv1d/backward_channel.cuh"
#include "causal_conv1d/backward_time.cuh"

namespace mamba {

template <typename T>
cudaError_t causal_conv1d_backward_launch(const MambaCausalConv1dBackward& params) {
    const MambaCausalConv1d& forward = params.forward;
    const ConvLayout x = {forward.x, forward.x_batch_stride, forward.x_dim_stride, forward.x_len_stride};
    const ConvLayout dout = {params.dout, params.dout_batch_stride, params.dout_dim_stride, params.dout_len_stride};
    const ConvLayout dx = {params.dx, params.dx_batch_stride, params.dx_dim_stride, params.dx_len_stride};
    const bool channel_last = is_channel_last(forward);
    constexpr int kTimeVector = 16 / static_cast<int>(sizeof(T));
    constexpr int kChannelVector = 8 / static_cast<int>(sizeof(T));  // wider needs more registers than hide the latency
    const int vector = channel_last ? kChannelVector : kTimeVector;
    const bool vectorise = can_vectorise(forward, x, channel_last, vector) &&
                           can_vectorise(forward, dout, channel_last, vector) &&
                           can_vectorise(forward, dx, channel_last, vector);
    if (channel_last) {
        return vectorise ? launch_backward_channel<T, kChannelVector>(params) : launch_backward_channel<T, 1>(params);
    }
    if (vectorise) {
        return launch_backward_time<T, kTimeVector>(params);
    }
    return launch_backward_time<T, 1>(params);
}

}  // namespace mamba
