// Causal convolution, backward, lanes along time: for tensors whose steps are neighbours in memory.
#pragma once

#include "causal_conv1d/cuda/backward_common.cuh"
#include "causal_conv1d/cuda/time_common.cuh"

namespace mamba {

// Which row a group of 2^log2 lanes takes, and a lane's place in the group.
struct TimeGroup {
    int lanes, sublane;
    bool last;
    int lane_before, lane_after;  // in the warp; of the group's ends those at the other end
    int64_t channel;
    bool active;  // idle lanes stay for the shuffles
};

template <bool kWhole>
__device__ __forceinline__ TimeGroup group_of_lane(int lanes_log2, int64_t first_channel, int64_t dim) {
    TimeGroup group;
    const int lane = threadIdx.x & 31;
    group.lanes = kWhole ? 32 : 1 << lanes_log2;
    group.sublane = lane & (group.lanes - 1);
    group.last = group.sublane == group.lanes - 1;
    group.lane_before = (lane & ~(group.lanes - 1)) | ((group.sublane - 1) & (group.lanes - 1));
    group.lane_after = (lane & ~(group.lanes - 1)) | ((group.sublane + 1) & (group.lanes - 1));
    const int64_t channel = kWhole ? first_channel : first_channel + (lane >> lanes_log2);
    group.active = kWhole || channel < dim;
    group.channel = group.active ? channel : first_channel;
    return group;
}

// A segment of a row. Steps count from `begin`, where a vector begins; it holds first <= step < end.
template <typename T, bool kWhole>
struct TimeSegment {
    static constexpr int V = kTimeVector<T>;
    const T* x;
    const T* dout;
    T* dx;
    int64_t batch, channel, begin;
    int first, end;
    int readable;     // how far back x reaches, as far as it is asked for
    int grid_length;  // from `begin` to the end of the longest row's vectors
    bool more;        // segments follow
    bool reverse;

