// Causal convolution, backward, on the GPU: what both mappings share. They write dx and partial sums of dweight and dbias.
// The sum before the activation is computed again from x. g is the gradient with respect to that sum.
#pragma once

#include "causal_conv1d/cuda/common.cuh"
#include "causal_conv1d/parts.h"

namespace mamba {

// g at any step from memory, as the input `lag` steps before receives it; zero beyond the row's end, in padding, and where that
// input is of another sequence.
template <typename T>
__device__ __forceinline__ float conv_gradient(const MambaCausalConv1dBackward& params, int64_t batch, int64_t channel,
                                               int64_t step, const ConvTaps& taps, int lag = 0) {
    const MambaCausalConv1d& forward = params.forward;
    if (step >= forward.seqlen) {
        return 0.0f;
    }
    const float g = to_float(static_cast<const T*>(
        params.dout)[batch * params.dout_batch_stride + channel * params.dout_dim_stride + step * params.dout_len_stride]);
    uint32_t mask = 0;
    if (forward.seq_idx != nullptr) {
        mask = sequence_mask<1, false>(forward.seq_idx + batch * forward.seqlen, step, forward.seqlen);
        if (!mask_has(mask, 0, lag)) {
            return 0.0f;
        }
    }
    if (!forward.silu) {
        return g;
    }
    float inputs[kConvHalo + 1];
    if (step >= kConvHalo) {  // four loads that do not wait for one another
        const T* x = static_cast<const T*>(forward.x) + batch * forward.x_batch_stride + channel * forward.x_dim_stride +
                     (step - kConvHalo) * forward.x_len_stride;
#pragma unroll
        for (int i = 0; i <= kConvHalo; ++i) {
            inputs[i] = to_float(x[i * forward.x_len_stride]);
        }
    } else {
#pragma unroll
        for (int i = 0; i <= kConvHalo; ++i) {
            inputs[i] = conv_input<T>(forward, batch, channel, step - kConvHalo + i);
        }
    }
    float sum;
    convolve<1>(taps, forward.width, inputs, forward.seq_idx != nullptr, mask, &sum);
    return g * silu_slope(sum);
}

// What the final states' gradient adds to the input at `step`, which may be before 0.
template <typename T>
__device__ __forceinline__ float final_state_gradient(const MambaCausalConv1dBackward& params, int64_t batch, int64_t channel,
                                                      int64_t step) {
    const int states = params.forward.width - 1;
    const int64_t index = step - (params.forward.seqlen - states);
    if (params.dfinal_states == nullptr || index < 0 || index >= states) {
        return 0.0f;
    }
    return to_float(static_cast<const T*>(params.dfinal_states)[(batch * params.forward.dim + channel) * states + index]);
}

template <typename T>
__device__ __forceinline__ void store_initial_gradient(const MambaCausalConv1dBackward& params, int64_t batch, int64_t channel,
                                                       const ConvTaps& taps) {
    const MambaCausalConv1d& forward = params.forward;
    const int states = forward.width - 1;
    const bool unseen = forward.seq_idx != nullptr && forward.seqlen > 0 && forward.seq_idx[batch * forward.seqlen] < 0;
    for (int i = 0; i < states; ++i) {
        const int64_t step = i - states;
        float sum = final_state_gradient<T>(params, batch, channel, step);
#pragma unroll
        for (int k = 1; k <= kConvHalo; ++k) {
            if (k < forward.width && step + k >= 0 && !unseen) {
                sum = fmaf(taps.weight[k], conv_gradient<T>(params, batch, channel, step + k, taps, k), sum);
            }
        }
        static_cast<T*>(params.dinitial_states)[(batch * forward.dim + channel) * states + i] = from_float<T>(sum);
    }
}

// The (batch, segment) items of a slot, one after the other.
struct ConvItem {
    int64_t batch;
    unsigned index;  // of the segment

    __device__ __forceinline__ ConvItem(unsigned slot, unsigned segments) : batch(slot / segments), index(slot % segments) {}
    __device__ __forceinline__ void advance(unsigned slots, unsigned segments) {
        index += slots;
        batch += index / segments;
        index %= segments;
    }
};

// Partial sums of one channel: weights by lag, then the bias.
struct ConvSums {
    float weight[kConvMaxWidth];
    float bias;
};

// In the usual case (width 4, silu, one sequence) taps are in units in which g costs least: times -log2(e), so that what they
// add up to is an exponent at once. Gradients come out in units of -ln(2), so dx, taps times g, is as without; sums are scaled
// back.
constexpr float kTapScale = -kLog2e;

// Hides what a number is or how it came about.
__device__ __forceinline__ float opaque_number(float number) {
    return __int_as_float(opaque(__float_as_int(number)));
}

__device__ __forceinline__ ConvTaps scaled(ConvTaps taps) {
#pragma unroll
    for (int k = 0; k < kConvMaxWidth; ++k) {
        taps.weight[k] = opaque_number(taps.weight[k] * kTapScale);  // or they are multiplied in each loop
    }
    taps.bias = opaque_number(taps.bias * kTapScale);
    return taps;
}

__device__ __forceinline__ void scale_back(ConvSums& sums) {
#pragma unroll
    for (int k = 0; k < kConvMaxWidth; ++k) {
        sums.weight[k] *= kTapScale;
    }
    sums.bias *= kTapScale;
}

// The unit of gradients, -ln(2), as reciprocal_fast has it.
__device__ __forceinline__ float gradient_unit() {
    return reciprocal_fast(opaque_number(kTapScale));
}

// g of N steps: dout s (1 + x (1 - s)), where x is the sum and s its sigmoid. r is s times the unit, and exactly that for large
// x, so that x (1 - s) is 0 there.
template <int N>
__device__ __forceinline__ void scaled_gradients(const ConvTaps& taps, float unit, const float* inputs, const float* dout,
                                                 float* g) {
    float exponents[N];
    convolve<N>(taps, kConvMaxWidth, inputs, false, 0, exponents);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const float r = reciprocal_fast(fmaf(exp2_fast(exponents[j]), kTapScale, kTapScale));
        g[j] = r * dout[j] * fmaf(-exponents[j], r - unit, 1.0f);
    }
}

