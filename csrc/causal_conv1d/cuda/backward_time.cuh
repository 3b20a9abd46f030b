// Causal convolution, backward, lanes along time: for tensors whose steps are neighbours in memory.
#pragma once

#include "causal_conv1d/cuda/backward_common.cuh"
#include "causal_conv1d/cuda/time_common.cuh"

namespace mamba {

// A group of 2^lanes_log2 lanes takes one channel and every item of one slot. It walks a segment backwards, a vector of steps
// a lane and tile, so that the g after a tile is in a register; only a segment's own end computes it anew. The tile before
// is on its way while one is computed. `slack`: by how many steps a row's vectors may reach beyond its own length.
// kWhole: width 4 and silu, one sequence, no states, forward in time, and rows that begin and end at multiples of 16 bytes and
// fill a warp. Instructions bind there: tiles begin at a segment's end, so that only its first steps can be less than a tile,
// and ask for nothing but that.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kConvThreads, kWhole ? 4 : 3)
    causal_conv1d_backward_time(const ConvBackward params, const int lanes_log2, const unsigned segment,
                                const unsigned segments, const int slack) {
    static constexpr int V = kTimeVector<T>;
    static_assert(!kWhole || sizeof(T) == 2, "vectors of 8");
    const bool reverse = !kWhole && is_backwards(params.forward);
    const MambaCausalConv1d& forward = params.forward;
    const ConvOptions row_options = conv_options<kWhole>(forward);
    const int lanes = kWhole ? 32 : 1 << lanes_log2;
    const int lane = threadIdx.x & 31;
    const int sublane = lane & (lanes - 1);
    const bool last = sublane == lanes - 1;
    const int lane_before = (lane & ~(lanes - 1)) | ((sublane - 1) & (lanes - 1));
    const int lane_after = (lane & ~(lanes - 1)) | ((sublane + 1) & (lanes - 1));
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kConvWarps + (threadIdx.x >> 5);
    const int64_t first_channel = kWhole ? warp : warp << (5 - lanes_log2);
    if (first_channel >= forward.dim) {
        return;
    }
    int64_t channel = kWhole ? first_channel : first_channel + (lane >> lanes_log2);
    const bool active = kWhole || channel < forward.dim;  // idle lanes stay for the shuffles
    channel = active ? channel : first_channel;
    const unsigned slot = blockIdx.y;
    const unsigned slots = gridDim.y;
    const int tile = lanes * V;
    const RawTaps raw_taps = load_raw_taps<kWhole>(forward, channel);

    ConvSums sums = {};
    unsigned index = slot % segments;  // of the segment
    for (int64_t batch = slot / segments; batch < forward.batch;) {
        const T* x = static_cast<const T*>(forward.x) + batch * forward.x_batch_stride + channel * forward.x_dim_stride;
        const T* dout =
            static_cast<const T*>(params.dout) + batch * params.dout_batch_stride + channel * params.dout_dim_stride;
        T* dx = static_cast<T*>(params.dx) + batch * params.dx_batch_stride + channel * params.dx_dim_stride;
        const int phase = kWhole ? 0 : row_phase<T>(x, reverse);
        const int64_t grid_begin = static_cast<int64_t>(index) * segment;
        const bool more = index + 1 < segments;
        const int64_t grid_left = forward.seqlen + slack - grid_begin;
        const int grid_length = more ? static_cast<int>(segment) : static_cast<int>(grid_left);
        const int64_t begin = grid_begin - phase;
        // From here on steps count from `begin`; this segment holds first <= step < end.
        const int first = index == 0 ? phase : 0;
        const int end = !active ? 0 : (more ? static_cast<int>(segment) : static_cast<int>(forward.seqlen - begin));
        const int readable = index == 0 ? first : -V;  // how far back x reaches, as far as it is asked for
        x = opaque(at_step(x, begin, reverse));
        dout = opaque(at_step(dout, begin, reverse));
        dx = opaque(at_step(dx, begin, reverse));

        const int last_tile = kWhole ? grid_length - tile : (grid_length - 1) / tile * tile;
        int offset = last_tile + sublane * V;
        const auto load_x = [&](int at) {
            if (at >= readable && (kWhole || at + V <= end)) {
                return load_vector<T>(x, at, reverse);
            }
            Packed<T, V> vector = kWhole ? packed_zero<T, V>() : load_some<T>(x, at, first, end, reverse);
            if (!kWhole && at >= -V && at < end) {
                add_initial_states<T, V>(forward, batch, channel, begin + at, vector);
            }
            return vector;
        };
        const auto load_dout = [&](int at) {
            if (kWhole ? at >= 0 : at >= first && at + V <= end) {
                return load_vector<T>(dout, at, reverse);
            }
            return kWhole ? packed_zero<T, V>() : load_some<T>(dout, at, first, end, reverse);
        };
        // The end of the vector before a tile, for the lane that has the tile's last one; kWhole: for each lane that before its
        // own.
        const auto load_wrapped = [&](int at) {
            Packed<T, V> vector = packed_zero<T, V>();
            if constexpr (kWhole) {
                at += tile - V;
                if (at >= readable) {
                    const Packed<T, V / 2> half = packed_load<T, V / 2>(x + at + V / 2);
                    vector.word[2] = half.word[0];
                    vector.word[3] = half.word[1];
                }
            } else if (last) {
                vector = load_x(at);
            }
            return vector;
        };
        Packed<T, V> next_x = load_x(offset);
        Packed<T, V> wrapped = load_wrapped(offset - tile);
        Packed<T, V> next_dout = load_dout(offset);
        const ConvTaps taps = convert_taps<kWhole>(forward, raw_taps);
        const ConvTaps usual_taps = kWhole ? scaled(taps) : taps;
        const float unit = kWhole ? gradient_unit() : 1.0f;
        float after[kConvHalo] = {};  // in a group's first lane: g of the steps that follow the tile in hand
        if (more) {                   // then a whole warp shares the row
            const float g = lane < kConvHalo ? conv_gradient<T>(params, batch, channel, begin + end + lane, taps) : 0.0f;
#pragma unroll
            for (int k = 0; k < kConvHalo; ++k) {
                after[k] = __shfl_sync(kFullWarp, kWhole ? g * unit : g, k);
            }
        }
        for (int start = last_tile; start > -tile; start -= tile, offset -= tile) {
            float inputs[kConvHalo + V];
            float g[V + kConvHalo];
            unpack<T, V>(next_x, inputs + kConvHalo);
            unpack<T, V>(next_dout, g);
            if constexpr (kWhole) {
                inputs_from_end<T>(wrapped.word, inputs);
            } else {
                inputs_before(next_x, wrapped, last, lane_before, inputs);
            }
            next_x = load_x(offset - tile);
            next_dout = load_dout(offset - tile);
            wrapped = load_wrapped(offset - 2 * tile);
            if (kWhole && lane % 8 == 0 && offset >= 2 * tile) {  // the tile before that comes as far as the L2
                prefetch_to_L2(at_step(x, offset - 2 * tile, reverse));
                prefetch_to_L2(at_step(dout, offset - 2 * tile, reverse));
            }

            const bool whole = kWhole || (offset >= first && offset + V <= end);
            uint32_t lag_mask = 0;
            uint32_t lead_mask = 0;
            ConvOptions options = row_options;
            options.masked = options.masked && offset < end;
            if (options.masked) {
                const SequenceMasks masks =
                    sequence_masks<V>(forward.seq_idx + batch * forward.seqlen, begin + offset, forward.seqlen);
                lag_mask = masks.lag;
                lead_mask = masks.lead;
                options.masked = (lag_mask & lead_mask) != kOneSequence<V>;
            }
            if constexpr (kWhole) {  // zero before the segment, where dout is
                scaled_gradients<V>(usual_taps, unit, inputs, g, g);
            } else {
                gradients<V>(options, taps, inputs, lag_mask, g, g);
            }
            if (!whole) {
#pragma unroll
                for (int j = 0; j < V; ++j) {  // beyond the ends even NaN counts as nothing
                    g[j] = offset + j >= first && offset + j < end ? g[j] : 0.0f;
                }
            }
#pragma unroll
            for (int k = 0; k < kConvHalo; ++k) {
                g[V + k] = __shfl_sync(kFullWarp, sublane == 0 ? after[k] : g[k], lane_after);
                after[k] = g[k];
            }
            float dx_values[V];
            if constexpr (kWhole) {
                accumulate<V>(options, inputs, lag_mask, g, sums);
                input_gradients<V>(options, usual_taps, g, lead_mask, dx_values);
            }
            if (kWhole ? offset >= 0 : offset < end) {
                if constexpr (!kWhole) {
                    accumulate<V>(options, inputs, lag_mask, g, sums);
                    input_gradients<V>(options, taps, g, lead_mask, dx_values);
                }
                if (!kWhole && params.dfinal_states != nullptr && begin + offset + V + kConvHalo > forward.seqlen) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        dx_values[j] += final_state_gradient<T>(params, batch, channel, begin + offset + j);
                    }
                }
                if (params.add) {  // from the L2: registers are scarce
                    float before[V];
                    unpack<T, V>(whole ? load_vector<T>(dx, offset, reverse) : load_some<T>(dx, offset, first, end, reverse),
                                 before);
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        dx_values[j] += before[j];
                    }
                    if (offset - tile >= first) {
                        prefetch_to_L2(at_step(dx, offset - tile, reverse));
                    }
                }
                if (whole) {
                    store_vector<T>(dx, offset, reverse, pack<T, V>(dx_values));
                } else {
                    store_some<T>(dx, offset, first, end, reverse, dx_values);
                }
            }
        }
        if (!kWhole && params.dinitial_states != nullptr && index == 0 && active && sublane == 0) {
            store_initial_gradient<T>(params, batch, channel, taps);
        }
        index += slots;
        batch += index / segments;
        index %= segments;
    }

    if constexpr (kWhole) {
        scale_back(sums);
    }
    reduce_sums(lanes, sums);
    if (active && sublane == 0) {
        store_sums(params, slot, channel, sums);
    }
}

template <typename T, bool kWhole>
cudaError_t launch_backward_time(const ConvBackward& params, const ConvBackwardPlan& plan) {
    const MambaCausalConv1d& forward = params.forward;
    const TimeLanes lanes = time_lanes(forward);
    const int64_t groups = ceil_div(forward.dim, static_cast<int64_t>(32) >> lanes.log2);
    const Grid grid(ceil_div(groups, kConvWarps), plan.slots);
    return launch_kernel(causal_conv1d_backward_time<T, kWhole>, grid, kConvThreads, 0, forward.run.stream, params, lanes.log2,
                         static_cast<unsigned>(plan.segment), static_cast<unsigned>(plan.segments), lanes.slack);
}

}  // namespace mamba
