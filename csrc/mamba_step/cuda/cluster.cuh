// A Mamba layer's decode step of few batch entries, as one kernel: a cluster of blocks for each, which share out the channels.
//
//     before the wait    weights and states -> L2
//     after it           loads begin: the convolution's, x_proj's weight, then what the states need
//     each thread        the convolution of one channel -> shared memory; its state is shifted
//     -------------- __syncthreads; cluster_wait: every block's barrier is there
//     each warp          8 rows of x_proj times the block's channels -> all blocks (st.async)
//     -------------- mbarrier `all_sent`: every block's sums are here, added in the order of blocks
//     4 lanes a channel  dt_proj, state, output and gate, as in update.cuh
//
// Each block has a multiprocessor's registers to itself: all loads are under way at once.
#pragma once

#include "common/cuda_cluster.cuh"
#include "common/cuda_int8.cuh"
#include "mamba_step/cuda/project.cuh"
#include "mamba_step/cuda/update.cuh"

namespace mamba {

constexpr int kClusterWarps = kClusterThreads / 32;
constexpr int kClusterTiles = kClusterChannels / kTileChannels;                   // of x_proj's row in a warp
constexpr int kClusterTurns = kClusterChannels * kUpdateLanes / kClusterThreads;  // of channels in a lane
static_assert(kClusterOutputs == kClusterWarps * 8, "a warp takes 8 rows of x_proj, 4 lanes each");
static_assert(kClusterTurns * kClusterThreads == kClusterChannels * kUpdateLanes, "whole turns");

// The lane's channels of a row of x_proj times x.
template <typename T>
__device__ __forceinline__ float multiply_row(const RowOfWeight<T>& row, const float* x) {
    float weight[kLaneChannels], sum = 0.0f;
    unpack<T, kLaneChannels>(row.packed, weight);
#pragma unroll
    for (int i = 0; i < kLaneChannels; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(x + i);
        sum = fmaf(weight[i], four.x, sum);
        sum = fmaf(weight[i + 1], four.y, sum);
        sum = fmaf(weight[i + 2], four.z, sum);
        sum = fmaf(weight[i + 3], four.w, sum);
    }
    return sum;
}

// What a lane needs for a channel, from memory.
template <class Params>
struct ChannelBits {
    RunBits state[kUpdateBatch], A, weight[kWeightRuns<Params>];
    uint32_t z, D, bias;
};

template <class Params>
struct ClusterBlock {
    using Place = StepUpdatePlace<Params>;

    const Params& p;
    const int channels;
    const int64_t batch, first_channel;

    __device__ __forceinline__ ClusterBlock(const Params& p, int channels)
        : p(p), channels(channels), batch(grid_batch()), first_channel(static_cast<int64_t>(blockIdx.x) * channels) {}

    // The lane's channel of a turn.
    __device__ __forceinline__ Place place(int turn) const {
        const int channel = (turn * kClusterThreads + static_cast<int>(threadIdx.x)) / kUpdateLanes;
        return Place(p, batch, first_channel + channel, channel < channels && first_channel + channel < p.dim);
    }

