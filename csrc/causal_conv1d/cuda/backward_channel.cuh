// Causal convolution, backward, lanes along channels: for channel-last tensors, and one channel a lane for any strides.
#pragma once

#include "causal_conv1d/cuda/backward_steps.cuh"

namespace mamba {

constexpr int kRing = kChannelSteps;  // steps that a lane keeps; loops are unrolled by it, so that indices are constants

// The last steps of a lane's channels: step s, counted from the warp's first one, lies at s % kRing.
template <int V>
struct ConvRing {
    float x[kRing][V];
    float g[kRing][V];
};

// A warp's share of a segment's steps. Steps count from `begin`.
template <typename T>
struct ConvShare {
    int64_t batch, channel, begin;
    int count;  // the warp's own steps; none or fewer where steps are few
    int end;    // up to here it needs g, which is kConvHalo further, as far as the row goes
    T* dx;      // of the step kConvHalo before the one in hand
};

template <typename T>
__device__ __forceinline__ ConvShare<T> share_of_warp(const ConvBackward& params, const ConvItem& item, int segment,
                                                      int64_t channel) {
    const MambaCausalConv1d& forward = params.forward;
    const int warp = threadIdx.x >> 5;
    const int64_t segment_begin = static_cast<int64_t>(item.index) * segment;
    const int64_t rest = forward.seqlen - segment_begin;
    const int length = static_cast<int>(rest < segment ? rest : segment);
    const int share = ceil_div(length, kConvWarps);
    const int own_begin = warp * share;
    const int own_end = own_begin + share < length ? own_begin + share : length;
    ConvShare<T> own;
    own.batch = item.batch;
    own.channel = channel;
    own.count = own_end - own_begin;
    own.begin = segment_begin + own_begin;
    const int64_t available = forward.seqlen - own.begin;
    own.end = static_cast<int>(available < own.count + kConvHalo ? available : own.count + kConvHalo);
    own.dx = static_cast<T*>(params.dx) + own.batch * params.dx_batch_stride + channel * params.dx_dim_stride +
             (own.begin - kConvHalo) * params.dx_len_stride;
    return own;
}

// The inputs before the share's first step, and no gradients yet. x: of the first step.
template <typename T, int V>
__device__ __forceinline__ void fill_ring(const MambaCausalConv1d& forward, const ConvShare<T>& own, const T* x,
                                          ConvRing<V>& ring) {
    if (own.begin >= kConvHalo) {
        Packed<T, V> before[kConvHalo];
#pragma unroll
        for (int i = 1; i <= kConvHalo; ++i) {
            before[i - 1] = packed_load<T, V>(x - i * forward.x_len_stride);
        }
#pragma unroll
        for (int i = 1; i <= kConvHalo; ++i) {
            unpack<T, V>(before[i - 1], ring.x[kRing - i]);
        }
    } else {
#pragma unroll
        for (int i = 1; i <= kConvHalo; ++i) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                ring.x[kRing - i][v] = conv_input<T>(forward, own.batch, own.channel + v, own.begin - i);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kRing; ++i) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            ring.g[i][v] = 0.0f;
        }
    }
}

// Adds what else there is to dx of the step `done`, and stores it. kAdd: there may be something.
template <bool kAdd, bool kPlain, typename T, int V>
__device__ __forceinline__ void store_dx(const ConvBackward& params, const ConvShare<T>& own, int done, float (&dx)[V]) {
    if (!kPlain && params.dfinal_states != nullptr && own.begin + done + kConvHalo >= params.forward.seqlen) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            dx[v] += final_state_gradient<T>(params, own.batch, own.channel + v, own.begin + done);
        }
    }
    if (kAdd && params.add) {
        float before[V];
        unpack<T, V>(packed_load<T, V>(own.dx), before);
        if (done + kRing < own.count) {  // from the L2: registers are scarce
            prefetch_to_L2(own.dx + kRing * params.dx_len_stride);
        }
#pragma unroll
        for (int v = 0; v < V; ++v) {
            dx[v] += before[v];
        }
    }
    packed_store<T, V>(own.dx, pack<T, V>(dx));
}

