// Any number of decode steps in one call on the GPU, of any tensors: the state stays in registers, in float32, from the first
// step to the last.
#pragma once

#include "state_update/cuda/inputs.cuh"

namespace mamba {

// A warp takes one tile of rows of one head and batch through all steps. While one is computed, the next one's inputs are on
// their way.
template <class Rows, int kThreads>
__global__ void __launch_bounds__(kThreads)
    selective_state_update_steps_kernel(const MambaSelectiveStateUpdate params, const StateUpdateLayout layout) {
    using State = typename Rows::State;
    constexpr int kVector = Rows::kVector, kRows = Rows::kRows, kVectors = Rows::kVectors;
    const Rows rows(layout.lanes_log2);
    const WarpPlace warp(params, layout, rows);
    if (!warp.has_rows()) {
        return;
    }
    if (params.state_batch_indices == nullptr) {  // the kernel before may still change it
        warp.template states<State>(params, rows, warp.batch).prefetch(rows);
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const uint32_t seqlen = static_cast<uint32_t>(params.seqlen);
    const int64_t from = params.state_batch_indices != nullptr ? params.state_batch_indices[warp.batch] : int64_t{warp.batch};
    StepPlace at(params, warp, rows);
    const int64_t to = params.dst_state_batch_indices != nullptr ? params.dst_state_batch_indices[warp.batch] : from;
    if (from < 0 || from >= params.state_rows || to >= params.state_rows) {
        for (uint32_t t = 0; warp.owns && t < seqlen; ++t, at.next_step(params)) {
            store_from_float(params.out, at.out, params.x_dtype, output_without_state(from));
        }
        return;
    }

    typename Rows::Tile tile;
    warp.template states<State>(params, rows, from).load(rows, tile);
    UpdateInputs<Rows> step(params, warp, rows, at);
    const RowBits row_bits(params, warp, layout.tied_A);
    VectorsOfA<Rows> A;
    if (!layout.tied_A) {
        A.load(params, warp, rows);
    }
    const RowParameters row(params, row_bits);
    StatePlace<State> copies = warp.template states<State>(params, rows, 0);
    copies.step = params.step_states_dim_stride << (5 - rows.lanes_log2);
    copies.dstate_stride = params.step_states_dstate_stride;
    float h[kRows][Rows::kStates];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            unpack<State, kVector>(tile[r][v], h[r] + v * kVector);
        }
    }
#pragma unroll 1
    for (uint32_t t = 0; t < seqlen; ++t) {
        const int64_t out = at.out;
        UpdateInputs<Rows> next = step;
        if (t + 1 < seqlen) {
            at.next_step(params);
            next = UpdateInputs<Rows>(params, warp, rows, at);
        }
        const float x = float_from_bits(step.x, params.x_dtype);
        const float dt = row.dt(params, step.dt);
        const float decay = row.decay(dt, layout.tied_A);
        float B[Rows::kStates], C[Rows::kStates], sums[kRows];
        step.to_floats(params, B, C);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float row_decay = rows.from_owner(decay, 0, r);
            const float row_dt_x = rows.from_owner(dt * x, 0, r);
            sums[r] = 0.0f;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int i = v * kVector;
                float A_row[kVector] = {};
                if (!layout.tied_A) {
                    A.bits[r][v].to_floats(params.A_dtype, A_row);
                }
                sums[r] += advance_some<kVector>(h[r] + i, row_decay, row_dt_x, A_row, B + i, C + i, layout.tied_A,
                                                 static_cast<int>(params.dstate) - rows.state_of(v));
            }
        }
        const float y = row.output(params, rows.sum_to_owners(sums), x, step.z);
        if (warp.owns) {
            store_from_float(params.out, out, params.x_dtype, y);
        }
        if (params.step_states != nullptr) {
            copies.first = static_cast<State*>(params.step_states) + warp.batch * params.step_states_batch_stride +
                           t * params.step_states_len_stride + warp.head * params.step_states_head_stride +
                           (warp.first + rows.row_of(0)) * params.step_states_dim_stride;
            store_rows(rows, copies, h);
        }
        step = next;
    }
    if (to >= 0) {
        store_rows(rows, warp.template states<State>(params, rows, to), h);
    }
}

}  // namespace mamba