    __device__ __forceinline__ TimeSegment(const ConvBackward& params, const ConvItem& item, const TimeGroup& group,
                                           unsigned segment, unsigned segments, int slack) {
        const MambaCausalConv1d& forward = params.forward;
        batch = item.batch;
        channel = group.channel;
        reverse = !kWhole && is_backwards(forward);
        x = static_cast<const T*>(forward.x) + batch * forward.x_batch_stride + channel * forward.x_dim_stride;
        dout = static_cast<const T*>(params.dout) + batch * params.dout_batch_stride + channel * params.dout_dim_stride;
        dx = static_cast<T*>(params.dx) + batch * params.dx_batch_stride + channel * params.dx_dim_stride;
        const int phase = kWhole ? 0 : row_phase<T>(x, reverse);
        const int64_t grid_begin = static_cast<int64_t>(item.index) * segment;
        more = item.index + 1 < segments;
        const int64_t grid_left = forward.seqlen + slack - grid_begin;
        grid_length = more ? static_cast<int>(segment) : static_cast<int>(grid_left);
        begin = grid_begin - phase;
        first = item.index == 0 ? phase : 0;
        end = !group.active ? 0 : (more ? static_cast<int>(segment) : static_cast<int>(forward.seqlen - begin));
        readable = item.index == 0 ? first : -V;
        x = opaque(at_step(x, begin, reverse));
        dout = opaque(at_step(dout, begin, reverse));
        dx = opaque(at_step(dx, begin, reverse));
    }
    __device__ __forceinline__ Packed<T, V> load_x(const MambaCausalConv1d& forward, int at) const {
        if (at >= readable && (kWhole || at + V <= end)) {
            return load_vector<!kWhole, T>(x, at, reverse);
        }
        Packed<T, V> vector = kWhole ? packed_zero<T, V>() : load_some<T>(x, at, first, end, reverse);
        if (!kWhole && at >= -V && at < end) {
            add_initial_states<T, V>(forward, batch, channel, begin + at, vector);
        }
        return vector;
    }
    __device__ __forceinline__ Packed<T, V> load_dout(int at) const {
        if (kWhole ? at >= 0 : at >= first && at + V <= end) {
            return load_vector<!kWhole, T>(dout, at, reverse);
        }
        return kWhole ? packed_zero<T, V>() : load_some<T>(dout, at, first, end, reverse);
    }
    // The end of the vector before a tile, whose vector of this lane is at `at`, for the group's last lane; kWhole: for each
    // lane that before its own.
    __device__ __forceinline__ Packed<T, V> load_before(const MambaCausalConv1d& forward, const TimeGroup& group,
                                                        int at) const {
        Packed<T, V> vector = packed_zero<T, V>();
        if constexpr (kWhole) {
            at -= V;
            if (at >= readable) {
                const Packed<T, V / 2> half = packed_load<T, V / 2>(x + at + V / 2);
                vector.word[2] = half.word[0];
                vector.word[3] = half.word[1];
            }
        } else if (group.last) {
            vector = load_x(forward, at - group.lanes * V);
        }
        return vector;
    }
};

// g of a tile's vector: inputs and dout in, g out, with that of the kConvHalo steps after the vector. after: in a group's first
// lane, g of the steps after the tile; then that of the steps after the next tile.
template <bool kWhole, typename T>
__device__ __forceinline__ void tile_gradients(const ConvOptions& options, const ConvTaps& taps, float unit,
                                               const TimeSegment<T, kWhole>& row, const TimeGroup& group, int offset,
                                               const float* inputs, uint32_t lag_mask, float* g, float (&after)[kConvHalo]) {
    constexpr int V = kTimeVector<T>;
    if constexpr (kWhole) {  // zero before the segment, where dout is
        scaled_gradients<V>(taps, unit, inputs, g, g);
    } else {
        gradients<V>(options, taps, inputs, lag_mask, g, g);
        if (offset < row.first || offset + V > row.end) {
#pragma unroll
            for (int j = 0; j < V; ++j) {  // beyond the ends even a NaN contributes zero
                g[j] = offset + j >= row.first && offset + j < row.end ? g[j] : 0.0f;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < kConvHalo; ++k) {
        g[V + k] = __shfl_sync(kFullWarp, group.sublane == 0 ? after[k] : g[k], group.lane_after);
        after[k] = g[k];
    }
}

// Adds what else there is to dx of a vector, and stores it.
template <bool kWhole, typename T>
__device__ __forceinline__ void store_tile(const ConvBackward& params, const TimeSegment<T, kWhole>& row, int offset, int tile,
                                           float* dx) {
    constexpr int V = kTimeVector<T>;
    const bool whole = kWhole || (offset >= row.first && offset + V <= row.end);
    if (!kWhole && params.dfinal_states != nullptr && row.begin + offset + V + kConvHalo > params.forward.seqlen) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            dx[j] += final_state_gradient<T>(params, row.batch, row.channel, row.begin + offset + j);
        }
    }
    if (params.add) {  // from the L2: registers are scarce
        float before[V];
        unpack<T, V>(whole ? load_vector<!kWhole, T>(row.dx, offset, row.reverse)
                           : load_some<T>(row.dx, offset, row.first, row.end, row.reverse),
                     before);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            dx[j] += before[j];
        }
        if (offset - tile >= row.first) {
            prefetch_to_L2(at_step(row.dx, offset - tile, row.reverse));
        }
    }
    if (whole) {
        store_vector<!kWhole, T>(row.dx, offset, row.reverse, pack<T, V>(dx));
    } else {
        store_some<T>(row.dx, offset, row.first, row.end, row.reverse, dx);
    }
}

