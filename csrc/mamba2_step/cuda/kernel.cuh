// One decode step of a Mamba-2 layer on the GPU: convolution, state and output, head by head. finish.cuh does what needs all
// heads.
#pragma once

#include "causal_conv1d/cuda/step.cuh"
#include "common/alignment.h"
#include "mamba2_step/launch.h"

namespace mamba {

constexpr int kStepThreads = 256;
constexpr int kStepRows = 4;   // of the state that a thread has on their way at a time
constexpr int kStepItems = 2;  // channels of the convolution, likewise
constexpr int kCacheLine = 128;

// What the launcher found out about the tensors.
struct Mamba2StepLayout {
    int32_t lanes_log2;  // lanes that share a row of the state
    int32_t rows;        // of a head (of headdim) in a block
    int32_t parts;       // blocks of a head
    bool vectors;        // 16-byte accesses to the state are aligned
};

// A vector of neighbours in a row of the state, zeros beyond dstate.
template <typename State, int kVector>
__device__ __forceinline__ Packed<State, kVector> load_states(const State* row, int first, int dstate, int64_t stride,
                                                              bool vectors) {
    Packed<State, kVector> packed = packed_zero<State, kVector>();
    if (vectors) {  // dstate is then a multiple of kVector
        if (first < dstate) {
            packed = packed_load<State, kVector>(row + first);
        }
    } else {
        float values[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            values[i] = first + i < dstate ? to_float(row[(first + i) * stride]) : 0.0f;
        }
        packed = pack<State, kVector>(values);
    }
    return packed;
}

template <typename State, int kVector>
__device__ __forceinline__ void store_states(State* row, int first, int dstate, int64_t stride, bool vectors,
                                             const float* values) {
    if (vectors) {
        if (first < dstate) {
            packed_store<State, kVector>(row + first, pack<State, kVector>(values));
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            if (first + i < dstate) {
                row[(first + i) * stride] = from_float<State>(values[i]);
            }
        }
    }
}

// A block takes some rows of one head of one batch entry. It computes the convolution of their x and of the whole group's B and
// C, as do the other blocks of the group: so it leaves conv_state as it is for B and C, which finish.cuh shifts when all have
// read it. 2^lanes_log2 lanes share a row, kVectors vectors of 16 bytes each.
template <typename State, int kVectors>
__global__ void __launch_bounds__(kStepThreads, 3) mamba2_step_kernel(const MambaMamba2Step p, const Mamba2StepLayout layout) {
    static constexpr int kVector = 16 / static_cast<int>(sizeof(State));
    constexpr int kStates = kVectors * kVector;
    __shared__ float x_of[MAMBA_MAX_HEADDIM];
    __shared__ float y_of[MAMBA_MAX_HEADDIM];
    __shared__ float BC_of[2 * MAMBA_MAX_DSTATE];
    const int thread = static_cast<int>(threadIdx.x);
    const int dstate = static_cast<int>(p.dstate);
    const int64_t block_head = blockIdx.x / layout.parts;
    const int first = static_cast<int>(blockIdx.x - block_head * layout.parts) * layout.rows;
    const int rows = static_cast<int>(p.headdim) - first < layout.rows ? static_cast<int>(p.headdim) - first : layout.rows;
    const int64_t batch = block_head / p.nheads;
    const int64_t head = block_head - batch * p.nheads;
    const int64_t group = head / (p.nheads / p.ngroups);
    const int64_t channels = p.nheads * p.headdim;
    const int64_t row_x = head * p.headdim + first;  // the block's first channel
    const int64_t zx = batch * p.zxBCdt_batch_stride;
    const bool gate = p.gate && p.norm_weight == nullptr;  // the norm has its own

    const int lanes = 1 << layout.lanes_log2;
    const int sublane = thread & (lanes - 1);
    const int step_rows = kStepThreads >> layout.lanes_log2;
    State* const state =
        static_cast<State*>(p.state) + batch * p.state_batch_stride + head * p.state_head_stride + first * p.state_dim_stride;
    const int first_row = thread >> layout.lanes_log2;

    // The kernel before may still run: the state comes closer, but is not read, since that kernel may write it.
    if (layout.vectors && sublane % (kCacheLine / 16) == 0 && sublane * kVector < dstate) {
        for (int row = first_row; row < rows; row += step_rows) {
            prefetch_to_L2(state + row * p.state_dim_stride + sublane * kVector);
        }
    }
    wait_for_previous_kernel();
    let_next_kernel_start();

    // All loads first, so that one memory latency covers them.
    const int items = rows + 2 * dstate;  // x, B, C
    const auto channel_of = [&](int item) {
        const int n = item - rows;
        return n < 0 ? row_x + item : channels + (n < dstate ? group * dstate + n : (p.ngroups + group - 1) * dstate + n);
    };
    ConvStepBits bits[kStepItems];
#pragma unroll
    for (int i = 0; i < kStepItems; ++i) {
        const int item = i * kStepThreads + thread;
        if (item < items) {
            const int64_t channel = channel_of(item);
            bits[i] = load_conv_step(p, batch, channel, p.zxBCdt, zx + channels + channel);
        }
    }
    const uint32_t dt_bits = load_bits(p.zxBCdt, zx + 2 * (channels + p.ngroups * dstate) + head, p.dtype);
    const uint32_t bias_bits = load_bits(p.dt_bias, head, p.dt_bias_dtype);
    const uint32_t A_bits = load_bits(p.A_log, head, p.A_log_dtype);
    uint32_t D_bits = 0, z_bits = 0;
    if (thread < rows) {
        D_bits = load_bits(p.D, head * p.D_head_stride + (first + thread) * p.D_dim_stride, p.D_dtype);
        if (gate) {
            z_bits = load_bits(p.zxBCdt, zx + row_x + thread, p.dtype);
        }
    }
    Packed<State, kVector> packed[kStepRows][kVectors];
    const auto load_rows = [&](int begin) {
#pragma unroll
        for (int r = 0; r < kStepRows; ++r) {
            const int row = begin + r * step_rows;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (row < rows) {
                    packed[r][v] =
                        load_states<State, kVector>(state + row * p.state_dim_stride, (v * lanes + sublane) * kVector, dstate,
                                                    p.state_dstate_stride, layout.vectors);
                }
            }
        }
    };
    load_rows(first_row);

