// Causal convolution, decoding, one new input, four taps, a state that is shifted, all tensors in vectors: a thread takes two
// channels.
#pragma once

#include "causal_conv1d/cuda/common.cuh"

namespace mamba {

// The last inputs of two neighbouring channels, as they lie in memory: their steps are neighbours, four of them, or the
// channels are (kChannelLast), with three or four steps of which the last three are read.
template <typename T, bool kChannelLast>
struct PairState {
    static constexpr int kSteps = kChannelLast ? kConvHalo : kConvMaxWidth;
    static constexpr int kVector = kChannelLast ? 2 : 2 * kSteps;  // all of it is one vector, of 16 bytes mostly, or one a step
    static constexpr int kVectors = 2 * kSteps / kVector;
    Packed<T, kVector> vectors[kVectors];

    static __device__ __forceinline__ T* find(const MambaCausalConv1dUpdate& params, int64_t row, int channel) {
        T* const state = static_cast<T*>(params.conv_state) + row * params.state_row_stride;
        return kChannelLast ? state + (params.state_len - kSteps) * params.state_len_stride + channel
                            : state + channel * kSteps;
    }
    __device__ __forceinline__ void load(const T* state, int64_t stride) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            vectors[i] = packed_load<T, kVector>(state + i * stride);
        }
    }
    // inputs[c][s]: the input of channel c so many steps after the first one that was read.
    __device__ __forceinline__ void get(float (&inputs)[2][kSteps]) const {
        float values[2 * kSteps];
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            unpack<T, kVector>(vectors[i], values + i * kVector);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                inputs[c][s] = values[kChannelLast ? 2 * s + c : kSteps * c + s];
            }
        }
    }
    // Appends an input to steps that are neighbours. inputs: what get gave.
    __device__ __forceinline__ void shift(const float (&inputs)[2][kSteps], const float (&newest)[2]) {
        if constexpr (!kChannelLast) {
            float values[2 * kSteps];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
#pragma unroll
                for (int s = 0; s < kSteps; ++s) {
                    values[kSteps * c + s] = s + 1 < kSteps ? inputs[c][s + 1] : newest[c];
                }
            }
            vectors[0] = pack<T, kVector>(values);
        }
    }
    // Of channels that are neighbours each vector moves one step on.
    __device__ __forceinline__ void store(T* state, int64_t stride, int64_t state_len, const Packed<T, 2>& newest) const {
        if constexpr (kChannelLast) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                if (i > 0 || state_len > kSteps) {
                    packed_store<T, kVector>(state + (i - 1) * stride, vectors[i]);
                }
            }
            packed_store<T, kVector>(state + (kSteps - 1) * stride, newest);
        } else {
            packed_store<T, kVector>(state, vectors[0]);
        }
    }
};

// What a small launch, which is mostly waiting, brings closer before the kernel ahead has ended; that one may still change it.
template <class State>
__device__ __forceinline__ void prefetch_pair(const MambaCausalConv1dUpdate& params, int64_t row, int channel) {
    const int weight_size = params.weight_dtype == MAMBA_FLOAT32 ? 4 : 2;
    prefetch_to_L2(static_cast<const char*>(params.weight) + channel * kConvMaxWidth * weight_size);
    if (params.conv_state_indices == nullptr) {
#pragma unroll
        for (int i = 0; i < State::kVectors; ++i) {
            prefetch_to_L2(State::find(params, row, channel) + i * params.state_len_stride);
        }
    }
}

template <typename T, bool kChannelLast>
__global__ void __launch_bounds__(kPairThreads) causal_conv1d_update_pairs(const MambaCausalConv1dUpdate params) {
    using State = PairState<T, kChannelLast>;
    const int channel = 2 * static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const int64_t batch = grid_batch();
    if (channel >= params.dim || batch >= params.batch) {
        return;
    }
    griddepcontrol_launch_dependents();
    prefetch_pair<State>(params, batch, channel);
    griddepcontrol_wait();

    // All loads come before any use, without a branch between.
    const int row = params.conv_state_indices != nullptr ? params.conv_state_indices[batch] : static_cast<int>(batch);
    const bool found = row >= 0 && row < params.state_rows;
    const Packed<T, 2> newest_bits =
        packed_load<T, 2>(static_cast<const T*>(params.x) + batch * params.x_batch_stride + channel);
    NeighbourBits<2 * kConvMaxWidth> weight_bits;
    NeighbourBits<2> bias_bits;
    weight_bits.load(params.weight, channel * kConvMaxWidth, params.weight_dtype, true);
    bias_bits.load(params.bias, channel, params.bias_dtype, params.bias != nullptr);
    State state;
    state.load(State::find(params, found ? row : 0, channel), params.state_len_stride);

    float weight[2 * kConvMaxWidth], sums[2], newest[2], inputs[2][State::kSteps];
    weight_bits.to_floats(params.weight_dtype, weight);
    bias_bits.to_floats(params.bias_dtype, sums);
    unpack<T, 2>(newest_bits, newest);
    state.get(inputs);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const float* const taps = weight + c * kConvMaxWidth;
        sums[c] = fmaf(taps[kConvHalo], newest[c], sums[c]);
#pragma unroll
        for (int lag = 1; lag < kConvMaxWidth; ++lag) {
            sums[c] = fmaf(taps[kConvHalo - lag], inputs[c][State::kSteps - lag], sums[c]);
        }
        sums[c] = params.silu ? silu(sums[c]) : sums[c];
        sums[c] = found ? sums[c] : output_without_state(row);
    }
    state.shift(inputs, newest);
    if (found) {
        state.store(State::find(params, row, channel), params.state_len_stride, params.state_len, newest_bits);
    }
    packed_store<T, 2>(static_cast<T*>(params.out) + batch * params.out_batch_stride + channel, pack<T, 2>(sums));
}

template <typename T, bool kChannelLast>
cudaError_t launch_update_pairs(const MambaCausalConv1dUpdate& p) {
    const int64_t pairs = p.dim / 2;
    const int threads = pairs < kPairThreads ? static_cast<int>(round_up(pairs, 32)) : kPairThreads;
    const Grid grid = batch_grid(ceil_div(pairs, threads), p.batch);
    return launch_programmatic_dependent(causal_conv1d_update_pairs<T, kChannelLast>, grid, threads, 0, p.run.stream, p);
}

}  // namespace mamba