// kRing steps from `start` on: their g, what they add to the sums, and dx of as many steps, kConvHalo before these. kInner: all
// are the warp's own. Options: ConvOptions, or PlainOptions where sums are scaled, or can be as the taps are.
template <bool kInner, bool kPlain, typename T, int V, typename Options>
__device__ __forceinline__ void compute_steps(const ConvBackward& params, const Options& options, const ConvTaps (&taps)[V],
                                              float unit, const Packed<T, V> (&packed_x)[kRing],
                                              const Packed<T, V> (&packed_dout)[kRing], const SequenceMasks& masks, int start,
                                              ConvShare<T>& own, ConvRing<V>& ring, ConvSums (&sums)[V]) {
#pragma unroll
    for (int i = 0; i < kRing; ++i) {
        const int s = start + i;
        float dout[V];
        float dx[V];
        unpack<T, V>(packed_x[i], ring.x[i]);
        unpack<T, V>(packed_dout[i], dout);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            float inputs[kConvHalo + 1];
            float g[kConvHalo + 1];  // of step s - kConvHalo and the following
#pragma unroll
            for (int k = 0; k <= kConvHalo; ++k) {
                inputs[k] = ring.x[(i + 1 + k) % kRing][v];
            }
            const uint32_t mask = masks.lag >> (kMaskBits * i);
            float gradient;
            if constexpr (kPlain) {
                scaled_gradients<1>(taps[v], unit, inputs, &dout[v], &gradient);
            } else {
                gradients<1>(options, taps[v], inputs, mask, &dout[v], &gradient);
            }
            ring.g[i][v] = kInner || s < own.end ? gradient : 0.0f;  // beyond the end even a NaN contributes zero
            if (kInner || s < own.count) {
                accumulate<1>(options, inputs, mask, &ring.g[i][v], sums[v]);
            }
#pragma unroll
            for (int k = 0; k <= kConvHalo; ++k) {
                g[k] = ring.g[(i + 1 + k) % kRing][v];
            }
            input_gradients<1>(options, taps[v], g, masks.lead >> (kMaskBits * i), &dx[v]);
        }
        own.dx = opaque(own.dx);
        const int done = s - kConvHalo;
        if (kInner || (done >= 0 && done < own.count)) {
            store_dx<!kInner, kPlain>(params, own, done, dx);
        }
        own.dx += params.dx_len_stride;
    }
}

// One share, from its first step to kConvHalo behind its last one.
template <bool kPlain, typename T, int V, class Steps>
__device__ __forceinline__ void walk_share(const ConvBackward& params, const ConvTaps (&taps)[V], float unit,
                                           typename Steps::Shared& shared, ConvShare<T>& own, ConvSums (&sums)[V]) {
    const MambaCausalConv1d& forward = params.forward;
    const ConvOptions row_options = conv_options<kPlain>(forward);
    Steps steps;
    steps.x = static_cast<const T*>(forward.x) + own.batch * forward.x_batch_stride + own.channel * forward.x_dim_stride +
              own.begin * forward.x_len_stride;
    steps.dout = static_cast<const T*>(params.dout) + own.batch * params.dout_batch_stride +
                 own.channel * params.dout_dim_stride + own.begin * params.dout_len_stride;
    const T* const x = steps.x;
    // Of one step the stride may be none of whole vectors; copies that are not made want aligned addresses, too.
    steps.x_stride = forward.seqlen > 1 ? forward.x_len_stride : 0;
    steps.dout_stride = forward.seqlen > 1 ? params.dout_len_stride : 0;
    steps.left = own.end;
    steps.begin(shared);
    ConvRing<V> ring;
    fill_ring<T, V>(forward, own, x, ring);
    const int last_inner = params.add ? 0 : own.count - kRing;
    for (int start = 0; start < own.count + kConvHalo; start += kRing) {
        Packed<T, V> packed_x[kRing];
        Packed<T, V> packed_dout[kRing];
        SequenceMasks masks = {0, 0};
        if constexpr (kPlain) {  // without bounds, in a loop of its own: a branch would keep loads before it
            for (; start > 0 && start <= last_inner; start += kRing) {
                steps.take(shared, packed_x, packed_dout);
                compute_steps<true, true>(params, PlainOptions(), taps, unit, packed_x, packed_dout, masks, start, own, ring,
                                          sums);
            }
        }
        steps.take(shared, packed_x, packed_dout);
        ConvOptions options = row_options;
        if (row_options.masked) {
            const int32_t* seq_idx = forward.seq_idx + own.batch * forward.seqlen;
            masks.lag = sequence_mask<kRing, false>(seq_idx, own.begin + start, forward.seqlen);
            masks.lead = sequence_mask<kRing, true>(seq_idx, own.begin + start - kConvHalo, forward.seqlen);
            options.masked = (masks.lag & masks.lead) != kOneSequence<kRing>;
        }
        if (kPlain || (options.width == kConvMaxWidth && options.silu && !options.masked)) {
            compute_steps<false, kPlain>(params, PlainOptions(), taps, unit, packed_x, packed_dout, masks, start, own, ring,
                                         sums);
        } else {
            compute_steps<false, kPlain>(params, options, taps, unit, packed_x, packed_dout, masks, start, own, ring, sums);
        }
    }
    steps.end();
}

