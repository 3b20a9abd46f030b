// Causal convolution, forward: which kernel a call runs. It moves each element once, so the kernels are about wide, early
// loads.
#pragma once

#include "causal_conv1d/cuda/forward_channel.cuh"
#include "causal_conv1d/cuda/forward_strided.cuh"
#include "causal_conv1d/cuda/forward_time.cuh"

namespace mamba {

template <typename T>
cudaError_t launch_conv_forward(const MambaCausalConv1d& params) {
    const ConvLayout x = {params.x, params.x_batch_stride, params.x_dim_stride, params.x_len_stride};
    const ConvLayout out = {params.out, params.out_batch_stride, params.out_dim_stride, params.out_len_stride};
    if (is_channel_last(params)) {
        constexpr int kVector = 4;  // more channels a thread need more registers than hide the latency
        if (can_vectorise_channels(params, x, kVector) && can_vectorise_channels(params, out, kVector)) {
            return launch_forward_channel<T, kVector>(params);
        }
        return launch_forward_channel<T, 1>(params);
    }
    if (rows_lie_alike(params, x, x) && rows_lie_alike(params, x, out)) {
        const bool aligned = rows_are_whole_vectors(params, x);
        return is_backwards(params) ? launch_forward_time<T, true>(params, aligned)
                                    : launch_forward_time<T, false>(params, aligned);
    }
    return launch_forward_strided<T>(params);
}

}  // namespace mamba
