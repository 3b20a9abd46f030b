// Causal convolution, backward, lanes along channels: for channel-last tensors.
#pragma once

#include "causal_conv1d/cuda/backward_common.cuh"

namespace mamba {

constexpr int kChannelSteps = kConvMaxWidth;  // steps that a lane takes at a time

// x and dout of a lane's next kChannelSteps steps, on their way in registers while it computes those before.
template <typename T, int V>
struct StepsInRegisters {
    struct Shared {};

    Packed<T, V> next_x[kChannelSteps];
    Packed<T, V> next_dout[kChannelSteps];
    const T* x;
    const T* dout;
    int64_t x_stride, dout_stride;
    int left;  // steps to ask for

    __device__ __forceinline__ void begin(Shared&) {
#pragma unroll
        for (int i = 0; i < kChannelSteps; ++i) {
            next_x[i] = packed_zero<T, V>();
            next_dout[i] = packed_zero<T, V>();
        }
        ask();
    }
    __device__ __forceinline__ void ask() {
#pragma unroll
        for (int i = 0; i < kChannelSteps; ++i) {
            x = opaque(x);
            dout = opaque(dout);
            if (i < left) {
                next_x[i] = packed_load<T, V>(x);
                next_dout[i] = packed_load<T, V>(dout);
            }
            x += x_stride;
            dout += dout_stride;
        }
        left -= kChannelSteps;
    }
    __device__ __forceinline__ void take(Shared&, Packed<T, V>* steps_x, Packed<T, V>* steps_dout) {
#pragma unroll
        for (int i = 0; i < kChannelSteps; ++i) {
            steps_x[i] = next_x[i];
            steps_dout[i] = next_dout[i];
        }
        ask();
    }
    __device__ __forceinline__ void end() {}
};

// The same in shared memory, which takes no registers; and the compiler cannot put off asking for them. A lane reads only what
// it has copied itself, 8 bytes a step of each, so that lanes do not wait for each other.
template <typename T, int V>
struct StepsInShared {
    struct Shared {
        uint2 of[2][2][kChannelSteps][kConvThreads];  // those in hand and the next, by turns; of x, then of dout
    };

    const T* x;
    const T* dout;
    int64_t x_stride, dout_stride;
    int left;  // steps to ask for
    int turn;  // of what is taken next

