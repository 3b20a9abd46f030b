// Causal convolution, forward: which kernel a call runs. It moves each element once, so the kernels are about wide, early
// loads.
#pragma once

#include "causal_conv1d/cuda/forward_channel.cuh"
#include "causal_conv1d/cuda/forward_time.cuh"

namespace mamba {

template <typename T>
cudaError_t launch_conv_forward(const MambaCausalConv1d& params) {
    const ConvLayout x = {params.x, params.x_batch_stride, params.x_dim_stride, params.x_len_stride};
    const ConvLayout out = {params.out, params.out_batch_stride, params.out_dim_stride, params.out_len_stride};
    if (is_channel_last(params)) {
        constexpr int kVector = 4;  // more channels a thread need more registers than hide the latency
        if (can_vectorise_channels(params, x, kVector) && can_vectorise_channels(params, out, kVector)) {
            if constexpr (sizeof(T) == 2) {
                if (is_plain(params)) {
                    return launch_forward_channel<T, kVector, true>(params);
                }
            }
            return launch_forward_channel<T, kVector, false>(params);
        }
        return launch_forward_channel<T, 1, false>(params);
    }
    if (rows_lie_alike(params, x, x) && rows_lie_alike(params, x, out)) {
        constexpr int V = kTimeVector<T>;
        const bool aligned = rows_are_whole_vectors(params, x);
        const int slack = aligned ? 0 : V - 1;
        const int lanes_log2 = ceil_log2(ceil_div(params.seqlen + slack, V), 0, 5);
        if constexpr (sizeof(T) == 2) {
            if (is_plain(params) && params.initial_states == nullptr && aligned && lanes_log2 == 5) {
                return launch_forward_time<T, true>(params, slack, lanes_log2);
            }
        }
        return launch_forward_time<T, false>(params, slack, lanes_log2);
    }
    return launch_forward_channel<T, 1, false>(params);
}

}  // namespace mamba
