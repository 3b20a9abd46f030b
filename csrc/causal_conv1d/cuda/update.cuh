// Causal convolution, decoding: a few new steps against the inputs kept in conv_state, which is updated in place.
#pragma once

#include "causal_conv1d/cuda/common.cuh"

namespace mamba {

// A thread takes one (batch, channel) and reads what it needs of the state before it writes any of it.
template <typename T>
__global__ void __launch_bounds__(kConvThreads) causal_conv1d_update_kernel(const MambaCausalConv1dUpdate params) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kConvThreads + threadIdx.x;
    const int64_t batch = thread / params.dim;
    const int64_t channel = thread - batch * params.dim;
    if (batch >= params.batch) {
        return;
    }
    const T* x = static_cast<const T*>(params.x) + batch * params.x_batch_stride + channel * params.x_dim_stride;
    T* out = static_cast<T*>(params.out) + batch * params.out_batch_stride + channel * params.out_dim_stride;
    const int64_t row = params.conv_state_indices != nullptr ? params.conv_state_indices[batch] : batch;
    if (row < 0 || row >= params.state_rows) {
        // Padding is zero. A row beyond the cache cannot be reported from here: NaN shows it, and nothing is overwritten.
        const float value = row < 0 ? 0.0f : __int_as_float(0x7fffffff);
        for (int64_t t = 0; t < params.seqlen; ++t) {
            out[t * params.out_len_stride] = from_float<T>(value);
        }
        return;
    }
    const int64_t state = row * params.state_row_stride + channel * params.state_dim_stride;
    const int64_t length = params.state_len;
    int64_t next = 0;  // where a circular state takes the next input
    if (params.cache_seqlens != nullptr) {
        next = params.cache_seqlens[batch] % length;
        next = next < 0 ? next + length : next;
    }

    float weight[kConvMaxWidth];  // by lag
    float window[kConvMaxWidth];  // by lag too: window[k] is the input k steps ago
#pragma unroll
    for (int k = 0; k < kConvMaxWidth; ++k) {
        weight[k] = 0.0f;
        window[k] = 0.0f;
        if (k < params.width) {
            weight[k] = load_as_float(params.weight, channel * params.width + params.width - 1 - k, params.weight_dtype);
        }
    }
    const float bias = params.bias != nullptr ? load_as_float(params.bias, channel, params.bias_dtype) : 0.0f;
#pragma unroll
    for (int k = 0; k < kConvHalo; ++k) {  // the input k + 1 steps before the first new one
        if (k + 1 < params.width) {
            int64_t index = length - 1 - k;
            if (params.cache_seqlens != nullptr) {
                index = next - 1 - k;
                index = index < 0 ? index + length : index;
            }
            window[k] = load_as_float(params.conv_state, state + index * params.state_len_stride, params.state_dtype);
        }
    }

    // The state first: out may be x.
    if (params.cache_seqlens != nullptr) {
        for (int64_t t = 0; t < params.seqlen; ++t) {
            const float value = to_float(x[t * params.x_len_stride]);
            store_from_float(params.conv_state, state + next * params.state_len_stride, params.state_dtype, value);
            next = next + 1 == length ? 0 : next + 1;
        }
    } else {
        for (int64_t i = 0; i < length; ++i) {
            const int64_t source = i + params.seqlen;
            const float value =
                source < length ? load_as_float(params.conv_state, state + source * params.state_len_stride, params.state_dtype)
                                : to_float(x[(source - length) * params.x_len_stride]);
            store_from_float(params.conv_state, state + i * params.state_len_stride, params.state_dtype, value);
        }
    }

    for (int64_t t = 0; t < params.seqlen; ++t) {
#pragma unroll
        for (int k = kConvHalo; k > 0; --k) {
            window[k] = window[k - 1];
        }
        window[0] = to_float(x[t * params.x_len_stride]);
        float sum = fmaf(weight[0], window[0], bias);
#pragma unroll
        for (int k = 1; k < kConvMaxWidth; ++k) {
            if (k < params.width) {
                sum = fmaf(weight[k], window[k], sum);
            }
        }
        out[t * params.out_len_stride] = from_float<T>(params.silu ? sum * sigmoid(sum) : sum);
    }
}

template <typename T>
cudaError_t launch_conv_update(const MambaCausalConv1dUpdate& params) {
    const int64_t blocks = ceil_div(params.batch * params.dim, kConvThreads);
    return launch_kernel(causal_conv1d_update_kernel<T>, blocks, kConvThreads, 0, params.run.stream, params);
}

}  // namespace mamba