    __device__ __forceinline__ void begin(Shared& shared) {
        turn = 0;
        ask(shared, 0);
    }
    // Behind the last step there are zeros.
    __device__ __forceinline__ void ask(Shared& shared, int to) {
#pragma unroll
        for (int i = 0; i < kChannelSteps; ++i) {
            x = opaque(x);
            dout = opaque(dout);
            cp_async<8>(&shared.of[to][0][i][threadIdx.x], x, i < left);
            cp_async<8>(&shared.of[to][1][i][threadIdx.x], dout, i < left);
            x += x_stride;
            dout += dout_stride;
        }
        cp_async_commit_group();
        left -= kChannelSteps;
    }
    __device__ __forceinline__ void take(Shared& shared, Packed<T, V>* steps_x, Packed<T, V>* steps_dout) {
        cp_async_wait_group<0>();
        ask(shared, turn ^ 1);
#pragma unroll
        for (int i = 0; i < kChannelSteps; ++i) {
            steps_x[i] = packed_load<T, V>(reinterpret_cast<const T*>(&shared.of[turn][0][i][threadIdx.x]));
            steps_dout[i] = packed_load<T, V>(reinterpret_cast<const T*>(&shared.of[turn][1][i][threadIdx.x]));
        }
        turn ^= 1;
    }
    // The zeros are there too: the memory may hold something else.
    __device__ __forceinline__ void end() { cp_async_wait_group<0>(); }
};

template <typename T, int V>
struct StepsOf {
    using Type = StepsInShared<T, V>;
};
template <typename T>
struct StepsOf<T, 1> {
    using Type = StepsInRegisters<T, 1>;
};

// A condition that is known when the kernel is compiled.
template <bool kValue>
struct Known {
    static constexpr bool value = kValue;
};

// A thread takes V neighbouring channels; the block's warps share out a segment's steps and add their sums up at the end.
// A step's dx needs g of the next kConvHalo steps, so each warp computes g that far beyond its own steps. V = 1 takes any
// strides.
template <typename T, int V, bool kPlain>
__global__ void __launch_bounds__(kConvThreads, 2)
    causal_conv1d_backward_channel(const ConvBackward params, const int segment, const unsigned segments) {
    constexpr int kRing = kChannelSteps;  // the loop below is unrolled by it, so that indices are constants
    constexpr int kValues = kConvMaxWidth + 1;
    using Steps = typename StepsOf<T, V>::Type;
    union Memory {
        typename Steps::Shared steps;
        float partial[kConvWarps][V * kValues][32];
    };
    __shared__ Memory shared;
    const MambaCausalConv1d& forward = params.forward;
    const ConvOptions row_options = conv_options<kPlain>(forward);
    const int lane = threadIdx.x & 31;
    const int warp = threadIdx.x >> 5;
    const unsigned slot = blockIdx.y;
    const int64_t first_channel = static_cast<int64_t>(blockIdx.x) * (32 * V);
    const int64_t channel = first_channel + lane * V;
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
    unsigned index = slot % segments;  // of the segment
    for (int64_t batch = slot / segments; active && batch < forward.batch;) {
        const int64_t segment_begin = static_cast<int64_t>(index) * segment;
        const bool row_begins = index == 0;
        const int64_t this_batch = batch;
        index += gridDim.y;
        batch += index / segments;
        index %= segments;

        const int64_t rest = forward.seqlen - segment_begin;
        const int length = static_cast<int>(rest < segment ? rest : segment);
        const int share = ceil_div(length, kConvWarps);
        const int own_begin = warp * share;
        const int own_end = own_begin + share < length ? own_begin + share : length;
        const int count = own_end - own_begin;  // this warp's steps, from `begin`; none or fewer where steps are few
        const int64_t begin = segment_begin + own_begin;
        if (params.dinitial_states != nullptr && row_begins && warp < V) {
            // One channel each, or others would wait for one warp. Its own taps: an index that is not a constant would send the
            // array to local memory.
            store_initial_gradient<T>(params, this_batch, channel + warp, load_taps(forward, channel + warp));
        }
        if (count <= 0) {
            continue;
        }
        const T* x = static_cast<const T*>(forward.x) + this_batch * forward.x_batch_stride + channel * forward.x_dim_stride +
                     begin * forward.x_len_stride;
        const T* dout = static_cast<const T*>(params.dout) + this_batch * params.dout_batch_stride +
                        channel * params.dout_dim_stride + begin * params.dout_len_stride;
        T* dx = static_cast<T*>(params.dx) + this_batch * params.dx_batch_stride + channel * params.dx_dim_stride +
                (begin - kConvHalo) * params.dx_len_stride;
        const int64_t available = forward.seqlen - begin;  // steps up to the row's end
        const int end = static_cast<int>(available < count + kConvHalo ? available : count + kConvHalo);

        Steps steps;
        steps.x = x;
        steps.dout = dout;
        // Of one step the stride may be none of whole vectors; copies that are not made want aligned addresses, too.
        steps.x_stride = forward.seqlen > 1 ? forward.x_len_stride : 0;
        steps.dout_stride = forward.seqlen > 1 ? params.dout_len_stride : 0;
        steps.left = end;
        steps.begin(shared.steps);
        float x_ring[kRing][V];  // step s lies at s % kRing
        float g_ring[kRing][V];
        if (begin >= kConvHalo) {
            Packed<T, V> before[kConvHalo];
#pragma unroll
            for (int i = 1; i <= kConvHalo; ++i) {
                before[i - 1] = packed_load<T, V>(x - i * forward.x_len_stride);
            }
#pragma unroll
            for (int i = 1; i <= kConvHalo; ++i) {
                unpack<T, V>(before[i - 1], x_ring[kRing - i]);
            }
        } else {
#pragma unroll
            for (int i = 1; i <= kConvHalo; ++i) {
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    x_ring[kRing - i][v] = conv_input<T>(forward, this_batch, channel + v, begin - i);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kRing; ++i) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                g_ring[i][v] = 0.0f;
            }
        }
        const int last_inner = params.add ? 0 : count - kRing;
        for (int start = 0; start < count + kConvHalo; start += kRing) {
            Packed<T, V> packed_x[kRing];
            Packed<T, V> packed_dout[kRing];
            uint32_t lag_mask = 0;
            uint32_t lead_mask = 0;
            const auto compute = [&](const auto& options, auto inner) {  // inner: all steps are this warp's own
#pragma unroll
                for (int i = 0; i < kRing; ++i) {
                    const int s = start + i;
                    float dout_values[V];
                    float dx_values[V];
                    unpack<T, V>(packed_x[i], x_ring[i]);
                    unpack<T, V>(packed_dout[i], dout_values);
#pragma unroll
                    for (int v = 0; v < V; ++v) {
                        float inputs[kConvHalo + 1];
                        float g[kConvHalo + 1];  // of step s - kConvHalo and the following
#pragma unroll
                        for (int k = 0; k <= kConvHalo; ++k) {
                            inputs[k] = x_ring[(i + 1 + k) % kRing][v];
                        }
                        const uint32_t mask = lag_mask >> (kMaskBits * i);
                        float gradient;
                        if constexpr (kPlain) {
                            scaled_gradients<1>(taps[v], unit, inputs, &dout_values[v], &gradient);
                        } else {
                            gradients<1>(options, taps[v], inputs, mask, &dout_values[v], &gradient);
                        }
                        g_ring[i][v] = inner.value || s < end ? gradient : 0.0f;  // beyond the end even NaN counts as nothing
                        if (inner.value || s < count) {
                            accumulate<1>(options, inputs, mask, &g_ring[i][v], sums[v]);
                        }
#pragma unroll
                        for (int k = 0; k <= kConvHalo; ++k) {
                            g[k] = g_ring[(i + 1 + k) % kRing][v];
                        }
                        input_gradients<1>(options, taps[v], g, lead_mask >> (kMaskBits * i), &dx_values[v]);
                    }
                    dx = opaque(dx);
                    const int done = s - kConvHalo;  // the step whose dx is complete
                    if (inner.value || (done >= 0 && done < count)) {
                        if (!kPlain && params.dfinal_states != nullptr && begin + done + kConvHalo >= forward.seqlen) {
#pragma unroll
                            for (int v = 0; v < V; ++v) {
                                dx_values[v] += final_state_gradient<T>(params, this_batch, channel + v, begin + done);
                            }
                        }
                        if (!inner.value && params.add) {
                            float before[V];
                            unpack<T, V>(packed_load<T, V>(dx), before);
                            if (done + kRing < count) {  // from the L2: registers are scarce
                                prefetch_to_L2(dx + kRing * params.dx_len_stride);
                            }
#pragma unroll
                            for (int v = 0; v < V; ++v) {
                                dx_values[v] += before[v];
                            }
                        }
                        packed_store<T, V>(dx, pack<T, V>(dx_values));
                    }
                    dx += params.dx_len_stride;
                }
            };
            if constexpr (kPlain) {  // without bounds, in a loop of its own: a branch would keep loads before it
                for (; start > 0 && start <= last_inner; start += kRing) {
                    steps.take(shared.steps, packed_x, packed_dout);
                    compute(PlainOptions(), Known<true>());
                }
            }
            steps.take(shared.steps, packed_x, packed_dout);
            if (row_options.masked) {
                const int32_t* seq_idx = forward.seq_idx + this_batch * forward.seqlen;
                lag_mask = sequence_mask<kRing, false>(seq_idx, begin + start, forward.seqlen);
                lead_mask = sequence_mask<kRing, true>(seq_idx, begin + start - kConvHalo, forward.seqlen);
            }
            ConvOptions options = row_options;
            options.masked = options.masked && (lag_mask & lead_mask) != kOneSequence<kRing>;
            if (kPlain || (options.width == kConvMaxWidth && options.silu && !options.masked)) {
                compute(PlainOptions(), Known<false>());
            } else {
                compute(options, Known<false>());
            }
        }
        steps.end();
    }

