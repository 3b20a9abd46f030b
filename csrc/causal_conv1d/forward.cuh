// Causal convolution, forward, on the GPU. It moves each element once, so everything here is about wide, early loads.
// Two mappings: lanes along time where steps are neighbours in memory, lanes along channels where channels are.
#pragma once

#include "causal_conv1d/cuda_common.cuh"

namespace mamba {

// Loads in flight a lane: enough bytes to cover memory latency at four blocks a multiprocessor.
template <int V>
struct ConvForwardTile {
    static constexpr int kUnroll = V == 1 ? 8 : 4;
};

template <typename T, int V>
__device__ __forceinline__ void activate_and_store(const MambaCausalConv1d& params, float* sums, T* address) {
    if (params.silu) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            sums[j] *= sigmoid(sums[j]);
        }
    }
    packed_store<T, V>(address, pack<T, V>(sums));
}

// A group of 2^lanes_log2 lanes takes one chunk of one (batch, channel) row, V neighbouring steps a lane and access. The
// steps before a lane's own come from its neighbour's registers. V = 1 takes any strides and reads them from the cache.
template <typename T, int V>
__global__ void __launch_bounds__(kConvThreads, 3)
    causal_conv1d_forward_time(const MambaCausalConv1d params, const int lanes_log2, const int64_t chunks) {
    constexpr int kUnroll = ConvForwardTile<V>::kUnroll;
    const int lanes = 1 << lanes_log2;
    const int lane = threadIdx.x & 31;
    const int sublane = lane & (lanes - 1);
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kConvWarps + (threadIdx.x >> 5);
    const int64_t rows = params.batch * params.dim;
    const int64_t row_group = warp / chunks;
    const int64_t first_row = row_group << (5 - lanes_log2);
    if (first_row >= rows) {
        return;
    }
    int64_t row = first_row + (lane >> lanes_log2);
    const bool active = row < rows;  // idle lanes stay for the shuffles
    row = active ? row : first_row;
    const int64_t batch = row / params.dim;
    const int64_t channel = row - batch * params.dim;
    const int64_t chunk = warp - row_group * chunks;
    const int64_t begin = chunk * (lanes * V * kUnroll);

    const int64_t x_step = V == 1 ? params.x_len_stride : 1;
    const int64_t out_step = V == 1 ? params.out_len_stride : 1;
    const T* x = static_cast<const T*>(params.x) + batch * params.x_batch_stride + channel * params.x_dim_stride;
    T* out = static_cast<T*>(params.out) + batch * params.out_batch_stride + channel * params.out_dim_stride;
    const int32_t* seq_idx = params.seq_idx != nullptr ? params.seq_idx + batch * params.seqlen : nullptr;

    Packed<T, V> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        const int64_t t = begin + (u * lanes + sublane) * V;
        loaded[u] = packed_zero<T, V>();
        if (active && t < params.seqlen) {
            loaded[u] = packed_load<T, V>(x + t * x_step);
        }
    }
    const ConvTaps taps = load_taps(params, channel);

