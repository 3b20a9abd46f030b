// Causal convolution, backward: which kernel a call runs.
#pragma once

#include "causal_conv1d/cuda/backward_channel.cuh"
#include "causal_conv1d/cuda/backward_strided.cuh"
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
            return launch_backward_channel<T, kVector>(params, plan);
        }
        return launch_backward_channel<T, 1>(params, plan);
    }
    if (rows_lie_alike(forward, x, x) && rows_lie_alike(forward, x, dout) && rows_lie_alike(forward, x, dx)) {
        const bool aligned = rows_are_whole_vectors(forward, x);
        return is_backwards(forward) ? launch_backward_time<T, true>(params, plan, aligned)
                                     : launch_backward_time<T, false>(params, plan, aligned);
    }
    return launch_backward_strided<T>(params, plan);
}

}  // namespace mamba