    __syncthreads();  // no warp needs what it has copied any more
#pragma unroll
    for (int v = 0; v < V; ++v) {
        if constexpr (kPlain) {
            scale_back(sums[v]);
        }
#pragma unroll
        for (int k = 0; k < kConvMaxWidth; ++k) {
            shared.partial[warp][v * kValues + k][lane] = sums[v].weight[k];
        }
        shared.partial[warp][v * kValues + kConvMaxWidth][lane] = sums[v].bias;
    }
    __syncthreads();
    for (int index = threadIdx.x; index < 32 * V * kValues; index += kConvThreads) {
        const int value = index / 32;
        const int lag = value % kValues;
        const int64_t target = first_channel + (index % 32) * V + value / kValues;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kConvWarps; ++w) {
            sum += shared.partial[w][value][index % 32];
        }
        if (target < forward.dim) {
            const int64_t row = static_cast<int64_t>(slot) * forward.dim + target;
            if (lag < forward.width) {
                const int64_t index = row * forward.width + forward.width - 1 - lag;
                store_from_float(params.weight_sums, index, params.weight_sums_dtype, sum);
            } else if (lag == kConvMaxWidth && params.bias_sums != nullptr) {
                store_from_float(params.bias_sums, row, params.bias_sums_dtype, sum);
            }
        }
    }
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