#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        if (begin + u * lanes * V >= params.seqlen) {
            break;
        }
        const int64_t t = begin + (u * lanes + sublane) * V;
        const bool inside = active && t < params.seqlen;
        float inputs[kConvHalo + V];
        if constexpr (V == 1) {
#pragma unroll
            for (int i = 0; i < kConvHalo; ++i) {
                inputs[i] = inside ? conv_input<T>(params, batch, channel, t - kConvHalo + i) : 0.0f;
            }
        } else {
            // Each lane hands its last elements on; the last lane of a group hands those of the round before to the first.
            constexpr int kTail = static_cast<int>((kConvHalo * sizeof(T) + 3) / 4);
            constexpr int kWords = static_cast<int>(V * sizeof(T) / 4);
            const int source = (lane & ~(lanes - 1)) | ((sublane - 1) & (lanes - 1));
            Packed<T, kTail * 4 / static_cast<int>(sizeof(T))> tail;
#pragma unroll
            for (int i = 0; i < kTail; ++i) {
                uint32_t word = loaded[u].word[kWords - kTail + i];
                if (u > 0 && sublane == lanes - 1) {
                    word = loaded[u > 0 ? u - 1 : 0].word[kWords - kTail + i];
                }
                tail.word[i] = __shfl_sync(kFullWarp, word, source);
            }
            float last[sizeof(T) == 4 ? 3 : 4];
            unpack(tail, last);
#pragma unroll
            for (int i = 0; i < kConvHalo; ++i) {
                inputs[i] = last[sizeof(T) == 4 ? i : i + 1];
            }
            if (u == 0 && sublane == 0 && inside) {
#pragma unroll
                for (int i = 0; i < kConvHalo; ++i) {
                    inputs[i] = conv_input<T>(params, batch, channel, t - kConvHalo + i);
                }
            }
        }
        unpack<T, V>(loaded[u], inputs + kConvHalo);
        if (inside) {
            uint32_t mask = 0;
            if (seq_idx != nullptr) {
                mask = sequence_mask<V, false>(seq_idx, t, params.seqlen);
            }
            float sums[V];
            convolve<V>(taps, params.width, inputs, seq_idx != nullptr, mask, sums);
            activate_and_store<T, V>(params, sums, out + t * out_step);
        }
    }

    if (params.final_states != nullptr && chunk == 0 && active) {
        for (int i = sublane; i < params.width - 1; i += lanes) {
            store_final_state<T>(params, batch, channel, i);
        }
    }
}