    const auto convolve_item = [&](int item, const ConvStepBits& loaded) {
        if (item < items) {
            const float value = conv_step(p, loaded);
            if (item < rows) {
                x_of[item] = value;
                store_conv_state(p, batch, row_x + item, loaded);
            } else {
                BC_of[item - rows] = value;
            }
        }
    };
#pragma unroll
    for (int i = 0; i < kStepItems; ++i) {
        convolve_item(i * kStepThreads + thread, bits[i]);
    }
    for (int item = kStepItems * kStepThreads + thread; item < items; item += kStepThreads) {
        const int64_t channel = channel_of(item);
        convolve_item(item, load_conv_step(p, batch, channel, p.zxBCdt, zx + channels + channel));
    }
    float dt = softplus(float_from_bits(dt_bits, p.dtype) + float_from_bits(bias_bits, p.dt_bias_dtype));
    dt = dt < p.dt_min ? p.dt_min : dt > p.dt_max ? p.dt_max : dt;  // a NaN stays
    const float decay = exp2_fast(-dt * kLog2e * exp2_fast(float_from_bits(A_bits, p.A_log_dtype) * kLog2e));
    __syncthreads();

    float B[kStates], C[kStates];
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
        const int n = (i / kVector * lanes + sublane) * kVector + i % kVector;
        B[i] = n < dstate ? BC_of[n] : 0.0f;
        C[i] = n < dstate ? BC_of[dstate + n] : 0.0f;
    }
    for (int begin = first_row; begin - first_row < rows; begin += kStepRows * step_rows) {
        if (begin > first_row) {
            load_rows(begin);
        }
        float sums[kStepRows];
#pragma unroll
        for (int r = 0; r < kStepRows; ++r) {
            const int row = begin + r * step_rows;
            const float dt_x = row < rows ? dt * x_of[row] : 0.0f;
            sums[r] = 0.0f;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                float h[kVector];
                unpack<State, kVector>(packed[r][v], h);
                const int n = (v * lanes + sublane) * kVector;
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    h[i] = fmaf(decay, h[i], dt_x * B[v * kVector + i]);
                    sums[r] += n + i < dstate ? C[v * kVector + i] * h[i] : 0.0f;  // beyond dstate h can be NaN
                }
                if (row < rows) {
                    store_states<State, kVector>(state + row * p.state_dim_stride, n, dstate, p.state_dstate_stride,
                                                 layout.vectors, h);
                }
            }
        }
        for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
            for (int r = 0; r < kStepRows; ++r) {
                sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], distance);
            }
        }
#pragma unroll
        for (int r = 0; r < kStepRows; ++r) {
            const int row = begin + r * step_rows;
            if (sublane == 0 && row < rows) {
                y_of[row] = sums[r];
            }
        }
    }
    __syncthreads();
    if (thread < rows) {
        float y = fmaf(float_from_bits(D_bits, p.D_dtype), x_of[thread], y_of[thread]);
        if (gate) {
            y *= silu(float_from_bits(z_bits, p.dtype));
        }
        store_from_float(p.out, batch * p.out_batch_stride + row_x + thread, p.dtype, y);
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <typename State>
cudaError_t launch_mamba2_step(const MambaMamba2Step& p, int processors) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(State));
    const int64_t state_size = static_cast<int64_t>(sizeof(State));
    Mamba2StepLayout layout;
    layout.lanes_log2 = ceil_log2(ceil_div(p.dstate, kVector), 0, 5);
    layout.vectors = p.dstate % kVector == 0 && p.state_dstate_stride == 1 &&
                     rows_aligned(p.state, state_size, 16, used_stride(p.batch, p.state_batch_stride),
                                  used_stride(p.nheads, p.state_head_stride), used_stride(p.headdim, p.state_dim_stride));
    // A whole head a block where that fills the GPU; else less, but something for every thread.
    const int64_t heads = p.batch * p.nheads;
    const int64_t step_rows = kStepThreads >> layout.lanes_log2;
    const int64_t wanted = ceil_div(p.headdim, ceil_div(static_cast<int64_t>(2) * processors, heads));
    layout.rows = static_cast<int32_t>(round_up(wanted, step_rows));
    layout.parts = static_cast<int32_t>(ceil_div(p.headdim, static_cast<int64_t>(layout.rows)));
    const unsigned blocks = static_cast<unsigned>(heads * layout.parts);
    if (p.dstate <= 32 * kVector) {
        return launch_overlapping(mamba2_step_kernel<State, 1>, blocks, kStepThreads, 0, p.run.stream, p, layout);
    }
    if constexpr (32 * kVector < MAMBA_MAX_DSTATE) {
        static_assert(64 * kVector >= MAMBA_MAX_DSTATE, "two vectors a lane hold a row");
        return launch_overlapping(mamba2_step_kernel<State, 2>, blocks, kStepThreads, 0, p.run.stream, p, layout);
    }
    return cudaErrorInvalidValue;
}

template <typename State>
Mamba2StepLaunchers Mamba2StepLaunchers::of() {
    Mamba2StepLaunchers launchers;
    launchers.step = launch_mamba2_step<State>;
    return launchers;
}

}  // namespace mamba