// Walks a segment from its end. The tile before the one in hand is on its way.
template <bool kWhole, typename T>
__device__ __forceinline__ void walk_segment(const ConvBackward& params, const TimeSegment<T, kWhole>& row,
                                             const TimeGroup& group, const ConvTaps& taps, ConvSums& sums) {
    constexpr int V = kTimeVector<T>;
    const MambaCausalConv1d& forward = params.forward;
    const ConvOptions row_options = conv_options<kWhole>(forward);
    const int lane = threadIdx.x & 31;
    const int tile = group.lanes * V;
    const int last_tile = kWhole ? row.grid_length - tile : (row.grid_length - 1) / tile * tile;
    int offset = last_tile + group.sublane * V;
    Packed<T, V> next_x = row.load_x(forward, offset);
    Packed<T, V> vector_before = row.load_before(forward, group, offset);
    Packed<T, V> next_dout = row.load_dout(offset);
    const ConvTaps tile_taps = kWhole ? scaled(taps) : taps;
    const float unit = kWhole ? gradient_unit() : 1.0f;
    float after[kConvHalo] = {};
    if (row.more) {  // then a whole warp shares the row
        const float g =
            lane < kConvHalo ? conv_gradient<T>(params, row.batch, row.channel, row.begin + row.end + lane, taps) : 0.0f;
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
            inputs_from_end<T>(vector_before.word, inputs);
        } else {
            inputs_before(next_x, vector_before, group.last, group.lane_before, inputs);
        }
        next_x = row.load_x(forward, offset - tile);
        next_dout = row.load_dout(offset - tile);
        vector_before = row.load_before(forward, group, offset - tile);
        if (lane % 8 == 0 && offset >= 2 * tile) {  // the tile before that comes as far as the L2
            prefetch_to_L2(at_step(row.x, offset - 2 * tile, row.reverse));
            prefetch_to_L2(at_step(row.dout, offset - 2 * tile, row.reverse));
        }

        SequenceMasks masks = {0, 0};
        ConvOptions options = row_options;
        options.masked = options.masked && offset < row.end;
        if (options.masked) {
            masks = sequence_masks<V>(forward.seq_idx + row.batch * forward.seqlen, row.begin + offset, forward.seqlen);
            options.masked = (masks.lag & masks.lead) != kOneSequence<V>;
        }
        tile_gradients<kWhole, T>(options, tile_taps, unit, row, group, offset, inputs, masks.lag, g, after);
        float dx[V];
        if constexpr (kWhole) {
            accumulate<V>(options, inputs, masks.lag, g, sums);
            input_gradients<V>(options, tile_taps, g, masks.lead, dx);
        }
        if (kWhole ? offset >= 0 : offset < row.end) {
            if constexpr (!kWhole) {
                accumulate<V>(options, inputs, masks.lag, g, sums);
                input_gradients<V>(options, tile_taps, g, masks.lead, dx);
            }
            store_tile<kWhole, T>(params, row, offset, tile, dx);
        }
    }
}

// A group of 2^lanes_log2 lanes takes one channel and every item of one slot. It walks a segment backwards, a vector of steps
// a lane and tile, so that the g after a tile is in a register; only a segment's own end computes it anew. `slack`: by how many
// steps a row's vectors may reach beyond its own length.
// kWhole: width 4 and silu, one sequence, no states, forward in time, and rows that begin and end at multiples of 16 bytes and
// fill a warp. It is bound by instructions: tiles begin at a segment's end, so that only its first steps can be less than a
// tile, and ask for nothing but that.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kConvThreads, kWhole ? 4 : 3)
    causal_conv1d_backward_time(const ConvBackward params, const int lanes_log2, const unsigned segment,
                                const unsigned segments, const int slack) {
    static_assert(!kWhole || sizeof(T) == 2, "vectors of 8");
    const MambaCausalConv1d& forward = params.forward;
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kConvWarps + (threadIdx.x >> 5);
    const int64_t first_channel = kWhole ? warp : warp << (5 - lanes_log2);
    if (first_channel >= forward.dim) {
        return;
    }
    const TimeGroup group = group_of_lane<kWhole>(lanes_log2, first_channel, forward.dim);
    const RawTaps raw_taps = load_raw_taps<kWhole>(forward, group.channel);
    ConvSums sums = {};
    for (ConvItem item(blockIdx.y, segments); item.batch < forward.batch; item.advance(gridDim.y, segments)) {
        const TimeSegment<T, kWhole> row(params, item, group, segment, segments, slack);
        const ConvTaps taps = convert_taps<kWhole>(forward, raw_taps);
        walk_segment<kWhole, T>(params, row, group, taps, sums);
        if (!kWhole && params.dinitial_states != nullptr && item.index == 0 && group.active && group.sublane == 0) {
            store_initial_gradient<T>(params, item.batch, group.channel, taps);
        }
    }
    if constexpr (kWhole) {
        scale_back(sums);
    }
    reduce_sums(group.lanes, sums);
    if (group.active && group.sublane == 0) {
        store_sums(params, blockIdx.y, group.channel, sums);
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
