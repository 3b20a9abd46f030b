// A Mamba layer's decode step, first kernel: the convolution, and x_proj cut into slices of channels whose sums update.cuh adds
// up.
#pragma once

#include "causal_conv1d/cuda/step.cuh"
#include "common/alignment.h"
#include "mamba_step/plan.h"

namespace mamba {

constexpr int kProjectThreads = 256;
constexpr int kProjectItems = kTileBatch * kTileChannels / kProjectThreads;  // of the convolution in a thread
constexpr int kRowLanes = 8;                                                 // that share a row of x_proj's weight
constexpr int kLaneChannels = kTileChannels / kRowLanes;
constexpr int kRowsAhead = 4;  // rows of a thread that are loaded together

// Adds up values[b] over the kRowLanes lanes: the lane that is `sublane` of them gets the sum of values[sublane].
__device__ __forceinline__ float sum_transposed(float* values, int sublane) {
#pragma unroll
    for (int half = kRowLanes / 2; half > 0; half /= 2) {
        const bool upper = (sublane & half) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float send = upper ? values[i] : values[i + half];
            const float keep = upper ? values[i + half] : values[i];
            values[i] = keep + __shfl_xor_sync(0xffffffffu, send, half);
        }
    }
    return *values;
}

// A block takes some tiles of channels, one after the other, of kTileBatch batch entries.
template <typename T>
__global__ void __launch_bounds__(kProjectThreads) step_project_kernel(const MambaMambaStep p, int64_t tiles, bool vectors) {
    static_assert(kTileBatch == kRowLanes, "sum_transposed leaves one batch entry to each lane");
    constexpr int kPassRows = kProjectThreads / kRowLanes;
    __shared__ __align__(16) float x_of[kTileBatch][kTileChannels];
    const int thread = static_cast<int>(threadIdx.x);
    const int sublane = thread % kRowLanes;
    const int64_t first_row = thread / kRowLanes;
    const int64_t outputs = step_outputs(p), slices = gridDim.x;
    const int64_t first_batch = grid_batch() * kTileBatch;
    if (first_batch >= p.batch) {
        return;
    }
    const int batches = p.batch - first_batch < kTileBatch ? static_cast<int>(p.batch - first_batch) : kTileBatch;
    float* const x_out = static_cast<float*>(p.workspace);
    // The sums of batch entry `sublane`; its place for a row belongs to one lane.
    float* const sums_out = x_out + p.batch * p.dim + ((first_batch + sublane) * slices + blockIdx.x) * outputs;

    // The kernel before may still run: the weight comes closer, but is not read, since that kernel may write it.
    for (int64_t row = thread; row < outputs; row += kProjectThreads) {
        const T* const weight = static_cast<const T*>(p.x_proj_weight) + row * p.dim;
        prefetch_to_L2(weight + blockIdx.x * tiles * kTileChannels);
    }
    wait_for_previous_kernel();
    let_next_kernel_start();

    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first_channel = (blockIdx.x * tiles + tile) * kTileChannels;
        ConvStepBits bits[kProjectItems];
#pragma unroll
        for (int i = 0; i < kProjectItems; ++i) {
            const int item = i * kProjectThreads + thread;
            const int64_t batch = first_batch + item / kTileChannels, channel = first_channel + item % kTileChannels;
            if (item / kTileChannels < batches && channel < p.dim) {
                bits[i] = load_conv_step(p, batch, channel, p.xz, batch * p.xz_batch_stride + channel);
            }
        }
        const int64_t lane_channel = first_channel + sublane * kLaneChannels;
        const T* const weight = static_cast<const T*>(p.x_proj_weight) + lane_channel;
        Packed<T, kLaneChannels> weights[kRowsAhead];
        const auto load_rows = [&](int64_t row) {
#pragma unroll
            for (int r = 0; r < kRowsAhead; ++r) {
                if (row + r * kPassRows < outputs) {
                    weights[r] = packed_load_padded<T, kLaneChannels>(weight + (row + r * kPassRows) * p.dim,
                                                                      p.dim - lane_channel, vectors);
                }
            }
        };
        load_rows(first_row);

        if (tile > 0) {
            __syncthreads();  // others may still read the last tile's x
        }
#pragma unroll
        for (int i = 0; i < kProjectItems; ++i) {
            const int item = i * kProjectThreads + thread;
            const int b = item / kTileChannels;
            const int64_t channel = first_channel + item % kTileChannels;
            float value = 0.0f;
            if (b < batches && channel < p.dim) {
                value = conv_step(p, bits[i]);
                x_out[(first_batch + b) * p.dim + channel] = value;
                store_conv_state(p, first_batch + b, channel, bits[i]);
            }
            x_of[b][item % kTileChannels] = value;
        }
        __syncthreads();

        for (int64_t begin = 0; begin < outputs; begin += kRowsAhead * kPassRows) {
            if (begin > 0) {
                load_rows(begin + first_row);
            }
#pragma unroll
            for (int r = 0; r < kRowsAhead; ++r) {
                if (begin + r * kPassRows < outputs) {  // the same in all threads: they shuffle
                    const int64_t row = begin + r * kPassRows + first_row;
                    float w[kLaneChannels] = {}, sums[kTileBatch];
                    if (row < outputs) {
                        unpack<T, kLaneChannels>(weights[r], w);
                    }
#pragma unroll
                    for (int b = 0; b < kTileBatch; ++b) {
                        sums[b] = 0.0f;
                        if (b < batches) {
                            const float4* x = reinterpret_cast<const float4*>(x_of[b] + sublane * kLaneChannels);
#pragma unroll
                            for (int i = 0; i < kLaneChannels / 4; ++i) {
                                sums[b] = fmaf(w[4 * i], x[i].x, sums[b]);
                                sums[b] = fmaf(w[4 * i + 1], x[i].y, sums[b]);
                                sums[b] = fmaf(w[4 * i + 2], x[i].z, sums[b]);
                                sums[b] = fmaf(w[4 * i + 3], x[i].w, sums[b]);
                            }
                        }
                    }
                    const float sum = sum_transposed(sums, sublane);
                    if (row < outputs && sublane < batches) {
                        sums_out[row] = tile > 0 ? sums_out[row] + sum : sum;
                    }
                }
            }
        }
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <typename T>
cudaError_t launch_step_project(const MambaMambaStep& p) {
    const bool vectors = rows_aligned(p.x_proj_weight, static_cast<int64_t>(sizeof(T)), 16, p.dim);
    const dim3 grid = batch_grid(step_slices(p), ceil_div(p.batch, static_cast<int64_t>(kTileBatch)));
    return launch_overlapping(step_project_kernel<T>, grid, kProjectThreads, 0, p.run.stream, p, slice_tiles(p), vectors);
}

}  // namespace mamba
