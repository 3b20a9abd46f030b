// Causal convolution, forward, lanes along channels: for channel-last tensors.
#pragma once

#include "causal_conv1d/cuda/common.cuh"
#include "common/cuda_device.h"

namespace mamba {

constexpr int kForwardChannelBlocks = 3;  // on a multiprocessor

// The states after the last step, of V channels.
template <typename T, int V>
__device__ __forceinline__ void store_final_states(const MambaCausalConv1d& params, int64_t batch, int64_t channel) {
    for (int i = 0; i < params.width - 1; ++i) {
        for (int v = 0; v < V; ++v) {
            store_final_state<T>(params, batch, channel + v, i);
        }
    }
}

// A thread takes V neighbouring channels and walks `steps` steps of time with the window in registers. The next kUnroll
// steps are on their way while these are computed. V = 1 takes any strides.
template <typename T, int V, bool kPlain>
__global__ void __launch_bounds__(kConvThreads, kForwardChannelBlocks)
    causal_conv1d_forward_channel(const MambaCausalConv1d params, const int steps, const unsigned vectors) {
    constexpr int kUnroll = 4;  // at least kConvHalo
    const int width = kPlain ? kConvMaxWidth : params.width;
    const bool masked = !kPlain && params.seq_idx != nullptr;
    const unsigned thread = blockIdx.x * kConvThreads + threadIdx.x;
    const unsigned chunk = thread / vectors;
    const int64_t channel = static_cast<int64_t>(thread - chunk * vectors) * V;
    const int64_t begin = static_cast<int64_t>(chunk) * steps;
    const int64_t batch = grid_batch();
    if ((begin >= params.seqlen && chunk > 0) || batch >= params.batch) {
        return;
    }
    const int64_t left = params.seqlen - begin;
    const int count = static_cast<int>(left < steps ? left : steps);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    RawTaps raw_taps[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
        raw_taps[v] = load_raw_taps<kPlain>(params, channel + v);
    }

    const T* x = static_cast<const T*>(params.x) + batch * params.x_batch_stride + channel * params.x_dim_stride +
                 begin * params.x_len_stride;
    T* out = static_cast<T*>(params.out) + batch * params.out_batch_stride + channel * params.out_dim_stride +
             begin * params.out_len_stride;
    const int32_t* seq_idx = masked ? params.seq_idx + batch * params.seqlen : nullptr;

    Packed<T, V> next[kUnroll];
    float window[kConvHalo + kUnroll][V];  // by step first; the first kConvHalo are those before the steps in hand
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        next[i] = packed_zero<T, V>();
        if (i < count) {
            next[i] = packed_load<T, V>(x + i * params.x_len_stride);
        }
    }
    if (begin >= kConvHalo) {
        Packed<T, V> before[kConvHalo];
#pragma unroll
        for (int i = 0; i < kConvHalo; ++i) {
            before[i] = packed_load<T, V>(x + (i - kConvHalo) * params.x_len_stride);
        }
#pragma unroll
        for (int i = 0; i < kConvHalo; ++i) {
            unpack<T, V>(before[i], window[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kConvHalo; ++i) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                window[i][v] = count > 0 ? conv_input<T>(params, batch, channel + v, begin - kConvHalo + i) : 0.0f;
            }
        }
    }
    ConvTaps taps[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
        taps[v] = convert_taps<kPlain>(params, raw_taps[v]);
    }

    const T* ahead = x + kUnroll * params.x_len_stride;
    for (int t = 0; t < count; t += kUnroll) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            unpack<T, V>(next[i], window[kConvHalo + i]);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            ahead = opaque(ahead);
            if (t + kUnroll + i < count) {
                next[i] = packed_load<T, V>(ahead);
            }
            ahead += params.x_len_stride;
        }
        uint32_t mask = 0;
        if (masked) {
            mask = sequence_mask<kUnroll, false>(seq_idx, begin + t, params.seqlen);
        }
        const bool several = masked && mask != kOneSequence<kUnroll>;
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            out = opaque(out);
            if (t + i < count) {
                float sums[V];
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    float inputs[kConvHalo + 1];
#pragma unroll
                    for (int k = 0; k <= kConvHalo; ++k) {
                        inputs[k] = window[i + k][v];
                    }
                    convolve<1>(taps[v], width, inputs, several, mask >> (kMaskBits * i), &sums[v]);
                }
                if (kPlain || params.silu) {
#pragma unroll
                    for (int v = 0; v < V; ++v) {
                        sums[v] = silu(sums[v]);
                    }
                }
                packed_store<T, V>(out, pack<T, V>(sums));
            }
            out += params.out_len_stride;
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
        store_final_states<T, V>(params, batch, channel);
    }
}

template <typename T, int V, bool kPlain>
cudaError_t launch_forward_channel(const MambaCausalConv1d& params) {
    const int64_t vectors = ceil_div(params.dim, V);
    const DeviceLimits device(params.run.device);
    if (device.error != cudaSuccess) {
        return device.error;
    }
    const int steps =
        conv_forward_steps(params.batch, vectors, params.seqlen, int64_t{kForwardChannelBlocks} * device.processors);
    const int64_t chunks = params.seqlen > steps ? ceil_div(params.seqlen, steps) : 1;
    const Grid grid = batch_grid(ceil_div(vectors * chunks, kConvThreads), params.batch);
    return launch_programmatic_dependent(causal_conv1d_forward_channel<T, V, kPlain>, grid, kConvThreads, 0, params.run.stream,
                                         params, steps, static_cast<unsigned>(vectors));
}

}  // namespace mamba
