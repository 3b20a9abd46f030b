// What the causal convolution's kernels share: taps, inputs around a row's ends, sequence masks.
#pragma once

#include "causal_conv1d/plan.h"
#include "common/cuda_vector.cuh"

namespace mamba {

constexpr int kConvHalo = kConvMaxWidth - 1;  // steps that a window reaches back, at most
constexpr unsigned kFullWarp = 0xffffffffu;

// Weights by lag: weight[k] multiplies the input k steps ago. Lags of the width and beyond are never multiplied, rather
// than multiplied by zero: an infinity there would turn into NaN.
struct ConvTaps {
    float weight[kConvMaxWidth];
    float bias;
};

// One channel's taps as they lie in memory: loaded together, converted later.
struct RawTaps {
    uint32_t weight[kConvMaxWidth];
    uint32_t bias;
};

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

// A step's bits in a mask of sequences.
constexpr int kMaskBits = kConvMaxWidth;
template <int N>
constexpr uint32_t kOneSequence = 0xffffffffu >> (32 - kMaskBits * N);

// Bit 4 * j + k says that steps t + j and t + j - k (or + k with kLead) are of one sequence, and that it is no padding;
// t + j < seqlen.
template <int N, bool kLead>
__device__ __forceinline__ uint32_t sequence_mask(const int32_t* seq_idx, int64_t t, int64_t seqlen) {
    int32_t index[N + kConvHalo];
    const int64_t first = kLead ? t : t - kConvHalo;
#pragma unroll
    for (int i = 0; i < N + kConvHalo; ++i) {
        const int64_t step = first + i;
        // Inputs before the row are its first sequence's; what is beyond the end contributes zero.
        index[i] = seq_idx[step < 0 ? 0 : (step < seqlen ? step : seqlen - 1)];
    }
    bool one = index[0] >= 0;  // nearly always: then bits one by one would be a waste
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
        for (int k = 0; k <= kConvHalo; ++k) {
            const int32_t own = kLead ? index[j] : index[j + kConvHalo];
            const int32_t other = kLead ? index[j + k] : index[j + kConvHalo - k];
            mask |= static_cast<uint32_t>(own >= 0 && own == other) << (kMaskBits * j + k);
        }
    }
    return mask;
}

// Both masks of N steps: of those before and of those after. Their neighbours are read once, in vectors where these are
// aligned.
struct SequenceMasks {
    uint32_t lag, lead;
};
template <int N>
__device__ __forceinline__ SequenceMasks sequence_masks(const int32_t* seq_idx, int64_t t, int64_t seqlen) {
    constexpr int kReach = 4, kCount = N + 2 * kReach;  // whole vectors
    static_assert(N % 4 == 0 && kReach >= kConvHalo, "vectors of four");
    // A step beyond the row's ends counts as the first one's sequence, or as any: gradients behind the end are 0.
    const auto within = [&](int64_t step, int64_t last) { return step < 0 ? 0 : (step < last ? step : last); };
    int32_t index[kCount];
    if (t >= 0 && t % 4 == 0 && seqlen % 4 == 0 && reinterpret_cast<uintptr_t>(seq_idx) % 16 == 0) {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(seq_idx + within(t - kReach + i, seqlen - 4));
            index[i] = static_cast<int32_t>(four.x);
            index[i + 1] = static_cast<int32_t>(four.y);
            index[i + 2] = static_cast<int32_t>(four.z);
            index[i + 3] = static_cast<int32_t>(four.w);
        }
#pragma unroll
        for (int i = 0; i < kReach; ++i) {
            index[i] = t == 0 ? index[kReach] : index[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            index[i] = seq_idx[within(t - kReach + i, seqlen - 1)];
        }
    }
    bool one = index[kReach] >= 0;  // nearly always: then bits one by one would be a waste
#pragma unroll
    for (int i = kReach - kConvHalo; i < kReach + N + kConvHalo; ++i) {
        one = one && index[i] == index[kReach];
    }
    if (one) {
        return {kOneSequence<N>, kOneSequence<N>};
    }
    SequenceMasks masks = {0, 0};
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int32_t own = index[kReach + j];
#pragma unroll
        for (int k = 0; k <= kConvHalo; ++k) {
            masks.lag |= static_cast<uint32_t>(own >= 0 && own == index[kReach + j - k]) << (kMaskBits * j + k);
            masks.lead |= static_cast<uint32_t>(own >= 0 && own == index[kReach + j + k]) << (kMaskBits * j + k);
        }
    }
    return masks;
}

__device__ __forceinline__ bool mask_has(uint32_t mask, int j, int k) {
    return (mask >> (kMaskBits * j + k)) & 1u;
}

// Sums before the activation of N steps, 0 in padding. inputs[kConvHalo + j] is step j's input; mask is read only if masked.
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
#pragma unroll
        for (int j = 0; j < N; ++j) {  // last: an infinite weight times 0 is NaN
            sums[j] = mask_has(mask, j, 0) ? sums[j] : 0.0f;
        }
    }
}

}  // namespace mamba