    // The kernel before may still run: what it may write comes closer, but is not read.
    template <typename T>
    __device__ __forceinline__ void prefetch() const {
        constexpr int kLine = 128;
        const int64_t size = p.x_proj_scales != nullptr ? 1 : static_cast<int64_t>(sizeof(T)), outputs = step_outputs(p);
        const int lines = static_cast<int>(ceil_div(channels * size, static_cast<int64_t>(kLine)));
        for (int i = static_cast<int>(threadIdx.x); i < outputs * lines; i += kClusterThreads) {
            const int64_t channel = first_channel + i % lines * (kLine / size);
            if (channel < p.dim) {
                prefetch_to_L2(static_cast<const char*>(p.x_proj_weight) + (i / lines * p.dim + channel) * size);
            }
        }
#pragma unroll
        for (int turn = 0; turn < kClusterTurns; ++turn) {
            const Place at = place(turn);
            const int first = at.sublane * kStepRun;
            if (at.active && first < at.dstate) {
                prefetch_to_L2(static_cast<const char*>(p.state) +
                               (at.state_offset(0) + first) * static_cast<int64_t>(sizeof(T)));
                prefetch_to_L2(static_cast<const char*>(p.A_log) +
                               (at.channel * at.dstate + first) * (p.A_log_dtype == MAMBA_FLOAT32 ? 4 : 2));
            }
            if (at.active && first < at.rank) {
                prefetch_to_L2(static_cast<const T*>(p.dt_proj_weight) + at.channel * at.rank + first);
            }
        }
    }
    __device__ __forceinline__ ChannelBits<Params> load(const Place& at) const {
        const int first = at.sublane * kStepRun;
        ChannelBits<Params> bits;
        at.load_states(first, bits.state);
        bits.A = at.load_A(first);
#pragma unroll
        for (int run = 0; run < kWeightRuns<Params>; ++run) {
            bits.weight[run] = at.load_weight(run * kStride + first);
        }
        bits.z = load_bits(p.xz, batch * p.xz_batch_stride + p.dim + at.channel, p.dtype);
        bits.D = load_bits(p.D, at.channel, p.D_dtype);
        bits.bias = p.dt_bias != nullptr ? load_bits(p.dt_bias, at.channel, p.dt_bias_dtype) : 0;
        return bits;
    }
    // The state of a lane's channel, and its output.
    __device__ __forceinline__ void advance(const Place& at, ChannelBits<Params>& bits, const float* x_of,
                                            const float* projected) const {
        const int first = at.sublane * kStepRun;
        float dt[kUpdateBatch] = {}, y[kUpdateBatch] = {},
              x[kUpdateBatch] = {at.active ? x_of[at.channel - first_channel] : 0.0f};
#pragma unroll
        for (int run = 0; run < kWeightRuns<Params>; ++run) {
            add_weight_run(at, projected, run * kStride + first, bits.weight[run], dt);
        }
        for (int n = kWeightRuns<Params> * kStride + first; n < at.rank; n += kStride) {
            add_weight_run(at, projected, n, at.load_weight(n), dt);
        }
        const float bias = p.dt_bias != nullptr ? float_from_bits(bits.bias, p.dt_bias_dtype) : 0.0f;
        dt[0] = softplus(sum_over_lanes(dt[0]) + bias);
        for (int n = first; n < at.dstate; n += kStride) {
            if (n >= kStride) {
                at.load_states(n, bits.state);
                bits.A = at.load_A(n);
            }
            advance_run(at, projected, n, bits.A, bits.state, dt, x, y);
        }
        const float sum = sum_over_lanes(y[0]);
        if (at.active && at.sublane == 0) {
            const float value = fmaf(float_from_bits(bits.D, p.D_dtype), x[0], sum) * silu(float_from_bits(bits.z, p.dtype));
            store_from_float(p.out, batch * p.out_batch_stride + at.channel, p.dtype, value);
        }
    }
};

// channels: of a block, a multiple of kLaneChannels.
template <typename T, class Params>
__global__ void __launch_bounds__(kClusterThreads, 1) step_cluster_kernel(const Params p, int channels, bool vectors) {
    __shared__ __align__(16) float x_of[kClusterChannels];
    __shared__ __align__(16) float projected[kClusterOutputs];
    __shared__ float parts[kClusterBlocks][kClusterOutputs];
    __shared__ uint64_t all_sent;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    const int outputs = static_cast<int>(step_outputs(p)), row = warp * 8 + g;
    const ClusterBlock<Params> block(p, channels);
    if (thread == 0) {
        mbarrier_init_cluster(&all_sent);
        mbarrier_arrive_expect_tx_cluster(&all_sent, static_cast<uint32_t>(kClusterBlocks * outputs * sizeof(float)));
    }
    cluster_arrive_relaxed();  // the barrier is there
    block.template prefetch<T>();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    const int64_t channel = block.first_channel + thread;
    const bool has_channel = thread < channels && channel < p.dim;
    ConvStepBits conv_bits;
    if (has_channel) {
        conv_bits = load_conv_step(p, block.batch, channel, p.xz, block.batch * p.xz_batch_stride + channel);
    }
    const bool is_int8 = p.x_proj_scales != nullptr;
    RowOfWeight<T> weights[kClusterTiles];
#pragma unroll
    for (int tile = 0; tile < kClusterTiles; ++tile) {
        const int of_block = tile * kTileChannels + t * kLaneChannels;
        const int64_t first = block.first_channel + of_block;
        const int64_t left = row < outputs && of_block < channels ? p.dim - first : 0;
        if (is_int8) {
            const __half* const scales = static_cast<const __half*>(p.x_proj_scales) + row * scales_of_row(p.dim);
            weights[tile].load_int8(static_cast<const int8_t*>(p.x_proj_weight) + row * p.dim + first,
                                    scales + first / MAMBA_INT8_BLOCK, left, vectors);
        } else {
            weights[tile].load(static_cast<const T*>(p.x_proj_weight) + row * p.dim + first, left, vectors);
        }
    }
    ChannelBits<Params> bits[kClusterTurns];
#pragma unroll
    for (int turn = 0; turn < kClusterTurns; ++turn) {
        bits[turn] = block.load(block.place(turn));
    }
    if (thread < kClusterChannels) {
        x_of[thread] = has_channel ? conv_step(p, conv_bits) : 0.0f;
    }
    if (has_channel) {
        store_conv_state(p, block.batch, channel, conv_bits);
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < kClusterTiles; ++tile) {
        if (tile * kTileChannels < channels) {
            if (is_int8) {
                weights[tile].dequantize();
            }
            sum += multiply_row<T>(weights[tile], x_of + tile * kTileChannels + t * kLaneChannels);
        }
    }
    sum = sum_over_lanes(sum);
    cluster_wait();
    if (row < outputs) {
#pragma unroll
        for (int rank = 0; rank < kClusterBlocks; rank += kUpdateLanes) {
            st_async_cluster(&parts[blockIdx.x][row], &all_sent, static_cast<uint32_t>(rank + t), sum);
        }
    }
    mbarrier_wait_cluster(&all_sent);
    if (thread < outputs) {
        float total = 0.0f;
#pragma unroll
        for (int part = 0; part < kClusterBlocks; ++part) {
            total += parts[part][thread];
        }
        projected[thread] = total;
    }
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < kClusterTurns; ++turn) {
        block.advance(block.place(turn), bits[turn], x_of, projected);
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <typename T, class Params>
cudaError_t launch_step_cluster(const Params& p) {
    const int64_t size = p.x_proj_scales != nullptr ? 1 : static_cast<int64_t>(sizeof(T));
    const bool vectors = rows_aligned(p.x_proj_weight, size, 16, p.dim);
    const int channels = static_cast<int>(round_up(ceil_div(p.dim, kClusterBlocks), kLaneChannels));
    return launch_clusters(step_cluster_kernel<T, Params>, kClusterBlocks, batch_grid(kClusterBlocks, p.batch), kClusterThreads,
                           0, p.run.stream, p, channels, vectors);
}

}  // namespace mamba
