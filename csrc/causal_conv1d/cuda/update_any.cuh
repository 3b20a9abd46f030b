// Causal convolution, decoding: any number of new inputs, any state, any strides.
#pragma once

#include "causal_conv1d/cuda/common.cuh"

namespace mamba {

// A thread takes one (batch, channel) and reads what it needs of the state before it writes any of it.
template <typename T>
__global__ void __launch_bounds__(kConvThreads) causal_conv1d_update_any(const MambaCausalConv1dUpdate params) {
    const int64_t batch = grid_batch();
    const int64_t channel = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (batch >= params.batch || channel >= params.dim) {
        return;
    }
    const T* x = static_cast<const T*>(params.x) + batch * params.x_batch_stride + channel * params.x_dim_stride;
    T* out = static_cast<T*>(params.out) + batch * params.out_batch_stride + channel * params.out_dim_stride;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int64_t row = params.conv_state_indices != nullptr ? params.conv_state_indices[batch] : batch;
    if (row < 0 || row >= params.state_rows) {
        for (int64_t t = 0; t < params.seqlen; ++t) {
            out[t * params.out_len_stride] = from_float<T>(output_without_state(row));
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

    uint32_t weight_bits[kConvMaxWidth] = {};  // by lag
    uint32_t window_bits[kConvHalo] = {};      // the inputs k + 1 steps before the first new one
#pragma unroll
    for (int k = 0; k < kConvMaxWidth; ++k) {
        if (k < params.width) {
            weight_bits[k] = load_bits(params.weight, channel * params.width + params.width - 1 - k, params.weight_dtype);
        }
    }
    const uint32_t bias_bits = params.bias != nullptr ? load_bits(params.bias, channel, params.bias_dtype) : 0;
#pragma unroll
    for (int k = 0; k < kConvHalo; ++k) {
        if (k + 1 < params.width) {
            int64_t index = length - 1 - k;
            if (params.cache_seqlens != nullptr) {
                index = next - 1 - k;
                index = index < 0 ? index + length : index;
            }
            window_bits[k] = load_bits(params.conv_state, state + index * params.state_len_stride, params.state_dtype);
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
        // Each input moves down by seqlen places: those before the window, the window, the new ones.
        for (int64_t i = 0; i + params.seqlen + params.width <= length; ++i) {
            const int64_t source = state + (i + params.seqlen) * params.state_len_stride;
            store_bits(params.conv_state, state + i * params.state_len_stride, params.state_dtype,
                       load_bits(params.conv_state, source, params.state_dtype));
        }
#pragma unroll
        for (int k = 0; k < kConvHalo; ++k) {
            const int64_t i = length - 1 - k - params.seqlen;
            if (k + 1 < params.width && i >= 0) {
                store_bits(params.conv_state, state + i * params.state_len_stride, params.state_dtype, window_bits[k]);
            }
        }
        for (int64_t t = params.seqlen > length ? params.seqlen - length : 0; t < params.seqlen; ++t) {
            store_from_float(params.conv_state, state + (length - params.seqlen + t) * params.state_len_stride,
                             params.state_dtype, to_float(x[t * params.x_len_stride]));
        }
    }

    float weight[kConvMaxWidth], window[kConvMaxWidth];  // by lag
#pragma unroll
    for (int k = 0; k < kConvMaxWidth; ++k) {
        weight[k] = float_from_bits(weight_bits[k], params.weight_dtype);
        window[k] = k < kConvHalo ? float_from_bits(window_bits[k], params.state_dtype) : 0.0f;
    }
    const float bias = float_from_bits(bias_bits, params.bias_dtype);
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
        out[t * params.out_len_stride] = from_float<T>(params.silu ? silu(sum) : sum);
    }
}

template <typename T>
cudaError_t launch_update_any(const MambaCausalConv1dUpdate& p) {
    const int threads = p.dim < kConvThreads ? static_cast<int>(round_up(p.dim, 32)) : kConvThreads;
    const Grid grid = batch_grid(ceil_div(p.dim, threads), p.batch);
    return launch_programmatic_dependent(causal_conv1d_update_any<T>, grid, threads, 0, p.run.stream, p);
}

}  // namespace mamba
