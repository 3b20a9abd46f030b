// Causal convolution, forward, lanes along time: for tensors whose steps are neighbours in memory.
#pragma once

#include "causal_conv1d/cuda/time_common.cuh"

namespace mamba {

// Vectors in flight a lane: with 24 warps four are enough to cover memory latency.
template <bool kWhole>
constexpr int kForwardTimeUnroll = kWhole ? 4 : 2;

// A group of 2^lanes_log2 lanes takes one chunk of one row, a vector of steps a lane and round. The steps before a lane's
// own come from its neighbour's registers. `slack`: by how many steps a row's vectors may reach beyond its own length.
// kWhole: width 4 and silu, one sequence, no initial states, and rows that begin and end at multiples of 16 bytes and fill a
// warp.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kConvThreads, 4)
    causal_conv1d_forward_time(const MambaCausalConv1d params, const int lanes_log2, const unsigned chunks, const int slack) {
    constexpr int V = kTimeVector<T>;
    constexpr int kUnroll = kForwardTimeUnroll<kWhole>;
    const bool reverse = is_backwards(params);
    const int width = kWhole ? kConvMaxWidth : params.width;
    const bool masked = !kWhole && params.seq_idx != nullptr;
    const int lanes = kWhole ? 32 : 1 << lanes_log2;
    const int lane = threadIdx.x & 31;
    const int sublane = lane & (lanes - 1);
    const bool last = sublane == lanes - 1;
    const int source = (lane & ~(lanes - 1)) | ((sublane - 1) & (lanes - 1));
    const unsigned warp = blockIdx.x * kConvWarps + (threadIdx.x >> 5);
    const unsigned row_group = warp / chunks;
    const unsigned chunk = warp - row_group * chunks;
    const int64_t first_channel = static_cast<int64_t>(row_group) << (kWhole ? 0 : 5 - lanes_log2);
    const int64_t batch = grid_batch();
    if (first_channel >= params.dim || batch >= params.batch) {
        return;
    }
    int64_t channel = kWhole ? first_channel : first_channel + (lane >> lanes_log2);
    const bool active = kWhole || channel < params.dim;  // idle lanes stay for the shuffles
    channel = active ? channel : first_channel;
    const int64_t grid_begin = static_cast<int64_t>(chunk) * (lanes * V * kUnroll);
    const int64_t grid_left = params.seqlen + slack - grid_begin;
    const int rounds_end = static_cast<int>(grid_left < lanes * V * kUnroll ? grid_left : lanes * V * kUnroll);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const RawTaps raw_taps = load_raw_taps<kWhole>(params, channel);

    if (params.final_states != nullptr && chunk == 0 && active) {
        for (int i = sublane; i < params.width - 1; i += lanes) {
            store_final_state<T>(params, batch, channel, i);
        }
    }
    const T* x = static_cast<const T*>(params.x) + batch * params.x_batch_stride + channel * params.x_dim_stride;
    T* out = static_cast<T*>(params.out) + batch * params.out_batch_stride + channel * params.out_dim_stride;
    const int phase = kWhole ? 0 : row_phase<T>(x, reverse);
    const int64_t begin = grid_begin - phase;
    // From here on steps count from `begin`; this chunk may touch first <= step < end of its vectors' steps.
    const int first = chunk == 0 ? phase : 0;
    const int64_t left = params.seqlen - begin;
    const int end = active ? static_cast<int>(left < 2 * lanes * V * kUnroll ? left : 2 * lanes * V * kUnroll) : 0;
    x = opaque(at_step(x, begin, reverse));
    out = opaque(at_step(out, begin, reverse));

    Packed<T, V> loaded[kUnroll];
    Packed<T, V> before = packed_zero<T, V>();  // the vector before the chunk, in a group's last lane
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        const int offset = (u * lanes + sublane) * V;
        loaded[u] = packed_zero<T, V>();
        if (offset >= first && offset + V <= end) {
            loaded[u] = load_vector<true, T>(x, offset, reverse);
        }
    }
    if (last && chunk > 0 && active) {
        before = load_vector<true, T>(x, -V, reverse);
    }
    if (!kWhole && last && chunk == 0 && active) {
        add_initial_states<T, V>(params, batch, channel, begin - V, before);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        const int offset = (u * lanes + sublane) * V;
        if (!kWhole && offset < end && (offset < first || offset + V > end)) {
            loaded[u] = load_some<T>(x, offset, first, end, reverse);
            if (!kWhole) {
                add_initial_states<T, V>(params, batch, channel, begin + offset, loaded[u]);
            }
        }
    }
    const ConvTaps taps = convert_taps<kWhole>(params, raw_taps);

#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        if (u * lanes * V >= rounds_end) {
            break;
        }
        const int offset = (u * lanes + sublane) * V;
        float inputs[kConvHalo + V];
        inputs_before(loaded[u], u > 0 ? loaded[u > 0 ? u - 1 : 0] : before, last, source, inputs);
        unpack<T, V>(loaded[u], inputs + kConvHalo);
        if (offset < end) {
            uint32_t mask = 0;
            if (masked) {
                mask = sequence_mask<V, false>(params.seq_idx + batch * params.seqlen, begin + offset, params.seqlen);
            }
            float sums[V];
            convolve<V>(taps, width, inputs, masked && mask != kOneSequence<V>, mask, sums);
            if (kWhole || params.silu) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    sums[j] = silu(sums[j]);
                }
            }
            if (kWhole || (offset >= first && offset + V <= end)) {
                store_vector<true, T>(out, offset, reverse, pack<T, V>(sums));
            } else {
                store_some<T>(out, offset, first, end, reverse, sums);
            }
        }
    }
}

template <typename T, bool kWhole>
cudaError_t launch_forward_time(const MambaCausalConv1d& params) {
    const TimeLanes lanes = time_lanes(params);
    const int64_t tile = (static_cast<int64_t>(kTimeVector<T>) << lanes.log2) * kForwardTimeUnroll<kWhole>;
    const int64_t chunks = params.seqlen + lanes.slack > tile ? ceil_div(params.seqlen + lanes.slack, tile) : 1;
    const int64_t row_groups = ceil_div(params.dim, static_cast<int64_t>(32) >> lanes.log2);
    const Grid grid = batch_grid(ceil_div(row_groups * chunks, kConvWarps), params.batch);
    return launch_programmatic_dependent(causal_conv1d_forward_time<T, kWhole>, grid, kConvThreads, 0, params.run.stream,
                                         params, lanes.log2, static_cast<unsigned>(chunks), lanes.slack);
}

}  // namespace mamba
