// Causal convolution, backward, one step a lane and any strides: for layouts that the other kernels do not take.
#pragma once

#include "causal_conv1d/cuda/backward_common.cuh"

namespace mamba {

// A warp takes one channel and every item of one slot. It walks a segment backwards, 32 steps at a time, so that the g after
// them is in a register; only a segment's own end computes it anew.
template <typename T>
__global__ void __launch_bounds__(kConvThreads, 2)
    causal_conv1d_backward_strided(const ConvBackward params, const int segment, const int64_t segments) {
    const MambaCausalConv1d& forward = params.forward;
    const ConvOptions options = conv_options<false, true>(forward);
    const int lane = threadIdx.x & 31;
    const int64_t channel = static_cast<int64_t>(blockIdx.x) * kConvWarps + (threadIdx.x >> 5);
    const int64_t slot = blockIdx.y;
    if (channel >= forward.dim) {
        return;
    }
    const ConvTaps taps = load_taps(forward, channel);

    ConvSums sums = {};
    for (int64_t item = slot; item < forward.batch * segments; item += params.slots) {
        const int64_t batch = item / segments;
        const int64_t begin = (item - batch * segments) * segment;
        const int length = static_cast<int>(forward.seqlen - begin < segment ? forward.seqlen - begin : segment);
        const T* dout =
            static_cast<const T*>(params.dout) + batch * params.dout_batch_stride + channel * params.dout_dim_stride;
        T* dx = static_cast<T*>(params.dx) + batch * params.dx_batch_stride + channel * params.dx_dim_stride;

        float after = lane < kConvHalo ? conv_gradient<T>(params, batch, channel, begin + length + lane, taps) : 0.0f;
        for (int start = (length - 1) / 32 * 32; start >= 0; start -= 32) {
            const int64_t t = begin + start + lane;
            const bool inside = start + lane < length;
            float inputs[kConvHalo + 1] = {};
            float g[kConvHalo + 1] = {};
            uint32_t lag_mask = 0;
            uint32_t lead_mask = 0;
            if (inside) {
#pragma unroll
                for (int i = 0; i <= kConvHalo; ++i) {
                    inputs[i] = conv_input<T>(forward, batch, channel, t - kConvHalo + i);
                }
                if (options.masked) {
                    lag_mask = sequence_mask<1, false>(forward.seq_idx + batch * forward.seqlen, t, forward.seqlen);
                    lead_mask = sequence_mask<1, true>(forward.seq_idx + batch * forward.seqlen, t, forward.seqlen);
                }
                const float dout_value = to_float(dout[t * params.dout_len_stride]);
                gradients<1>(options, taps, inputs, lag_mask, &dout_value, g);
            }
            const float own = g[0];
#pragma unroll
            for (int k = 1; k <= kConvHalo; ++k) {  // from the lanes that follow, then from the steps after
                g[k] = __shfl_sync(kFullWarp, lane < k ? after : own, (lane + k) & 31);
            }
            after = own;
            if (inside) {
                float dx_value;
                accumulate<1>(options, inputs, lag_mask, g, sums);
                input_gradients<1>(options, taps, g, lead_mask, &dx_value);
                dx_value += final_state_gradient<T>(params, batch, channel, t);
                T& at = dx[t * params.dx_len_stride];
                at = from_float<T>(params.add ? dx_value + to_float(at) : dx_value);
            }
        }
        if (params.dinitial_states != nullptr && begin == 0 && lane == 0) {
            store_initial_gradient<T>(params, batch, channel, taps);
        }
    }

    reduce_sums(32, sums);
    if (lane == 0) {
        store_sums(params, slot, channel, sums);
    }
}

template <typename T>
cudaError_t launch_backward_strided(const ConvBackward& params, const ConvBackwardPlan& plan) {
    const MambaCausalConv1d& forward = params.forward;
    const Grid grid(ceil_div(forward.dim, kConvWarps), plan.slots);
    return launch_kernel(causal_conv1d_backward_strided<T>, grid, kConvThreads, 0, forward.run.stream, params,
                         static_cast<int>(plan.segment), plan.segments);
}

}  // namespace mamba
