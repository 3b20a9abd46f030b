// Causal convolution, backward: which kernel a call runs.
#pragma once

#include "causal_conv1d/cuda/backward_channel.cuh"
#include "causal_conv1d/cuda/backward_time.cuh"

namespace mamba {

template <typename T>
cudaError_t launch_conv_backward(const ConvBackward& params, const ConvBackwardPlan& plan) {
    const MambaCausalConv1d& forward = params.forward;
    const ConvLayout x = {forward.x, forward.x_batch_stride, forward.x_dim_stride, forward.x_len_stride};
    const ConvLayout dout = {params.dout, params.dout_batch_stride, params.dout_dim_stride, params.dout_len_stride};
    const ConvLayout dx = {params.dx, params.dx_batch_stride, params.dx_dim_stride, params.dx_len_stride};
    if (is_channel_last(forward)) {
        constexpr int kVector = 8 / static_cast<int>(sizeof(T));  // wider needs more registers than hide the latency
        if (can_vectorise_channels(forward, x, kVector) && can_vectorise_channels(forward, dout, kVector) &&
            can_vectorise_channels(forward, dx, kVector)) {
            if constexpr (sizeof(T) == 2) {
                if (is_plain(params)) {
                    return launch_backward_channel<T, kVector, true>(params, plan);
                }
            }
            return launch_backward_channel<T, kVector, false>(params, plan);
        }
        return launch_backward_channel<T, 1, false>(params, plan);
    }
    if (rows_lie_alike(forward, x, x) && rows_lie_alike(forward, x, dout) && rows_lie_alike(forward, x, dx)) {
        constexpr int V = kTimeVector<T>;
        const bool aligned = rows_are_whole_vectors(forward, x);
        const int slack = aligned ? 0 : V - 1;
        const int lanes_log2 = ceil_log2(ceil_div(forward.seqlen + slack, V), 0, 5);
        if constexpr (sizeof(T) == 2) {
            const bool states = forward.initial_states != nullptr || params.dinitial_states != nullptr;
            if (is_plain(params) && !states && aligned && lanes_log2 == 5 && !is_backwards(forward)) {
                return launch_backward_time<T, true>(params, plan, slack, lanes_log2);
            }
        }
        return launch_backward_time<T, false>(params, plan, slack, lanes_log2);
    }
    return launch_backward_channel<T, 1, false>(params, plan);
}

}  // namespace mamba
