// Causal convolution, backward, lanes along time: for tensors whose steps are neighbours in memory.
#pragma once

#include "causal_conv1d/cuda/backward_common.cuh"
#include "causal_conv1d/cuda/time_common.cuh"

namespace mamba {

// Where sequences change, of some steps of one row, for all channels of a block: a bit a step, set if the step before is of
// another sequence or this one is padding. Vectors without a change around them, nearly all, need no masks.
struct SequenceChanges {
    static constexpr int kSteps = 4096;
    uint8_t of_eight[kSteps / 8 + 2];  // the first of them before the first step

    // Of the steps from `first` on, `count` of them. All threads of the block call this.
    __device__ __forceinline__ void find(const int32_t* seq_idx, int64_t first, int count, int64_t seqlen) {
        __syncthreads();  // nobody needs the ones before any more
        for (int i = static_cast<int>(threadIdx.x); i < count / 8 + 2; i += kConvThreads) {
            uint32_t bits = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int64_t t = first + (i - 1) * 8 + j;
                if (t >= 0 && t < seqlen) {
                    const int32_t own = seq_idx[t];
                    bits |= static_cast<uint32_t>(own < 0 || (t > 0 && own != seq_idx[t - 1])) << j;
                }
            }
            of_eight[i] = static_cast<uint8_t>(bits);
        }
        __syncthreads();
    }
    // Whether there is one that the masks of N steps, so far from `first`, would show.
    template <int N>
    __device__ __forceinline__ bool around(int step) const {
        const int bit = step + 8 - (kConvHalo - 1);
        const uint8_t* const from = of_eight + bit / 8;
        const uint32_t bits = from[0] | from[1] << 8 | from[2] << 16;
        return (bits >> bit % 8 & ((1u << (N + 2 * kConvHalo - 1)) - 1)) != 0;
    }
};

