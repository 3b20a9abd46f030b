// Causal convolution, backward, lanes along time: for tensors whose steps are neighbours in memory.
#pragma once

#include "causal_conv1d/backward_common.cuh"

namespace mamba {

// A group of 2^lanes_log2 lanes takes one channel and every item of one slot. It walks a segment backwards in tiles of
// lanes * V steps, so that the g after a tile is in a register; only a segment's own end computes it anew.
template <typename T, int V>
__global__ void __launch_bounds__(kConvThreads, 2)
    causal_conv1d_backward_time(const MambaCausalConv1dBackward params, const int lanes_log2, const int64_t segments) {
    const MambaCausalConv1d& forward = params.forward;
    const int lanes = 1 << lanes_log2;
    const int lane = threadIdx.x & 31;
    const int sublane = lane & (lanes - 1);
    const int group_start = lane & ~(lanes - 1);
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kConvWarps + (threadIdx.x >> 5);
    const int64_t channel_groups = ceil_div(forward.dim, static_cast<int64_t>(32) >> lanes_log2);
    const int64_t slot = warp / channel_groups;
    if (slot >= params.slots) {
        return;
    }
    int64_t channel = ((warp - slot * channel_groups) << (5 - lanes_log2)) + (lane >> lanes_log2);
    const bool active = channel < forward.dim;  // idle lanes stay for the shuffles
    channel = active ? channel : forward.dim - 1;
    const ConvTaps taps = load_taps(forward, channel);
    const int64_t x_step = V == 1 ? forward.x_len_stride : 1;
    const int64_t dout_step = V == 1 ? params.dout_len_stride : 1;
    const int64_t dx_step = V == 1 ? params.dx_len_stride : 1;
    const int tile = lanes * V;

    ConvSums sums = {};
    for (int64_t item = slot; item < forward.batch * segments; item += params.slots) {
        const int64_t batch = item / segments;
        const int64_t begin = (item - batch * segments) * kConvSegment;
        const int length = static_cast<int>(forward.seqlen - begin < kConvSegment ? forward.seqlen - begin : kConvSegment);
        const T* x =
            static_cast<const T*>(forward.x) + batch * forward.x_batch_stride + channel * forward.x_dim_stride + begin * x_step;
        const T* dout = static_cast<const T*>(params.dout) + batch * params.dout_batch_stride +
                        channel * params.dout_dim_stride + begin * dout_step;
        T* dx = static_cast<T*>(params.dx) + batch * params.dx_batch_stride + channel * params.dx_dim_stride + begin * dx_step;
        const int32_t* seq_idx = forward.seq_idx != nullptr ? forward.seq_idx + batch * forward.seqlen : nullptr;

        float after[kConvHalo];  // g of the steps that follow the tile in hand
#pragma unroll
        for (int k = 0; k < kConvHalo; ++k) {
            after[k] = 0.0f;
            if (active && sublane >= lanes - kConvHalo) {
                after[k] = conv_gradient<T>(params, batch, channel, begin + length + k, taps);
            }
        }
        const int last_tile = (length + tile - 1) / tile - 1;
        Packed<T, V> next_x = packed_zero<T, V>();
        Packed<T, V> next_dout = packed_zero<T, V>();
        if (active && length > 0 && last_tile * tile + sublane * V < length) {
            next_x = packed_load<T, V>(x + (last_tile * tile + sublane * V) * x_step);
            next_dout = packed_load<T, V>(dout + (last_tile * tile + sublane * V) * dout_step);
        }
        for (int start = last_tile * tile; start >= 0; start -= tile) {
            const int offset = start + sublane * V;
            const int64_t t = begin + offset;
            const bool inside = active && offset < length;
            const Packed<T, V> packed_x = next_x;
            const Packed<T, V> packed_dout = next_dout;
            if (active && start > 0) {  // the tile before, while this one is computed
                next_x = packed_load<T, V>(x + (offset - tile) * x_step);
                next_dout = packed_load<T, V>(dout + (offset - tile) * dout_step);
            }

            float inputs[kConvHalo + V];
            float dout_values[V];
            unpack<T, V>(packed_x, inputs + kConvHalo);
            unpack<T, V>(packed_dout, dout_values);
#pragma unroll
            for (int i = 0; i < kConvHalo; ++i) {
                if constexpr (V == 1) {
                    inputs[i] = inside ? conv_input<T>(forward, batch, channel, t - kConvHalo + i) : 0.0f;
                } else {
                    inputs[i] = __shfl_up_sync(kFullWarp, inputs[V + i], 1);
                }
            }
            if (V > 1 && sublane == 0 && inside) {
#pragma unroll
                for (int i = 0; i < kConvHalo; ++i) {
                    inputs[i] = conv_input<T>(forward, batch, channel, t - kConvHalo + i);
                }
            }

            uint32_t lag_mask = 0;
            uint32_t lead_mask = 0;
            if (seq_idx != nullptr && inside) {
                lag_mask = sequence_mask<V, false>(seq_idx, t, forward.seqlen);
                lead_mask = sequence_mask<V, true>(seq_idx, t, forward.seqlen);
            }
            float g[V + kConvHalo];
            gradients<V>(forward, taps, inputs, lag_mask, dout_values, g);
#pragma unroll
            for (int j = 0; j < V; ++j) {
                g[j] = inside ? g[j] : 0.0f;  // beyond the end even NaN counts as nothing
            }
            // g of the next steps: from the lanes that follow, for a group's last lanes from the tile after.
            if constexpr (V == 1) {
#pragma unroll
                for (int k = 1; k <= kConvHalo; ++k) {
                    const float neighbour = __shfl_down_sync(kFullWarp, g[0], k);
                    float beyond = after[0];
                    beyond = sublane + k - lanes == 1 ? after[1] : beyond;
                    beyond = sublane + k - lanes == 2 ? after[2] : beyond;
                    g[k] = sublane + k < lanes ? neighbour : beyond;
                }
#pragma unroll
                for (int k = 0; k < kConvHalo; ++k) {
                    after[k] = __shfl_sync(kFullWarp, g[0], group_start + k);
                }
            } else {
#pragma unroll
                for (int k = 0; k < kConvHalo; ++k) {
                    const float neighbour = __shfl_down_sync(kFullWarp, g[k], 1);
                    g[V + k] = sublane + 1 < lanes ? neighbour : after[k];
                    after[k] = __shfl_sync(kFullWarp, g[k], group_start);
                }
            }

            if (inside) {
                accumulate<V>(forward, inputs, lag_mask, g, sums);
                float dx_values[V];
                input_gradients<V>(forward, taps, g, lead_mask, dx_values);
                if (params.dfinal_states != nullptr && t + V + kConvHalo > forward.seqlen) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        dx_values[j] += final_state_gradient<T>(params, batch, channel, t + j);
                    }
                }
                packed_store<T, V>(dx + offset * dx_step, pack<T, V>(dx_values));
            }
        }
        if (params.dinitial_states != nullptr && begin == 0 && active && sublane == 0) {
            store_initial_gradient<T>(params, batch, channel, taps);
        }
    }

    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int k = 0; k < kConvMaxWidth; ++k) {
            sums.weight[k] += __shfl_xor_sync(kFullWarp, sums.weight[k], distance);
        }
        sums.bias += __shfl_xor_sync(kFullWarp, sums.bias, distance);
    }
    if (active && sublane == 0) {
        const int64_t row = slot * forward.dim + channel;
#pragma unroll
        for (int k = 0; k < kConvMaxWidth; ++k) {
            if (k < forward.width) {
                params.dweight[row * forward.width + forward.width - 1 - k] = sums.weight[k];
            }
        }
        if (params.dbias != nullptr) {
            params.dbias[row] = sums.bias;
        }
    }
}

template <typename T, int V>
cudaError_t launch_backward_time(const MambaCausalConv1dBackward& params) {
    const MambaCausalConv1d& forward = params.forward;
    // With one step a lane, a group must hold the kConvHalo steps that the tile before it asks for.
    const int lanes_log2 = ceil_log2(ceil_div(forward.seqlen, V), V == 1 ? 2 : 0, 5);
    const int64_t channel_groups = ceil_div(forward.dim, static_cast<int64_t>(32) >> lanes_log2);
    const int64_t blocks = ceil_div(channel_groups * params.slots, kConvWarps);
    causal_conv1d_backward_time<T, V>
        <<<static_cast<unsigned>(blocks), kConvThreads, 0, static_cast<cudaStream_t>(forward.run.stream)>>>(
            params, lanes_log2, causal_conv1d_segments(forward));
    return cudaGetLastError();
}

}  // namespace mamba
