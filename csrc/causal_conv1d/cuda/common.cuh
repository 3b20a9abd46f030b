// What the causal convolution's kernels share: taps, inputs around a row's ends, sequence masks, and the launchers' names.
#pragma once

#include "common/cuda_vector.cuh"

namespace mamba {

constexpr int kConvMaxWidth = 4;
constexpr int kConvHalo = kConvMaxWidth - 1;  // steps that a window reaches back, at most
constexpr int kConvThreads = 256;
constexpr int kConvWarps = kConvThreads / 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// One launcher a dtype, instantiated in cuda/f32.cu, f16.cu and bf16.cu.
template <typename T>
cudaError_t causal_conv1d_forward_launch(const MambaCausalConv1d& params);
template <typename T>
cudaError_t causal_conv1d_backward_launch(const MambaCausalConv1dBackward& params);
template <typename T>
cudaError_t causal_conv1d_update_launch(const MambaCausalConv1dUpdate& params);

// Weights by lag: weight[k] multiplies the input k steps ago. Lags of the width and beyond are never multiplied, rather
// than multiplied by zero: an infinity there would turn into NaN.
struct ConvTaps {
    float weight[kConvMaxWidth];
    float bias;
};

// One channel's taps as they lie in memory. They are loaded together and converted later: a dtype's branch around each load
// and its conversion would make every load wait for the one before.
struct RawTaps {
    uint32_t weight[kConvMaxWidth];
    uint32_t bias;
};

__device__ __forceinline__ uint32_t load_bits(const void* data, int64_t index, int32_t dtype) {
    return dtype == MAMBA_FLOAT32 ? static_cast<const uint32_t*>(data)[index] : static_cast<const uint16_t*>(data)[index];
}

__device__ __forceinline__ float float_from_bits(uint32_t bits, int32_t dtype) {
    if (dtype == MAMBA_FLOAT32) {
        return __uint_as_float(bits);
    }
    return dtype == MAMBA_FLOAT16 ? unpack2<__half>(bits).x : unpack2<__nv_bfloat16>(bits).x;
}

template <bool kPlain>
__device__ __forceinline__ RawTaps load_raw_taps(const MambaCausalConv1d& params, int64_t channel) {
    RawTaps raw = {};
    if constexpr (kPlain) {  // four weights with one access
        if (params.weight_dtype == MAMBA_FLOAT32) {
            const uint4 words = static_cast<const uint4*>(params.weight)[channel];
            raw.weight[0] = words.x;
            raw.weight[1] = words.y;
            raw.weight[2] = words.z;
            raw.weight[3] = words.w;
        } else {
            const uint2 words = static_cast<const uint2*>(params.weight)[channel];
            raw.weight[0] = words.x;
            raw.weight[1] = words.y;
        }
    } else {
#pragma unroll
        for (int lag = 0; lag < kConvMaxWidth; ++lag) {
            if (lag < params.width) {
                raw.weight[lag] =
                    load_bits(params.weight, channel * params.width + params.width - 1 - lag, params.weight_dtype);
            }
        }
    }
    raw.bias = params.bias != nullptr ? load_bits(params.bias, channel, params.bias_dtype) : 0;
    return raw;
}

template <bool kPlain>
__device__ __forceinline__ ConvTaps convert_taps(const MambaCausalConv1d& params, const RawTaps& raw) {
    ConvTaps taps;
    if constexpr (kPlain) {
        if (params.weight_dtype == MAMBA_FLOAT32) {
#pragma unroll
            for (int lag = 0; lag < kConvMaxWidth; ++lag) {
                taps.weight[lag] = __uint_as_float(raw.weight[kConvMaxWidth - 1 - lag]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kConvMaxWidth / 2; ++i) {
                const float2 pair = params.weight_dtype == MAMBA_FLOAT16 ? unpack2<__half>(raw.weight[i])
                                                                         : unpack2<__nv_bfloat16>(raw.weight[i]);
                taps.weight[kConvMaxWidth - 1 - 2 * i] = pair.x;
                taps.weight[kConvMaxWidth - 2 - 2 * i] = pair.y;
            }
        }
    } else {
#pragma unroll
        for (int lag = 0; lag < kConvMaxWidth; ++lag) {
            taps.weight[lag] = float_from_bits(raw.weight[lag], params.weight_dtype);
        }
    }
    taps.bias = float_from_bits(raw.bias, params.bias_dtype);
    return taps;
}

__device__ __forceinline__ ConvTaps load_taps(const MambaCausalConv1d& params, int64_t channel) {
    return convert_taps<false>(params, load_raw_taps<false>(params, channel));
}

// The batch entry of a block of batch_grid; it may be beyond the last one.
__device__ __forceinline__ int64_t grid_batch() {
    return static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
}

// d silu(x) / dx
__device__ __forceinline__ float silu_slope(float value) {
    const float s = sigmoid(value);
    return s * fmaf(value, 1.0f - s, 1.0f);
}

// The input at any step: steps before 0 come from initial_states, or are zero.
template <typename T, bool kPlain = false>
__device__ __forceinline__ float conv_input(const MambaCausalConv1d& params, int64_t batch, int64_t channel, int64_t step) {
    if (step >= 0) {
        return to_float(static_cast<const T*>(
            params.x)[batch * params.x_batch_stride + channel * params.x_dim_stride + step * params.x_len_stride]);
    }
    const int64_t index = params.width - 1 + step;
    if (kPlain || params.initial_states == nullptr || index < 0) {
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

template <int N>
constexpr uint32_t kOneSequence = (1u << (kConvHalo * N)) - 1;

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
    bool one = true;  // nearly always: then bits one by one would be a waste
#pragma unroll
    for (int i = 1; i < N + kConvHalo; ++i) {
        one = one && index[i] == index[0];
    }
    if (one) {
        return kOneSequence<N>;
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

// The forward kernels' grid: `blocks` for each batch entry. The second dimension holds no more than 65535 of them.
inline dim3 batch_grid(int64_t blocks, int64_t batch) {
    const int64_t y = batch < 65535 ? batch : 65535;
    return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(y), static_cast<unsigned>(ceil_div(batch, y)));
}

// The common case, for which kernels have a form without run-time branches: width 4, silu, no sequences, no initial states.
// kPlain in the kernels.
inline bool is_plain(const MambaCausalConv1d& params) {
    return params.width == kConvMaxWidth && params.silu && params.seq_idx == nullptr && params.initial_states == nullptr &&
           pointer_is_aligned(params.weight, kConvMaxWidth * dtype_size(params.weight_dtype));
}

// The strides and the pointer of one (B, D, L) tensor.
struct ConvLayout {
    const void* data;
    int64_t batch_stride, dim_stride, len_stride;
};

// Channel-last unless steps are neighbours; a tensor of one step is taken whichever way its channels allow.
inline bool is_channel_last(const MambaCausalConv1d& params) {
    return params.x_dim_stride == 1 && (params.x_len_stride != 1 || params.seqlen <= 1);
}

// Whether `vector` neighbouring channels can be moved at once everywhere in this tensor.
inline bool can_vectorise_channels(const MambaCausalConv1d& params, const ConvLayout& layout, int vector) {
    const int64_t size = dtype_size(params.dtype);
    const int64_t bytes = vector * size;
    return params.dim % vector == 0 && layout.dim_stride == 1 && pointer_is_aligned(layout.data, bytes) &&
           stride_is_aligned(params.seqlen, layout.len_stride, size, bytes) &&
           stride_is_aligned(params.batch, layout.batch_stride, size, bytes);
}

// Whether it has steps, they are neighbours in this tensor, and each of its rows lies as that of `reference` does between
// addresses that are multiples of 16 bytes. Rows need not begin at one: lengths may be odd.
inline bool rows_lie_alike(const MambaCausalConv1d& params, const ConvLayout& reference, const ConvLayout& layout) {
    const int64_t size = dtype_size(params.dtype);
    const int64_t distance = reinterpret_cast<intptr_t>(layout.data) - reinterpret_cast<intptr_t>(reference.data);
    return params.seqlen > 0 && (layout.len_stride == 1 || params.seqlen == 1) && distance % 16 == 0 &&
           pointer_is_aligned(layout.data, size) &&
           stride_is_aligned(params.dim, layout.dim_stride - reference.dim_stride, size, 16) &&
           stride_is_aligned(params.batch, layout.batch_stride - reference.batch_stride, size, 16);
}

// Whether every row of x begins at a multiple of 16 bytes and is as long as one.
inline bool rows_are_aligned(const MambaCausalConv1d& params, const ConvLayout& x) {
    const int64_t size = dtype_size(params.dtype);
    return params.seqlen * size % 16 == 0 && pointer_is_aligned(x.data, 16) &&
           stride_is_aligned(params.dim, x.dim_stride, size, 16) && stride_is_aligned(params.batch, x.batch_stride, size, 16);
}

}  // namespace mamba
