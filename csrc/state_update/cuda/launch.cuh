// Which of the decode step's kernels runs, and how its rows are shared out.
#pragma once

#include "common/alignment.h"
#include "state_update/cuda/kernel.cuh"
#include "state_update/cuda/steps.cuh"
#include "state_update/launch.h"

namespace mamba {

// A warp takes several tiles where so many warps are left: what it does once for all of them counts more with 16-bit states.
constexpr int64_t kUpdateManyWarps16 = 4096, kUpdateManyWarps32 = 16384;
// Blocks are smaller where they are fewer than this: over more multiprocessors.
constexpr int64_t kUpdateFewBlocks = 128;

template <class Rows>
cudaError_t launch_state_update_rows(const MambaSelectiveStateUpdate& params, bool scalar_A) {
    StateUpdateLayout layout;
    const int rows_log2 = ceil_log2(Rows::kRows, 0, 5);
    layout.lanes_log2 = ceil_log2(ceil_div(params.dstate, Rows::kStates), rows_log2, 5);
    const int64_t tile_rows = Rows::kRows << (5 - layout.lanes_log2);
    const auto warps = [&] { return params.batch * params.nheads * ceil_div(params.headdim, tile_rows * layout.tiles); };
    const bool steps = params.seqlen > 1 || params.dst_state_batch_indices != nullptr || params.step_states != nullptr;
    layout.tiles = steps ? 1 : 1 << (layout.lanes_log2 - rows_log2);
    while (layout.tiles > 1 && warps() < (sizeof(typename Rows::State) == 2 ? kUpdateManyWarps16 : kUpdateManyWarps32)) {
        layout.tiles /= 2;
    }
    int warps_log2 = kUpdateWarpsLog2;
    while (warps_log2 > 0 && warps() >> warps_log2 < kUpdateFewBlocks) {
        --warps_log2;
    }
    const int64_t row_warps = ceil_div(params.headdim, tile_rows * layout.tiles);
    layout.batches_log2 = warps_log2 - ceil_log2(row_warps, 0, warps_log2);
    layout.parts = Divisor(ceil_div(row_warps, 1 << (warps_log2 - layout.batches_log2)));
    layout.heads = Divisor(params.nheads);
    layout.group_heads = Divisor(params.nheads / params.ngroups);
    const int64_t blocks = layout.parts.divisor * params.nheads * ceil_div(params.batch, 1 << layout.batches_log2);
    if (blocks > INT32_MAX || params.headdim > INT32_MAX) {
        return cudaErrorInvalidConfiguration;
    }
    auto kernel = selective_state_update_kernel<Rows, false>;
    if (steps && scalar_A) {
        kernel = selective_state_update_steps_kernel<Rows, true>;
    } else if (steps) {
        kernel = selective_state_update_steps_kernel<Rows, false>;
    } else if (scalar_A) {
        kernel = selective_state_update_kernel<Rows, true>;
    }
    return launch_overlapping(kernel, static_cast<unsigned>(blocks), 32 << warps_log2, 0, params.run.stream, params, layout);
}

template <typename State>
cudaError_t launch_state_update(const MambaSelectiveStateUpdate& params) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(State));
    const bool scalar_A = params.A_dstate_stride == 0 || params.dstate == 1;
    // Whether a tensor's rows of states are neighbours in memory, kVector of which can be read at once.
    const auto vectors = [&](const void* data, int32_t dtype, int64_t dstate_stride, auto... strides) {
        const int64_t bytes = dtype_size(dtype) * kVector;
        return dstate_stride == 1 && rows_aligned(data, dtype_size(dtype), bytes < 16 ? bytes : 16, strides...);
    };
    const int64_t heads = params.nheads, headdim = params.headdim, steps = params.seqlen;
    const bool all_vectors =
        params.dstate % kVector == 0 &&
        vectors(params.state, params.state_dtype, params.state_dstate_stride,
                used_stride(params.state_rows, params.state_row_stride), used_stride(heads, params.state_head_stride),
                used_stride(headdim, params.state_dim_stride)) &&
        vectors(params.step_states, params.state_dtype, params.step_states == nullptr ? 1 : params.step_states_dstate_stride,
                used_stride(params.batch, params.step_states_batch_stride), used_stride(steps, params.step_states_len_stride),
                used_stride(heads, params.step_states_head_stride), used_stride(headdim, params.step_states_dim_stride)) &&
        vectors(params.B, params.BC_dtype, params.B_dstate_stride, used_stride(params.batch, params.B_batch_stride),
                used_stride(steps, params.B_len_stride), used_stride(params.ngroups, params.B_group_stride)) &&
        vectors(params.C, params.BC_dtype, params.C_dstate_stride, used_stride(params.batch, params.C_batch_stride),
                used_stride(steps, params.C_len_stride), used_stride(params.ngroups, params.C_group_stride)) &&
        (scalar_A || vectors(params.A, params.A_dtype, params.A_dstate_stride, used_stride(heads, params.A_head_stride),
                             used_stride(headdim, params.A_dim_stride)));
    if (!all_vectors) {
        return launch_state_update_rows<StateRows<State, 1, 1, 8>>(params, scalar_A);
    }
    if (params.dstate <= 2 * kVector) {  // two lanes a row
        return launch_state_update_rows<StateRows<State, kVector, 2, 1>>(params, scalar_A);
    }
    if constexpr (32 * kVector < MAMBA_MAX_DSTATE) {
        if (params.dstate > 32 * kVector) {
            return launch_state_update_rows<StateRows<State, kVector, 2, 2>>(params, scalar_A);
        }
    }
    return launch_state_update_rows<StateRows<State, kVector, 4, 1>>(params, scalar_A);
}

template <typename State>
StateUpdateLaunchers StateUpdateLaunchers::of() {
    StateUpdateLaunchers launchers;
    launchers.update = launch_state_update<State>;
    return launchers;
}

}  // namespace mamba
