// What the causal convolution's kernels share: taps, inputs around a row's ends, sequence masks, and the launchers' names.
#pragma once

#include "common/cuda_vector.cuh"

namespace mamba {

constexpr int kConvMaxWidth = 4;
constexpr int kConvHalo = kConvMaxWidth - 1;  // steps that a window reaches back, at most
constexpr int kConvThreads = 256;
constexpr int kConvWarps = kConvThreads / 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// One launcher a dtype, instantiated in cuda_f32.cu, cuda_f16.cu and cuda_bf16.cu.
template <typename T>
cudaError_t causal_conv1d_forward_launch(const MambaCausalConv1d& params);
template <typename T>
cudaError_t causal_conv1d_backward_launch(const MambaCausalConv1dBackward& params);
template <typename T>
cudaError_t causal_conv1d_update_launch(const MambaCausalConv1dUpdate& params);

// The backward kernels walk (batch, segment) items; item i adds to slot i % slots, so the sums' order is fixed.
constexpr int kConvSegment = 512;
constexpr int64_t kConvMaxSlots = 256;

inline int64_t causal_conv1d_segments(const MambaCausalConv1d& params) {
    return params.seqlen > kConvSegment ? ceil_div(params.seqlen, kConvSegment) : 1;
}

// Weights by lag: weight[k] multiplies the input k steps ago. Lags of the width and beyond are never multiplied, rather
// than multiplied by zero: an infinity there would turn into NaN.
struct ConvTaps {
    float weight[kConvMaxWidth];
    float bias;
};

__device__ __forceinline__ ConvTaps load_taps(const MambaCausalConv1d& params, int64_t channel) {
    ConvTaps taps;
#pragma unroll
    for (int lag = 0; lag < kConvMaxWidth; ++lag) {
        taps.weight[lag] = 0.0f;
        if (lag < params.width) {
            const int64_t index = channel * params.width + params.width - 1 - lag;
            taps.weight[lag] = load_as_float(params.weight, index, params.weight_dtype);
        }
    }
    taps.bias = params.bias != nullptr ? load_as_float(params.bias, channel, params.bias_dtype) : 0.0f;
    return taps;
}

// d silu(x) / dx
__device__ __forceinline__ float silu_slope(float value) {
    const float s = sigmoid(value);
    return s * fmaf(value, 1.0f - s, 1.0f);
}

// The input at any step: steps before 0 come from initial_states, or are zero.
template <typename T>
__device__ __forceinline__ float conv_input(const MambaCausalConv1d& params, int64_t batch, int64_t channel, int64_t step) {
    if (step >= 0) {
        return to_float(static_cast<const T*>(
            params.x)[batch * params.x_batch_stride + channel * params.x_dim_stride + step * params.x_len_stride]);
    }
    const int64_t index = params.width - 1 + step;
    if (params.initial_states == nullptr || index < 0) {
        return 0.0f;
    }
    return to_float(
        static_cast<const T*>(params.initial_states)[batch * params.initial_batch_stride + channel * params.initial_dim_stride +
                                                     index * params.initial_len_stride]);
}

// The state after the last step, element index of width - 1.
template <typename T>
__device__ __forceinline__ void store_final_state(const MambaCausalConv1d& params, int64_t batch, int64_t channel, int index) {
    const float value = conv_input<T>(params, batch, channel, params.seqlen - (params.width - 1) + index);
    static_cast<T*>(params.final_states)[batch * params.final_batch_stride + channel * params.final_dim_stride +
                                         index * params.final_len_stride] = from_float<T>(value);
}

// Bit 3 * j + k - 1 says that steps t + j and t + j - k (or + k with kLead) are of one sequence; t + j < seqlen.
template <int N, bool kLead>
__device__ __forceinline__ uint32_t sequence_mask(const int32_t* seq_idx, int64_t t, int64_t seqlen) {
    int32_t index[N + kConvHalo];
    const int64_t first = kLead ? t : t - kConvHalo;
#pragma unroll
    for (int i = 0; i < N + kConvHalo; ++i) {
        const int64_t step = first + i;
        index[i] = seq_idx[step < 0 ? 0 : (step < seqlen ? step : seqlen - 1)];  // clamped: inputs and gradients there are 0
    }
    uint32_t mask = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
        for (int k = 1; k <= kConvHalo; ++k) {
            const bool same = kLead ? index[j + k] == index[j] : index[j + kConvHalo - k] == index[j + kConvHalo];
            mask |= static_cast<uint32_t>(same) << (kConvHalo * j + k - 1);
        }
    }
    return mask;
}

__device__ __forceinline__ bool mask_has(uint32_t mask, int j, int k) {
    return (mask >> (kConvHalo * j + k - 1)) & 1u;
}

// Sums before the activation of N steps. inputs[kConvHalo + j] is step j's input; mask is read only if masked.
template <int N>
__device__ __forceinline__ void convolve(const ConvTaps& taps, int width, const float* inputs, bool masked, uint32_t mask,
                                         float* sums) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        sums[j] = fmaf(taps.weight[0], inputs[kConvHalo + j], taps.bias);
    }
    if (!masked) {
#pragma unroll
        for (int k = 1; k <= kConvHalo; ++k) {
            if (k < width) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    sums[j] = fmaf(taps.weight[k], inputs[kConvHalo + j - k], sums[j]);
                }
            }
        }
    } else {
#pragma unroll
        for (int k = 1; k <= kConvHalo; ++k) {
            if (k < width) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    const float input = mask_has(mask, j, k) ? inputs[kConvHalo + j - k] : 0.0f;
                    sums[j] = fmaf(taps.weight[k], input, sums[j]);
                }
            }
        }
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

// The strides and the pointer of one (B, D, L) tensor.
struct ConvLayout {
    const void* data;
    int64_t batch_stride, dim_stride, len_stride;
};

// Channel-last unless steps are neighbours; a tensor of one step is taken whichever way its channels allow.
inline bool is_channel_last(const MambaCausalConv1d& params) {
    return params.x_dim_stride == 1 && (params.x_len_stride != 1 || params.seqlen <= 1);
}

// Whether `vector` neighbouring elements can be moved at once everywhere in this tensor.
inline bool can_vectorise(const MambaCausalConv1d& params, const ConvLayout& layout, bool channel_last, int vector) {
    const int64_t size = dtype_size(params.dtype);
    const int64_t bytes = vector * size;
    const int64_t inner = channel_last ? params.dim : params.seqlen;
    const int64_t inner_stride = channel_last ? layout.dim_stride : layout.len_stride;
    const int64_t outer = channel_last ? params.seqlen : params.dim;
    const int64_t outer_stride = channel_last ? layout.len_stride : layout.dim_stride;
    return inner % vector == 0 && inner_stride == 1 && pointer_is_aligned(layout.data, bytes) &&
           stride_is_aligned(outer, outer_stride, size, bytes) &&
           stride_is_aligned(params.batch, layout.batch_stride, size, bytes);
}

}  // namespace mamba
