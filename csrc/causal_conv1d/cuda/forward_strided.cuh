// Causal convolution, forward, one step a lane and any strides: for layouts that the other kernels do not take.
#pragma once

#include "causal_conv1d/cuda/common.cuh"

namespace mamba {

// A warp takes kForwardStridedTile steps of one row; the steps before a lane's own come from the cache.
constexpr int kForwardStridedTile = 256;

template <typename T>
__global__ void __launch_bounds__(kConvThreads)
    causal_conv1d_forward_strided(const MambaCausalConv1d params, const unsigned chunks) {
    const int lane = threadIdx.x & 31;
    const unsigned warp = blockIdx.x * kConvWarps + (threadIdx.x >> 5);
    const int64_t channel = warp / chunks;
    const int64_t begin = static_cast<int64_t>(warp % chunks) * kForwardStridedTile;
    const int64_t batch = grid_batch();
    if (channel >= params.dim || batch >= params.batch) {
        return;
    }
    const ConvTaps taps = load_taps(params, channel);
    T* out = static_cast<T*>(params.out) + batch * params.out_batch_stride + channel * params.out_dim_stride;
    for (int64_t t = begin + lane; t < begin + kForwardStridedTile && t < params.seqlen; t += 32) {
        float inputs[kConvHalo + 1];
#pragma unroll
        for (int i = 0; i <= kConvHalo; ++i) {
            inputs[i] = conv_input<T>(params, batch, channel, t - kConvHalo + i);
        }
        uint32_t mask = 0;
        if (params.seq_idx != nullptr) {
            mask = sequence_mask<1, false>(params.seq_idx + batch * params.seqlen, t, params.seqlen);
        }
        float sum;
        convolve<1>(taps, params.width, inputs, params.seq_idx != nullptr, mask, &sum);
        out[t * params.out_len_stride] = from_float<T>(params.silu ? silu(sum) : sum);
    }
    if (params.final_states != nullptr && begin == 0 && lane < params.width - 1) {
        store_final_state<T>(params, batch, channel, lane);
    }
}

template <typename T>
cudaError_t launch_forward_strided(const MambaCausalConv1d& params) {
    const int64_t chunks = params.seqlen > kForwardStridedTile ? ceil_div(params.seqlen, kForwardStridedTile) : 1;
    const Grid grid = batch_grid(ceil_div(params.dim * chunks, kConvWarps), params.batch);
    return launch_kernel(causal_conv1d_forward_strided<T>, grid, kConvThreads, 0, params.run.stream, params,
                         static_cast<unsigned>(chunks));
}

}  // namespace mamba
