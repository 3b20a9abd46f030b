// Causal convolution, decoding, the usual step: one new input, four taps, a state that is shifted, all tensors in vectors. A
// thread takes two channels, or one where their number is odd.
#pragma once

#include "causal_conv1d/cuda/common.cuh"

namespace mamba {

constexpr int kPairThreads = 128;
constexpr int kPairEntries = 4;                                       // batch entries of a thread, where there are many
constexpr int64_t kMostPairChannels = static_cast<int64_t>(1) << 26;  // offsets of a channel have 32 bits

// The state of neighbouring channels, as it lies in memory: its steps are neighbours, or its channels are (kChannelLast).
template <typename T, int kSteps, bool kChannelLast, int kChannels = 2>
struct PairState {
    // All of it is one vector, of 16 bytes mostly, or it is kSteps vectors of the channels.
    static constexpr bool kWhole = !kChannelLast && kSteps == 4;
    static constexpr int kWidth = kChannels, kElements = kChannels * kSteps;
    static constexpr int kVector = kWhole ? kElements : kChannels;
    static constexpr int kVectors = kElements / kVector;
    Packed<T, kVector> vectors[kVectors];

    static __device__ __forceinline__ T* find(const MambaCausalConv1dUpdate& params, int64_t row, int channel) {
        return static_cast<T*>(params.conv_state) + row * params.state_row_stride + channel * (kChannelLast ? 1 : kSteps);
    }
    static __device__ __forceinline__ int64_t stride(const MambaCausalConv1dUpdate& params) {
        return kChannelLast ? params.state_len_stride : kVector;
    }
    static __device__ __forceinline__ int place(int channel, int step) {
        return kChannelLast ? kChannels * step + channel : kSteps * channel + step;
    }
    __device__ __forceinline__ void load(const T* state, int64_t stride) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            vectors[i] = packed_load<T, kVector>(state + i * stride);
        }
    }
    __device__ __forceinline__ void store(T* state, int64_t stride) const {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            packed_store<T, kVector>(state + i * stride, vectors[i]);
        }
    }
    __device__ __forceinline__ void get(float (&values)[kElements]) const {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            unpack<T, kVector>(vectors[i], values + i * kVector);
        }
    }
    __device__ __forceinline__ void set(const float (&values)[kElements]) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            vectors[i] = pack<T, kVector>(values + i * kVector);
        }
    }
};

// A thread takes neighbouring channels of kEntries batch entries, and loads all before it uses any: without a branch between,
// so entries that are not there read what others do.
template <typename T, int kSteps, bool kChannelLast, int kEntries, int kChannels = 2>
__global__ void __launch_bounds__(kPairThreads) causal_conv1d_update_pairs(const MambaCausalConv1dUpdate params) {
    using State = PairState<T, kSteps, kChannelLast, kChannels>;
    const int channel = kChannels * static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const int64_t batch = grid_batch() * kEntries;
    if (channel >= params.dim || batch >= params.batch) {
        return;
    }
    const int last = kEntries < params.batch - batch ? kEntries - 1 : static_cast<int>(params.batch - batch) - 1;
    const int64_t stride = State::stride(params);
    griddepcontrol_launch_dependents();
    if (kEntries == 1) {  // so small a launch is mostly waiting; what comes closer now the kernel before may still change
        const int weight_size = params.weight_dtype == MAMBA_FLOAT32 ? 4 : 2;
        prefetch_to_L2(static_cast<const char*>(params.weight) + channel * kConvMaxWidth * weight_size);
        if (params.conv_state_indices == nullptr) {
#pragma unroll
            for (int i = 0; i < State::kVectors; ++i) {
                prefetch_to_L2(State::find(params, batch, channel) + i * stride);
            }
        }
    }
    griddepcontrol_wait();

    int rows[kEntries];
    bool found[kEntries];
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
        const int64_t entry = batch + (i < last ? i : last);
        rows[i] = params.conv_state_indices != nullptr ? params.conv_state_indices[entry] : static_cast<int>(entry);
        found[i] = rows[i] >= 0 && rows[i] < params.state_rows;
    }
    const T* const x = static_cast<const T*>(params.x) + batch * params.x_batch_stride + channel;
    Packed<T, kChannels> inputs[kEntries];
    State states[kEntries];
    NeighbourBits<kChannels * kConvMaxWidth> weight_bits;
    NeighbourBits<kChannels> bias_bits;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
        inputs[i] = packed_load<T, kChannels>(x + (i < last ? i : last) * params.x_batch_stride);
    }
    weight_bits.load(params.weight, channel * kConvMaxWidth, params.weight_dtype, true);
    bias_bits.load(params.bias, channel, params.bias_dtype, params.bias != nullptr);
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
        states[i].load(State::find(params, found[i] ? rows[i] : 0, channel), stride);
    }

    float weight[kChannels * kConvMaxWidth], bias[kChannels];
    weight_bits.to_floats(params.weight_dtype, weight);
    bias_bits.to_floats(params.bias_dtype, bias);
    T* const out = static_cast<T*>(params.out) + batch * params.out_batch_stride + channel;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
        float sums[kChannels], input[kChannels], state[State::kElements];
        unpack<T, kChannels>(inputs[i], input);
        states[i].get(state);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
            const float* const taps = weight + c * kConvMaxWidth;
            sums[c] = fmaf(taps[kConvHalo], input[c], bias[c]);
