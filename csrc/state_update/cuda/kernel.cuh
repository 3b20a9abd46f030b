// One decode step of the selective scan on the GPU: state = exp(dt A) state + dt B x, out = (C . state + D x) silu(z).
#pragma once

#include "state_update/cuda/inputs.cuh"

namespace mamba {

// A warp takes the rows of its unit through its batch entries. While one is computed, the next one's states and inputs are on
// their way; what does not depend on the batch stays in registers.
template <class Rows, bool kTiedA, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    selective_state_update_kernel(const StateUpdateOf16BitInputs<typename Rows::State> params, const StateUpdateLayout layout) {
    static_assert(Rows::kWhole, "other tiles are steps.cuh's");
    using State = typename Rows::State;
    constexpr int kVector = Rows::kVector, kRows = Rows::kRows, kVectors = Rows::kVectors;
    const Rows rows(layout.lanes_log2);
    const WarpPlace warp(params, layout, rows);
    if (!warp.has_rows()) {
        return;
    }
    // While the kernel before this one ends, what the first entry needs may come as far as the L2, where that one can still
    // change it. To ask for the second's as well takes longer.
    if (params.state_batch_indices == nullptr) {
        warp.template states<State>(params, rows, warp.batch).prefetch(rows);
    }
    StepPlace at(params, warp, rows);
    if (warp.owns) {
        at.prefetch(params);
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const auto row_of = [&](uint32_t batch) {
        return params.state_batch_indices != nullptr && batch < warp.batch_end ? params.state_batch_indices[batch]
                                                                               : static_cast<int32_t>(batch);
    };

    // All loads first, so that one memory latency covers them.
    int32_t row = row_of(warp.batch), next_row = row_of(warp.batch + 1);
    StatePlace<State> place = warp.template states<State>(params, rows, row);
    typename Rows::Tile tile;
    place.load(rows, tile);
    UpdateInputs<Rows> step(params, warp, rows, at);
    const RowBits bits(params, warp, kTiedA);
    VectorsOfA<Rows> A;
    if (!kTiedA) {
        A.load(params, warp, rows);
    }
    const RowParameters parameters(params, bits);
    int64_t out = at.out;
#pragma unroll 1
    for (uint32_t batch = warp.batch;; ++batch) {
        const bool more = batch + 1 < warp.batch_end;
        StatePlace<State> next_place = place;
        typename Rows::Tile next_tile;
        UpdateInputs<Rows> next_step = step;
        const int32_t later_row = row_of(batch + 2);
        if (more) {
            next_place = warp.template states<State>(params, rows, next_row);
            next_place.load(rows, next_tile);
            if (params.state_batch_indices == nullptr && batch + 2 < warp.batch_end) {
                warp.template states<State>(params, rows, batch + 2).prefetch(rows);
            }
            at.next_batch(params);
            next_step = UpdateInputs<Rows>(params, warp, rows, at);
        }
        const float x = float_from_bits(step.x, params.x_dtype);
        const float dt = parameters.dt(params, step.dt);
        const float decay = parameters.decay(dt, kTiedA);
        float B[Rows::kStates], C[Rows::kStates], sums[kRows];
        step.to_floats(params, B, C);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float row_decay = rows.from_owner(decay, 0, r);
            const float row_dt_x = rows.from_owner(dt * x, 0, r);
            sums[r] = 0.0f;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                float h[kVector], A_row[kVector];
                unpack<State, kVector>(tile[r][v], h);
                if (!kTiedA) {
                    A.bits[r][v].to_floats(params.A_dtype, A_row);
                }
                sums[r] += advance<kVector, kTiedA>(h, row_decay, row_dt_x, A_row, B + v * kVector, C + v * kVector);
                place.store(rows, r, v, h);
            }
        }
        const float y = parameters.output(params, rows.sum_to_owners(sums), x, step.z);
        if (warp.owns) {
            store_from_float(params.out, out, params.x_dtype, place.rows_left > 0 ? y : output_without_state(row));
        }
        if (!more) {
            return;
        }
        place = next_place;
        step = next_step;
        out = at.out;
        row = next_row;
        next_row = later_row;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                tile[r][v] = next_tile[r][v];
            }
        }
    }
}

}  // namespace mamba