// A group of 2^lanes_log2 lanes takes one channel and every item of one slot. It walks a segment backwards, a vector of steps
// a lane and tile, so that the g after a tile is in a register; only a segment's own end computes it anew. The tile before
// is on its way while one is computed. `slack`: by how many steps a row's vectors may reach beyond its own length.
// kAligned: rows begin and end at multiples of 16 bytes and fill a warp. kPacked: there may be sequences; if aligned as well
// there are, and channels fill the blocks. Instructions bind the usual case (kPlain, aligned, without sequences): there tiles
// begin at a segment's end, so that only its first steps can be less than a tile, and ask for nothing but that.
template <typename T, bool kPlain, bool kPacked, bool kAligned, bool kReverse>
__global__ void __launch_bounds__(kConvThreads, kPacked ? 3 : 4)
    causal_conv1d_backward_time(const ConvBackward params, const int lanes_log2, const unsigned segment,
                                const unsigned segments, const int slack) {
    static constexpr int V = kTimeVector<T>;
    constexpr bool kUsual = kPlain && !kPacked && kAligned;
    constexpr bool kLoadsBefore = kUsual && sizeof(T) == 2;
    const MambaCausalConv1d& forward = params.forward;
    const ConvOptions row_options = conv_options<kPlain, kPacked>(forward);
    const int lanes = kAligned ? 32 : 1 << lanes_log2;
    const int lane = threadIdx.x & 31;
    const int sublane = lane & (lanes - 1);
    const bool last = sublane == lanes - 1;
    const int lane_before = (lane & ~(lanes - 1)) | ((sublane - 1) & (lanes - 1));
    const int lane_after = (lane & ~(lanes - 1)) | ((sublane + 1) & (lanes - 1));
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kConvWarps + (threadIdx.x >> 5);
    const int64_t first_channel = kAligned ? warp : warp << (5 - lanes_log2);
    if (first_channel >= forward.dim) {
        return;
    }
    int64_t channel = kAligned ? first_channel : first_channel + (lane >> lanes_log2);
    const bool active = kAligned || channel < forward.dim;  // idle lanes stay for the shuffles
    channel = active ? channel : first_channel;
    const unsigned slot = blockIdx.y;
    const unsigned slots = gridDim.y;
    const int tile = lanes * V;
    const RawTaps raw_taps = load_raw_taps<kPlain>(forward, channel);

    constexpr bool kFindChanges = kPacked && kAligned;
    static_assert(!kFindChanges || SequenceChanges::kSteps % (32 * V) == 0, "whole tiles");
    __shared__ SequenceChanges changes;

    ConvSums sums = {};
    unsigned index = slot % segments;  // of the segment
    for (int64_t batch = slot / segments; batch < forward.batch;) {
        const T* x = static_cast<const T*>(forward.x) + batch * forward.x_batch_stride + channel * forward.x_dim_stride;
        const T* dout =
            static_cast<const T*>(params.dout) + batch * params.dout_batch_stride + channel * params.dout_dim_stride;
        T* dx = static_cast<T*>(params.dx) + batch * params.dx_batch_stride + channel * params.dx_dim_stride;
        const int phase = kAligned ? 0 : row_phase<T, kReverse>(x);
        const int64_t grid_begin = static_cast<int64_t>(index) * segment;
        const bool more = index + 1 < segments;
        const int64_t grid_left = forward.seqlen + slack - grid_begin;
        const int grid_length = more ? static_cast<int>(segment) : static_cast<int>(grid_left);
        const int64_t begin = grid_begin - phase;
        // From here on steps count from `begin`; this segment holds first <= step < end.
        const int first = index == 0 ? phase : 0;
        const int end = !active ? 0 : (more ? static_cast<int>(segment) : static_cast<int>(forward.seqlen - begin));
        const int readable = index == 0 ? first : -V;  // how far back x reaches, as far as it is asked for
        x = opaque(at_step<kReverse>(x, begin));
        dout = opaque(at_step<kReverse>(dout, begin));
        dx = opaque(at_step<kReverse>(dx, begin));

        const int last_tile = kUsual ? grid_length - tile : (grid_length - 1) / tile * tile;
        int offset = last_tile + sublane * V;
        const auto load_x = [&](int at) {
            if (at >= readable && (kUsual || at + V <= end)) {
                return load_vector<kReverse>(x, at);
            }
            Packed<T, V> vector = kAligned ? packed_zero<T, V>() : load_some<kReverse>(x, at, first, end);
            if (!kPlain && at >= -V && at < end) {
                add_initial_states<T, V>(forward, batch, channel, begin + at, vector);
            }
            return vector;
        };
        const auto load_dout = [&](int at) {
            if (kUsual ? at >= 0 : at >= first && at + V <= end) {
                return load_vector<kReverse>(dout, at);
            }
            return kAligned ? packed_zero<T, V>() : load_some<kReverse>(dout, at, first, end);
        };
        // The end of the vector before a tile, for the lane that has the tile's last one; of 16 bits, in the usual case, for
        // each lane that before its own.
        const auto load_wrapped = [&](int at) {
            Packed<T, V> vector = packed_zero<T, V>();
            if constexpr (kLoadsBefore) {
                at += tile - V;
                if (at >= readable) {
                    const Packed<T, V / 2> half = packed_load<T, V / 2>(kReverse ? x - at - (V - 1) : x + at + V / 2);
                    vector.word[2] = kReverse ? __byte_perm(half.word[1], 0, 0x1032) : half.word[0];
                    vector.word[3] = kReverse ? __byte_perm(half.word[0], 0, 0x1032) : half.word[1];
                }
                return vector;
            }
            if constexpr (kAligned && !kReverse && sizeof(T) == 2) {
                if (last && at >= readable) {
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
        const ConvTaps taps = convert_taps<kPlain>(forward, raw_taps);
        const ConvTaps usual_taps = kUsual ? scaled(taps) : taps;
        const float unit = kUsual ? gradient_unit() : 1.0f;
        float after[kConvHalo] = {};  // in a group's first lane: g of the steps that follow the tile in hand
        if (more) {                   // then a whole warp shares the row
            const float g = lane < kConvHalo ? conv_gradient<T>(params, batch, channel, begin + end + lane, taps) : 0.0f;
#pragma unroll
            for (int k = 0; k < kConvHalo; ++k) {
                after[k] = __shfl_sync(kFullWarp, kUsual ? g * unit : g, k);
            }
        }
        for (int start = last_tile; start > -tile; start -= tile, offset -= tile) {
            const int chunk = start & ~(SequenceChanges::kSteps - 1);
            if (kFindChanges && (start + tile >= grid_length || start + tile == chunk + SequenceChanges::kSteps)) {
                changes.find(forward.seq_idx + batch * forward.seqlen, begin + chunk, start + tile - chunk, forward.seqlen);
            }
            float inputs[kConvHalo + V];
            float g[V + kConvHalo];
            unpack<T, V>(next_x, inputs + kConvHalo);
            unpack<T, V>(next_dout, g);
            if constexpr (kLoadsBefore) {
                inputs_from_end<T>(wrapped.word, inputs);
            } else {
                inputs_before(next_x, wrapped, last, lane_before, inputs);
            }
            next_x = load_x(offset - tile);
            next_dout = load_dout(offset - tile);
            wrapped = load_wrapped(offset - 2 * tile);
            if (kAligned && lane % 8 == 0 && offset >= 2 * tile) {  // the tile before that comes as far as the L2
                prefetch_to_L2(at_step<kReverse>(x, offset - 2 * tile));
                prefetch_to_L2(at_step<kReverse>(dout, offset - 2 * tile));
            }

            const bool whole = kUsual || (offset >= first && offset + V <= end);
            uint32_t lag_mask = 0;
            uint32_t lead_mask = 0;
            ConvOptions options = row_options;
            options.masked = options.masked && offset < end && (!kFindChanges || changes.around<V>(offset - chunk));
            if (options.masked) {
                const SequenceMasks masks =
                    sequence_masks<V>(forward.seq_idx + batch * forward.seqlen, begin + offset, forward.seqlen);
                lag_mask = masks.lag;
                lead_mask = masks.lead;
                options.masked = (lag_mask & lead_mask) != kOneSequence<V>;
            }
            if constexpr (kUsual) {  // zero before the segment, where dout is
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
            if constexpr (kUsual) {
                accumulate<V>(options, inputs, lag_mask, g, sums);
                input_gradients<V>(options, usual_taps, g, lead_mask, dx_values);
            }
            if (kUsual ? offset >= 0 : offset < end) {
                if constexpr (!kUsual) {
                    accumulate<V>(options, inputs, lag_mask, g, sums);
                    input_gradients<V>(options, taps, g, lead_mask, dx_values);
                }
                if (!kPlain && params.dfinal_states != nullptr && begin + offset + V + kConvHalo > forward.seqlen) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        dx_values[j] += final_state_gradient<T>(params, batch, channel, begin + offset + j);
                    }
                }
                if (params.add) {  // from the L2: registers are scarce
                    float before[V];
                    unpack<T, V>(
                        kAligned || whole ? load_vector<kReverse>(dx, offset) : load_some<kReverse>(dx, offset, first, end),
                        before);
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        dx_values[j] += before[j];
                    }
                    if (offset - tile >= first) {
                        prefetch_to_L2(at_step<kReverse>(dx, offset - tile));
                    }
                }
                if (kAligned || whole) {
                    store_vector<kReverse>(dx, offset, pack<T, V>(dx_values));
                } else {
                    store_some<kReverse>(dx, offset, first, end, dx_values);
                }
            }
        }
        if (!kPlain && params.dinitial_states != nullptr && index == 0 && active && sublane == 0) {
            store_initial_gradient<T>(params, batch, channel, taps);
        }
        index += slots;
        batch += index / segments;
        index %= segments;
    }

    if constexpr (kUsual) {
        scale_back(sums);
    }
    reduce_sums(lanes, sums);
    if (active && sublane == 0) {
        store_sums(params, slot, channel, sums);
    }
}

template <typename T, bool kReverse>
cudaError_t launch_backward_time(const ConvBackward& params, const ConvBackwardPlan& plan, bool aligned) {
    constexpr int V = kTimeVector<T>;
    const MambaCausalConv1d& forward = params.forward;
    const int slack = aligned ? 0 : V - 1;
    const int lanes_log2 = ceil_log2(ceil_div(forward.seqlen + slack, V), 0, 5);
    const int64_t groups = ceil_div(forward.dim, static_cast<int64_t>(32) >> lanes_log2);
    const Grid grid(ceil_div(groups, kConvWarps), plan.slots);
    const bool packed = forward.seq_idx != nullptr;
    auto kernel = causal_conv1d_backward_time<T, false, true, false, kReverse>;
    const bool states = forward.initial_states != nullptr || params.dinitial_states != nullptr;
    const bool plain = is_plain_or_packed(params) && !states, whole = aligned && lanes_log2 == 5;
    if (plain && !packed && whole) {
        kernel = causal_conv1d_backward_time<T, true, false, true, kReverse>;
    } else if (plain && !packed) {
        kernel = causal_conv1d_backward_time<T, true, false, false, kReverse>;
    } else if (plain && whole && !kReverse && forward.dim % kConvWarps == 0) {
        kernel = causal_conv1d_backward_time<T, true, !kReverse, true, kReverse>;
    }
    return launch_kernel(kernel, grid, kConvThreads, 0, forward.run.stream, params, lanes_log2,
                         static_cast<unsigned>(plan.segment), static_cast<unsigned>(plan.segments), slack);
}

}  // namespace mamba