#pragma unroll
            for (int lag = 1; lag < kConvMaxWidth; ++lag) {
                sums[c] = fmaf(taps[kConvHalo - lag], state[State::place(c, kSteps - lag)], sums[c]);
            }
            sums[c] = params.silu ? silu(sums[c]) : sums[c];
            sums[c] = found[i] ? sums[c] : conv_without_state(rows[i]);
#pragma unroll
            for (int step = 0; step + 1 < kSteps; ++step) {
                state[State::place(c, step)] = state[State::place(c, step + 1)];
            }
            state[State::place(c, kSteps - 1)] = input[c];
        }
        states[i].set(state);
        if (i <= last) {
            if (found[i]) {
                states[i].store(State::find(params, rows[i], channel), stride);
            }
            packed_store<T, kChannels>(out + i * params.out_batch_stride, pack<T, kChannels>(sums));
        }
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

// Whether a thread's channels can be moved at once everywhere.
template <class State>
bool pairs_fit(const MambaCausalConv1dUpdate& p, int64_t steps, bool channel_last) {
    constexpr int64_t kChannels = State::kWidth;
    const int64_t size = dtype_size(p.dtype), pair = kChannels * size;
    const int64_t vector = State::kVector * size < 16 ? State::kVector * size : 16;
    const int64_t rows = used_stride(p.state_rows, p.state_row_stride);
    return p.seqlen == 1 && p.width == kConvMaxWidth && p.batch <= INT32_MAX && p.state_rows > 0 && p.state_len == steps &&
           p.cache_seqlens == nullptr && p.dim % kChannels == 0 && p.dim <= kMostPairChannels && p.state_dtype == p.dtype &&
           p.x_dim_stride == 1 && p.out_dim_stride == 1 && p.state_dim_stride == (channel_last ? 1 : steps) &&
           (channel_last || p.state_len_stride == 1) && rows_aligned(p.x, size, pair, used_stride(p.batch, p.x_batch_stride)) &&
           rows_aligned(p.out, size, pair, used_stride(p.batch, p.out_batch_stride)) &&
           rows_aligned(p.conv_state, size, vector, rows, channel_last ? p.state_len_stride : 0) &&
           pointer_is_aligned(p.weight, 16) &&
           rows_aligned(p.bias, dtype_size(p.bias_dtype), kChannels * dtype_size(p.bias_dtype));
}

template <typename T, int kSteps, bool kChannelLast, int kChannels>
cudaError_t launch_update_pairs(const MambaCausalConv1dUpdate& p) {
    constexpr int64_t kManyThreads = static_cast<int64_t>(1) << 17;
    const int64_t pairs = p.dim / kChannels;
    const int threads = pairs < kPairThreads ? static_cast<int>(round_up(pairs, 32)) : kPairThreads;
    const auto launch = [&](auto kernel, int64_t entries) {
        const Grid grid = batch_grid(ceil_div(pairs, threads), ceil_div(p.batch, entries));
        return launch_programmatic_dependent(kernel, grid, threads, 0, p.run.stream, p);
    };
    if constexpr (kChannels == 2) {
        if (pairs * ceil_div(p.batch, kPairEntries) >= kManyThreads) {
            return launch(causal_conv1d_update_pairs<T, kSteps, kChannelLast, kPairEntries>, kPairEntries);
        }
    }
    return launch(causal_conv1d_update_pairs<T, kSteps, kChannelLast, 1, kChannels>, 1);
}

}  // namespace mamba
