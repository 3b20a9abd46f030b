// One decode step of the selective scan on the GPU: state = exp(dt A) state + dt B x, out = (C . state + D x) silu(z).
#pragma once

#include "common/alignment.h"
#include "common/cuda_vector.cuh"
#include "state_update/launch.h"

namespace mamba {

constexpr int kUpdateThreads = 256;
constexpr int kUpdateWarps = kUpdateThreads / 32;
constexpr int kUpdateStates = 8;  // of one row in one lane, as two runs of four: 32 lanes hold MAMBA_MAX_DSTATE

// What the launcher found out about the tensors.
struct StateUpdateLayout {
    int32_t lanes_log2;           // lanes that share a row
    int32_t batches_log2;         // batches in a block, one a warp: they share A through the L1
    int64_t row_blocks;           // blocks along heads x headdim
    bool state_vector;            // 16-byte accesses are aligned
    bool A_runs, B_runs, C_runs;  // runs of four neighbours are aligned
    bool A_scalar;                // one A for all states of a row: one exponential a row
};

__device__ __forceinline__ void load_run(const void* data, int64_t offset, int64_t stride, int first, int dstate, int32_t dtype,
                                         bool aligned, float* values) {
    if (aligned) {  // dstate is then a multiple of four
        if (first < dstate) {
            load_vector_as_float<4>(data, offset + first, dtype, values);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (first + i < dstate) {
                values[i] = load_as_float(data, offset + (first + i) * stride, dtype);
            }
        }
    }
}

// A group of 2^lanes_log2 lanes takes one row (batch, head, headdim). Lanes lie along dstate so that a group's accesses are
// neighbours: a lane's runs are 16 bytes of state each.
template <typename State>
__global__ void __launch_bounds__(kUpdateThreads, 2)
    selective_state_update_kernel(const MambaSelectiveStateUpdate params, const StateUpdateLayout layout) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(State));  // 4 or 8 states an access
    constexpr int kVectors = kUpdateStates / kVector;
    const int lanes = 1 << layout.lanes_log2;
    const int lane = threadIdx.x & 31;
    const int sublane = lane & (lanes - 1);
    const int warp = threadIdx.x >> 5;
    const int dstate = static_cast<int>(params.dstate);

    const int64_t batch_block = blockIdx.x / layout.row_blocks;
    const int64_t row_block = blockIdx.x - batch_block * layout.row_blocks;
    const int64_t batch = (batch_block << layout.batches_log2) + (warp & ((1 << layout.batches_log2) - 1));
    const int64_t row_warp = row_block * (kUpdateWarps >> layout.batches_log2) + (warp >> layout.batches_log2);
    int64_t row = (row_warp << (5 - layout.lanes_log2)) + (lane >> layout.lanes_log2);
    const int64_t rows = params.nheads * params.headdim;
    if (batch >= params.batch) {
        return;  // the whole warp
    }
    const bool active = row < rows;  // idle lanes stay for the shuffles
    row = active ? row : rows - 1;
    const int64_t head = row / params.headdim;
    const int64_t p = row - head * params.headdim;
    const int64_t group = head / (params.nheads / params.ngroups);
    const int64_t out_index = batch * params.out_batch_stride + head * params.out_head_stride + p * params.out_dim_stride;

    const int64_t state_row = params.state_batch_indices != nullptr ? params.state_batch_indices[batch] : batch;
    if (state_row < 0 || state_row >= params.state_rows) {
        // Padding is zero. A row beyond the cache cannot be reported from here: NaN shows it, and nothing is overwritten.
        if (active && sublane == 0) {
            store_from_float(params.out, out_index, params.x_dtype, state_row < 0 ? 0.0f : __int_as_float(0x7fffffff));
        }
        return;  // the whole warp: it has one batch
    }
    State* state = static_cast<State*>(params.state) + state_row * params.state_row_stride + head * params.state_head_stride +
                   p * params.state_dim_stride;

    // All loads first, so that one memory latency covers them.
    float h[kUpdateStates];
    float A[kUpdateStates];
    float B[kUpdateStates];
    float C[kUpdateStates];
#pragma unroll
    for (int i = 0; i < kUpdateStates; ++i) {
        h[i] = 0.0f;
        A[i] = 0.0f;
        B[i] = 0.0f;
        C[i] = 0.0f;
    }
    Packed<State, kVector> packed[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int n = (v * lanes + sublane) * kVector;
        packed[v] = packed_zero<State, kVector>();
        if (layout.state_vector && n < dstate) {
            packed[v] = packed_load<State, kVector>(state + n);
        }
    }
    const int64_t A_offset = head * params.A_head_stride + p * params.A_dim_stride;
    const int64_t B_offset = batch * params.B_batch_stride + group * params.B_group_stride;
    const int64_t C_offset = batch * params.C_batch_stride + group * params.C_group_stride;