// A thread takes V neighbouring channels and walks `steps` steps of time with the window in registers.
template <typename T, int V>
__global__ void __launch_bounds__(kConvThreads, 2)
    causal_conv1d_forward_channel(const MambaCausalConv1d params, const int steps, const int64_t chunks) {
    constexpr int kUnroll = 4;  // steps loaded together; at least kConvHalo
    const int64_t vectors = ceil_div(params.dim, V);
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kConvThreads + threadIdx.x;
    const int64_t task = thread / vectors;
    const int64_t channel = (thread - task * vectors) * V;
    const int64_t batch = task / chunks;
    const int64_t chunk = task - batch * chunks;
    if (batch >= params.batch) {
        return;
    }
    const T* x = static_cast<const T*>(params.x) + batch * params.x_batch_stride + channel * params.x_dim_stride;
    T* out = static_cast<T*>(params.out) + batch * params.out_batch_stride + channel * params.out_dim_stride;
    const int32_t* seq_idx = params.seq_idx != nullptr ? params.seq_idx + batch * params.seqlen : nullptr;

    ConvTaps taps[V];
    float window[kConvHalo + kUnroll][V];  // by step first; the first kConvHalo are those before the steps in hand
    const int64_t begin = chunk * steps;
    const int64_t end = begin + steps < params.seqlen ? begin + steps : params.seqlen;
#pragma unroll
    for (int v = 0; v < V; ++v) {
        taps[v] = load_taps(params, channel + v);
    }
    if (begin >= kConvHalo && begin < end) {
#pragma unroll
        for (int i = 0; i < kConvHalo; ++i) {
            unpack<T, V>(packed_load<T, V>(x + (begin - kConvHalo + i) * params.x_len_stride), window[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kConvHalo; ++i) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                window[i][v] = begin < end ? conv_input<T>(params, batch, channel + v, begin - kConvHalo + i) : 0.0f;
            }
        }
    }

    for (int64_t t = begin; t < end; t += kUnroll) {
        Packed<T, V> loaded[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            loaded[i] = packed_zero<T, V>();
            if (t + i < end) {
                loaded[i] = packed_load<T, V>(x + (t + i) * params.x_len_stride);
            }
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            unpack<T, V>(loaded[i], window[kConvHalo + i]);
        }
        uint32_t mask = 0;
        if (seq_idx != nullptr) {
            mask = sequence_mask<kUnroll, false>(seq_idx, t, params.seqlen);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            if (t + i < end) {
                float sums[V];
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    float inputs[kConvHalo + 1];
#pragma unroll
                    for (int k = 0; k <= kConvHalo; ++k) {
                        inputs[k] = window[i + k][v];
                    }
                    convolve<1>(taps[v], params.width, inputs, seq_idx != nullptr, mask >> (kConvHalo * i), &sums[v]);
                }
                activate_and_store<T, V>(params, sums, out + (t + i) * params.out_len_stride);
            }
        }
#pragma unroll
        for (int i = 0; i < kConvHalo; ++i) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                window[i][v] = window[kUnroll + i][v];
            }
        }
    }

    if (params.final_states != nullptr && chunk == 0) {
        for (int i = 0; i < params.width - 1; ++i) {
            for (int v = 0; v < V; ++v) {
                store_final_state<T>(params, batch, channel + v, i);
            }
        }
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <typename T, int V>
cudaError_t launch_forward_time(const MambaCausalConv1d& params) {
    const int lanes_log2 = ceil_log2(ceil_div(params.seqlen, V), 0, 5);
    const int64_t tile = (static_cast<int64_t>(V) << lanes_log2) * ConvForwardTile<V>::kUnroll;
    const int64_t chunks = params.seqlen > tile ? ceil_div(params.seqlen, tile) : 1;
    const int64_t row_groups = ceil_div(params.batch * params.dim, static_cast<int64_t>(32) >> lanes_log2);
    const int64_t blocks = ceil_div(row_groups * chunks, kConvWarps);
    causal_conv1d_forward_time<T, V>
        <<<static_cast<unsigned>(blocks), kConvThreads, 0, static_cast<cudaStream_t>(params.run.stream)>>>(params, lanes_log2,
                                                                                                           chunks);
    return cudaGetLastError();
}

template <typename T, int V>
cudaError_t launch_forward_channel(const MambaCausalConv1d& params) {
    const int64_t vectors = ceil_div(params.dim, V);
    int steps = 64;  // fewer re-read more of the window, more leave multiprocessors idle
    while (steps > 8 && params.batch * vectors * ceil_div(params.seqlen, steps) < (static_cast<int64_t>(1) << 17)) {
        steps /= 2;
    }
    const int64_t chunks = params.seqlen > steps ? ceil_div(params.seqlen, steps) : 1;
    const int64_t blocks = ceil_div(params.batch * vectors * chunks, kConvThreads);
    causal_conv1d_forward_channel<T, V>
        <<<static_cast<unsigned>(blocks), kConvThreads, 0, static_cast<cudaStream_t>(params.run.stream)>>>(params, steps,
                                                                                                           chunks);
    return cudaGetLastError();
}

template <typename T>
cudaError_t causal_conv1d_forward_launch(const MambaCausalConv1d& params) {
    const ConvLayout x = {params.x, params.x_batch_stride, params.x_dim_stride, params.x_len_stride};
    const ConvLayout out = {params.out, params.out_batch_stride, params.out_dim_stride, params.out_len_stride};
    if (is_channel_last(params)) {
        constexpr int kVector = 4;  // more channels a thread need more registers than hide the latency
        if (can_vectorise(params, x, true, kVector) && can_vectorise(params, out, true, kVector)) {
            return launch_forward_channel<T, kVector>(params);
        }
        return launch_forward_channel<T, 1>(params);
    }
    constexpr int kVector = 16 / static_cast<int>(sizeof(T));
    if (can_vectorise(params, x, false, kVector) && can_vectorise(params, out, false, kVector)) {
        return launch_forward_time<T, kVector>(params);
    }
    return launch_forward_time<T, 1>(params);
}

}  // namespace mamba