// What the loops below branch on, at run time or not.
struct ConvOptions {
    int width;
    bool silu, masked;
};
struct PlainOptions {
    static constexpr int width = kConvMaxWidth;
    static constexpr bool silu = true, masked = false;
};

template <bool kPlain>
__device__ __forceinline__ ConvOptions conv_options(const MambaCausalConv1d& params) {
    return {kPlain ? kConvMaxWidth : params.width, kPlain || params.silu != 0, !kPlain && params.seq_idx != nullptr};
}

// g of N steps from their sums before the activation, 0 in padding, and its share of dweight and dbias.
template <int N, typename Options>
__device__ __forceinline__ void gradients(const Options& options, const ConvTaps& taps, const float* inputs, uint32_t mask,
                                          const float* dout, float* g) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        g[j] = dout[j];
    }
    if (options.silu) {
        float sums[N];
        convolve<N>(taps, options.width, inputs, options.masked, mask, sums);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            g[j] *= silu_slope(sums[j]);
        }
    }
    if (options.masked) {
#pragma unroll
        for (int j = 0; j < N; ++j) {  // padding may hold NaN
            g[j] = mask_has(mask, j, 0) ? g[j] : 0.0f;
        }
    }
}

template <int N, typename Options>
__device__ __forceinline__ void accumulate(const Options& options, const float* inputs, uint32_t mask, const float* g,
                                           ConvSums& sums) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const float input = options.masked && !mask_has(mask, j, 0) ? 0.0f : inputs[kConvHalo + j];
        sums.bias += g[j];
        sums.weight[0] = fmaf(g[j], input, sums.weight[0]);
    }
#pragma unroll
    for (int k = 1; k <= kConvHalo; ++k) {
        if (k < options.width) {
            if (!options.masked) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    sums.weight[k] = fmaf(g[j], inputs[kConvHalo + j - k], sums.weight[k]);
                }
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    const float input = mask_has(mask, j, k) ? inputs[kConvHalo + j - k] : 0.0f;
                    sums.weight[k] = fmaf(g[j], input, sums.weight[k]);
                }
            }
        }
    }
}

// dx of N steps from g of these and the kConvHalo that follow.
template <int N, typename Options>
__device__ __forceinline__ void input_gradients(const Options& options, const ConvTaps& taps, const float* g,
                                                uint32_t lead_mask, float* dx) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        dx[j] = taps.weight[0] * g[j];
    }
#pragma unroll
    for (int k = 1; k <= kConvHalo; ++k) {
        if (k < options.width) {
            if (!options.masked) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    dx[j] = fmaf(taps.weight[k], g[j + k], dx[j]);
                }
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    dx[j] = fmaf(taps.weight[k], mask_has(lead_mask, j, k) ? g[j + k] : 0.0f, dx[j]);
                }
            }
        }
    }
    if (options.masked) {
#pragma unroll
        for (int j = 0; j < N; ++j) {  // of padding: an infinite weight times 0 is NaN
            dx[j] = mask_has(lead_mask, j, 0) ? dx[j] : 0.0f;
        }
    }
}

// One channel's sums, to its slot.
__device__ __forceinline__ void store_sums(const ConvBackward& params, int64_t slot, int64_t channel, const ConvSums& sums) {
    const MambaCausalConv1d& forward = params.forward;
    const int64_t row = slot * forward.dim + channel;
#pragma unroll
    for (int k = 0; k < kConvMaxWidth; ++k) {
        if (k < forward.width) {
            const int64_t index = row * forward.width + forward.width - 1 - k;
            store_from_float(params.weight_sums, index, params.weight_sums_dtype, sums.weight[k]);
        }
    }
    if (params.bias_sums != nullptr) {
        store_from_float(params.bias_sums, row, params.bias_sums_dtype, sums.bias);
    }
}

// Adds up the sums of groups of `lanes` lanes; each lane gets the result.
__device__ __forceinline__ void reduce_sums(int lanes, ConvSums& sums) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int k = 0; k < kConvMaxWidth; ++k) {
            sums.weight[k] += __shfl_xor_sync(kFullWarp, sums.weight[k], distance);
        }
        sums.bias += __shfl_xor_sync(kFullWarp, sums.bias, distance);
    }
}

}  // namespace mamba