// Each warp's sums of each channel.
template <int V>
struct WarpSums {
    static constexpr int kValues = kConvMaxWidth + 1;
    float of_warp[kConvWarps][V * kValues][32];
};

// Adds the warps' sums up, to the block's slot.
template <int V>
__device__ __forceinline__ void store_warp_sums(const ConvBackward& params, const ConvSums (&sums)[V], WarpSums<V>& shared) {
    constexpr int kValues = WarpSums<V>::kValues;
    const MambaCausalConv1d& forward = params.forward;
    const int lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int k = 0; k < kConvMaxWidth; ++k) {
            shared.of_warp[warp][v * kValues + k][lane] = sums[v].weight[k];
        }
        shared.of_warp[warp][v * kValues + kConvMaxWidth][lane] = sums[v].bias;
    }
    __syncthreads();
    for (int index = threadIdx.x; index < 32 * V * kValues; index += kConvThreads) {
        const int value = index / 32;
        const int lag = value % kValues;
        const int64_t channel = static_cast<int64_t>(blockIdx.x) * (32 * V) + (index % 32) * V + value / kValues;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kConvWarps; ++w) {
            sum += shared.of_warp[w][value][index % 32];
        }
        if (channel < forward.dim) {
            const int64_t row = static_cast<int64_t>(blockIdx.y) * forward.dim + channel;
            if (lag < forward.width) {
                const int64_t weight = row * forward.width + forward.width - 1 - lag;
                store_from_float(params.weight_sums, weight, params.weight_sums_dtype, sum);
            } else if (lag == kConvMaxWidth && params.bias_sums != nullptr) {
                store_from_float(params.bias_sums, row, params.bias_sums_dtype, sum);
            }
        }
    }
}

// A thread takes V neighbouring channels; the block's warps share out a segment's steps and add their sums up at the end.
// A step's dx needs g of the next kConvHalo steps, so each warp computes g that far beyond its own steps. V = 1 takes any
// strides. kPlain: width 4 and silu, one sequence, no gradient of final states.
template <typename T, int V, bool kPlain>
__global__ void __launch_bounds__(kConvThreads, 2)
    causal_conv1d_backward_channel(const ConvBackward params, const int segment, const unsigned segments) {
    using Steps = typename StepsOf<T, V>::Type;
    union Memory {
        typename Steps::Shared steps;
        WarpSums<V> sums;
    };
    __shared__ Memory shared;
    const MambaCausalConv1d& forward = params.forward;
    const int lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5;
    const int64_t channel = static_cast<int64_t>(blockIdx.x) * (32 * V) + lane * V;
    const bool active = channel < forward.dim;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    RawTaps raw_taps[V];
    ConvTaps taps[V];
    ConvSums sums[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
        raw_taps[v] = load_raw_taps<kPlain>(forward, active ? channel + v : 0);
        sums[v] = {};
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
        taps[v] = convert_taps<kPlain>(forward, raw_taps[v]);
        if constexpr (kPlain) {
            taps[v] = scaled(taps[v]);
        }
    }
    const float unit = kPlain ? gradient_unit() : 1.0f;
    for (ConvItem item(blockIdx.y, segments); active && item.batch < forward.batch; item.advance(gridDim.y, segments)) {
        if (params.dinitial_states != nullptr && item.index == 0 && warp < V) {
            // One channel each, or others would wait for one warp. Its own taps: an index that is not a constant would send the
            // array to local memory.
            store_initial_gradient<T>(params, item.batch, channel + warp, load_taps(forward, channel + warp));
        }
        ConvShare<T> own = share_of_warp<T>(params, item, segment, channel);
        if (own.count > 0) {
            walk_share<kPlain, T, V, Steps>(params, taps, unit, shared.steps, own, sums);
        }
    }
    if constexpr (kPlain) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            scale_back(sums[v]);
        }
    }
    __syncthreads();  // no warp needs what it has copied any more
    store_warp_sums<V>(params, sums, shared.sums);
}

template <typename T, int V, bool kPlain>
cudaError_t launch_backward_channel(const ConvBackward& params, const ConvBackwardPlan& plan) {
    const MambaCausalConv1d& forward = params.forward;
    const Grid grid(ceil_div(forward.dim, 32 * V), plan.slots);
    return launch_programmatic_dependent(causal_conv1d_backward_channel<T, V, kPlain>, grid, kConvThreads, 0,
                                         forward.run.stream, params, static_cast<int>(plan.segment),
                                         static_cast<unsigned>(plan.segments));
}

}  // namespace mamba