#pragma unroll
    for (int run = 0; run < kUpdateStates / 4; ++run) {
        const int n = (run * 4 / kVector * lanes + sublane) * kVector + run * 4 % kVector;
        if (!layout.A_scalar) {
            load_run(params.A, A_offset, params.A_dstate_stride, n, dstate, params.A_dtype, layout.A_runs, A + 4 * run);
        }
        load_run(params.B, B_offset, params.B_dstate_stride, n, dstate, params.BC_dtype, layout.B_runs, B + 4 * run);
        load_run(params.C, C_offset, params.C_dstate_stride, n, dstate, params.BC_dtype, layout.C_runs, C + 4 * run);
    }
    const float x = load_as_float(
        params.x, batch * params.x_batch_stride + head * params.x_head_stride + p * params.x_dim_stride, params.x_dtype);
    float dt = load_as_float(
        params.dt, batch * params.dt_batch_stride + head * params.dt_head_stride + p * params.dt_dim_stride, params.dt_dtype);
    float D = 0.0f;
    if (params.D != nullptr) {
        D = load_as_float(params.D, head * params.D_head_stride + p * params.D_dim_stride, params.D_dtype);
    }
    float z = 0.0f;
    if (params.z != nullptr) {
        z = load_as_float(params.z, batch * params.z_batch_stride + head * params.z_head_stride + p * params.z_dim_stride,
                          params.x_dtype);
    }
    if (params.dt_bias != nullptr) {
        dt += load_as_float(params.dt_bias, head * params.dt_bias_head_stride + p * params.dt_bias_dim_stride,
                            params.dt_bias_dtype);
    }
    if (params.dt_softplus) {
        dt = softplus(dt);
    }

    if (layout.state_vector) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            unpack<State, kVector>(packed[v], h + v * kVector);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kUpdateStates; ++i) {
            const int n = (i / kVector * lanes + sublane) * kVector + i % kVector;
            if (n < dstate) {
                h[i] = to_float(state[n * params.state_dstate_stride]);
            }
        }
    }
    const float dtx = dt * x;
    const float dt_log2e = dt * kLog2e;
    if (layout.A_scalar) {
        const float decay = exp2_fast(dt_log2e * load_as_float(params.A, A_offset, params.A_dtype));
#pragma unroll
        for (int i = 0; i < kUpdateStates; ++i) {
            h[i] = fmaf(decay, h[i], dtx * B[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kUpdateStates; ++i) {
            h[i] = fmaf(exp2_fast(dt_log2e * A[i]), h[i], dtx * B[i]);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kUpdateStates; ++i) {
        const int n = (i / kVector * lanes + sublane) * kVector + i % kVector;
        sum += n < dstate ? C[i] * h[i] : 0.0f;  // beyond dstate h can be NaN
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (!active) {
        return;
    }
    if (layout.state_vector) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int n = (v * lanes + sublane) * kVector;
            if (n < dstate) {
                packed_store<State, kVector>(state + n, pack<State, kVector>(h + v * kVector));
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < kUpdateStates; ++i) {
            const int n = (i / kVector * lanes + sublane) * kVector + i % kVector;
            if (n < dstate) {
                state[n * params.state_dstate_stride] = from_float<State>(h[i]);
            }
        }
    }
    if (sublane == 0) {
        if (params.D != nullptr) {  // 0 times an infinite x would be NaN
            sum = fmaf(D, x, sum);
        }
        if (params.z != nullptr) {
            sum *= silu(z);
        }
        store_from_float(params.out, out_index, params.x_dtype, sum);
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <typename State>
cudaError_t launch_state_update(const MambaSelectiveStateUpdate& params) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(State));
    const int64_t state_size = static_cast<int64_t>(sizeof(State));
    const int64_t A_size = dtype_size(params.A_dtype);
    const int64_t BC_size = dtype_size(params.BC_dtype);
    StateUpdateLayout layout;
    layout.lanes_log2 = ceil_log2(ceil_div(params.dstate, kUpdateStates), 0, 5);
    layout.batches_log2 = ceil_log2(params.batch, 0, 3);
    static_assert(kUpdateWarps == 8, "a block holds at most 2^3 batches");
    const int64_t rows = params.nheads * params.headdim;
    const int64_t block_rows = static_cast<int64_t>(kUpdateWarps >> layout.batches_log2) << (5 - layout.lanes_log2);
    layout.row_blocks = ceil_div(rows, block_rows);
    layout.state_vector = params.dstate % kVector == 0 && params.state_dstate_stride == 1 &&
                          rows_aligned(params.state, state_size, 16, used_stride(params.state_rows, params.state_row_stride),
                                       used_stride(params.nheads, params.state_head_stride),
                                       used_stride(params.headdim, params.state_dim_stride));
    const bool runs = params.dstate % 4 == 0;
    layout.A_runs = runs && params.A_dstate_stride == 1 &&
                    rows_aligned(params.A, A_size, 4 * A_size, used_stride(params.nheads, params.A_head_stride),
                                 used_stride(params.headdim, params.A_dim_stride));
    layout.B_runs = runs && params.B_dstate_stride == 1 &&
                    rows_aligned(params.B, BC_size, 4 * BC_size, used_stride(params.batch, params.B_batch_stride),
                                 used_stride(params.ngroups, params.B_group_stride));
    layout.C_runs = runs && params.C_dstate_stride == 1 &&
                    rows_aligned(params.C, BC_size, 4 * BC_size, used_stride(params.batch, params.C_batch_stride),
                                 used_stride(params.ngroups, params.C_group_stride));
    layout.A_scalar = params.A_dstate_stride == 0 || params.dstate == 1;
    const int64_t blocks = layout.row_blocks * ceil_div(params.batch, static_cast<int64_t>(1) << layout.batches_log2);
    return launch_kernel(selective_state_update_kernel<State>, static_cast<unsigned>(blocks), kUpdateThreads, 0,
                         params.run.stream, params, layout);
}

template <typename State>
StateUpdateLaunchers StateUpdateLaunchers::of() {
    StateUpdateLaunchers launchers;
    launchers.update = launch_state_update<State>;
    return launchers;
}

}  // namespace mamba
