// One step of one channel of the causal convolution, inside kernels that do more: what it loads, its value, its new state.
// Params: a struct with the fields conv_*, width, state_len and dtype (of the input) of MambaMamba2Step.
#pragma once

#include "causal_conv1d/cuda/common.cuh"
#include "causal_conv1d/step.h"

namespace mamba {

// Params of a convolution of one dtype with four taps, known when the kernel is compiled: half of a step's instructions would
// ask for them. has_conv_of_one_dtype (step.h): whether a call's are these.
template <class Params, typename T>
struct ConvolutionOfOneDtype : Params {
    static constexpr int32_t width = kConvStepTaps;
    static constexpr int64_t state_len = kConvStepTaps;
    static constexpr int32_t dtype = kDtype<T>, conv_state_dtype = dtype, conv_weight_dtype = dtype, conv_bias_dtype = dtype;
};

// As it lies in memory: loaded together, converted later.
struct ConvStepBits {
    uint32_t weight[kConvMaxWidth];  // by lag
    uint32_t window[kConvHalo];      // window[k]: the input k + 1 steps ago
    uint32_t input, bias;
};

template <class Params>
__device__ __forceinline__ int64_t conv_state_offset(const Params& p, int64_t batch, int64_t channel) {
    return batch * p.conv_state_batch_stride + channel * p.conv_state_dim_stride;
}

template <class Params>
__device__ __forceinline__ void load_conv_window(const Params& p, int64_t batch, int64_t channel, const void* inputs,
                                                 int64_t index, ConvStepBits& bits) {
    const int64_t state = conv_state_offset(p, batch, channel);
#pragma unroll
    for (int k = 0; k < kConvHalo; ++k) {
        bits.window[k] = 0;
        if (k + 1 < p.width) {
            bits.window[k] =
                load_bits(p.conv_state, state + (p.state_len - 1 - k) * p.conv_state_len_stride, p.conv_state_dtype);
        }
    }
    bits.input = load_bits(inputs, index, p.dtype);
}

template <class Params>
__device__ __forceinline__ void load_conv_taps(const Params& p, int64_t channel, ConvStepBits& bits) {
#pragma unroll
    for (int lag = 0; lag < kConvMaxWidth; ++lag) {
        bits.weight[lag] = 0;
        if (lag < p.width) {
            bits.weight[lag] = load_bits(p.conv_weight, channel * p.width + p.width - 1 - lag, p.conv_weight_dtype);
        }
    }
    bits.bias = p.conv_bias != nullptr ? load_bits(p.conv_bias, channel, p.conv_bias_dtype) : 0;
}

// The new input is element `index` of `inputs`.
template <class Params>
__device__ __forceinline__ ConvStepBits load_conv_step(const Params& p, int64_t batch, int64_t channel, const void* inputs,
                                                       int64_t index) {
    ConvStepBits bits;
    load_conv_taps(p, channel, bits);
    load_conv_window(p, batch, channel, inputs, index, bits);
    return bits;
}

// silu(bias + weight . inputs)
template <class Params>
__device__ __forceinline__ float conv_step(const Params& p, const ConvStepBits& bits) {
    float sum = p.conv_bias != nullptr ? float_from_bits(bits.bias, p.conv_bias_dtype) : 0.0f;
    sum = fmaf(float_from_bits(bits.weight[0], p.conv_weight_dtype), float_from_bits(bits.input, p.dtype), sum);
#pragma unroll
    for (int lag = 1; lag < kConvMaxWidth; ++lag) {
        if (lag < p.width) {  // a tap beyond is never multiplied: an infinity there would become NaN
            sum = fmaf(float_from_bits(bits.weight[lag], p.conv_weight_dtype),
                       float_from_bits(bits.window[lag - 1], p.conv_state_dtype), sum);
        }
    }
    return silu(sum);
}

// Shifts the channel's state by one and appends the input. Nobody else may read or write the channel meanwhile.
template <class Params>
__device__ __forceinline__ void store_conv_state(const Params& p, int64_t batch, int64_t channel, const ConvStepBits& bits) {
    const int64_t state = conv_state_offset(p, batch, channel), stride = p.conv_state_len_stride;
    for (int64_t i = 0; i + p.width < p.state_len; ++i) {  // older than the window
        const uint32_t older = load_bits(p.conv_state, state + (i + 1) * stride, p.conv_state_dtype);
        store_bits(p.conv_state, state + i * stride, p.conv_state_dtype, older);
    }
#pragma unroll
    for (int k = 0; k < kConvHalo; ++k) {
        const int64_t i = p.state_len - 2 - k;
        if (k + 1 < p.width && i >= 0) {
            store_bits(p.conv_state, state + i * stride, p.conv_state_dtype, bits.window[k]);
        }
    }
    store_from_float(p.conv_state, state + (p.state_len - 1) * stride, p.conv_state_dtype,
                     float_from_bits(bits.input, p.dtype));
}

}  // namespace mamba
