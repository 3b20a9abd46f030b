// One decode step of the selective scan on the GPU: state = exp(dt A) state + dt B x, out = (C . state + D x) silu(z).
#pragma once

#include "state_update/cuda/inputs.cuh"

namespace mamba {

// On a multiprocessor: enough to have the memory busy, and few enough to leave each thread the registers for its loads.
template <class Rows, bool kScalarA>
constexpr int kUpdateBlocks = kScalarA || (sizeof(typename Rows::State) == 4 && Rows::kVectors == 1) ? 6 : 4;

// A warp takes `tiles` tiles of rows of one head and batch.
template <class Rows, bool kScalarA>
__global__ void __launch_bounds__(kUpdateThreads, (kUpdateBlocks<Rows, kScalarA>))
    selective_state_update_kernel(const MambaSelectiveStateUpdate params, const StateUpdateLayout layout) {
    using State = typename Rows::State;
    constexpr int kVector = Rows::kVector, kRows = Rows::kRows, kVectors = Rows::kVectors;
    // 16-bit states take as many instructions a row as others, for half the bytes: the next tile has to come meanwhile.
    constexpr bool kPrefetch = sizeof(State) == 2;
    const Rows rows(layout.lanes_log2);
    const WarpPlace warp(params, layout, rows);
    if (!warp.has_rows()) {
        return;
    }
    StatePlace<State> place = warp.template states<State>(params, rows, warp.batch);
    let_next_kernel_start();
    if (params.state_batch_indices == nullptr) {
        // While the kernel before this one ends, the states may come as far as the L2, where it can still change them.
        place.prefetch(rows);
    }
    wait_for_previous_kernel();
    if (params.state_batch_indices != nullptr) {
        const int64_t row = params.state_batch_indices[warp.batch];
        if (row < 0 || row >= params.state_rows) {
            warp.store_without_state(params, 0, row);
            return;
        }
        place.first += (row - warp.batch) * params.state_row_stride;
    }

    // All loads first, so that one memory latency covers them.
    typename Rows::Tile tile;
    place.load(rows, tile);
    const UpdateInputs<Rows> step(params, warp, rows, 0);
    const RowParameters row(params, warp, kScalarA);
    VectorsOfA<Rows> A;
    int64_t A_index = 0;
    if (!kScalarA) {
        A_index = warp.head * params.A_head_stride + (warp.first + rows.row_of(0)) * params.A_dim_stride;
        A.load(params, rows, A_index, place.rows_left);
    }

    const float x = float_from_bits(step.x, params.x_dtype);
    const float dt = row.dt(params, step.dt);
    const float decay = row.template decay<kScalarA>(params, dt);
    float B[Rows::kStates], C[Rows::kStates], y = 0.0f;
    step.to_floats(params, B, C);
#pragma unroll 1
    for (int i = 0; i < layout.tiles; ++i) {
        float sums[kRows];
        StatePlace<State> next = place;
        next.next_tile(rows);
        if (kPrefetch && i + 1 < layout.tiles) {
            next.prefetch(rows);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float row_decay = rows.from_owner(decay, i, r);
            const float row_dt_x = rows.from_owner(dt * x, i, r);
            sums[r] = 0.0f;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                float h[kVector], A_row[kVector];
                unpack<State, kVector>(tile[r][v], h);
                if (!kScalarA) {
                    A.bits[r][v].to_floats(params.A_dtype, A_row);
                }
                const float sum = advance<kVector, kScalarA>(h, row_decay, row_dt_x, A_row, B + v * kVector, C + v * kVector);
                sums[r] += rows.state_of(v) < params.dstate ? sum : 0.0f;  // beyond dstate h can be NaN
                place.store(rows, r, v, h);
            }
        }
        const float sum = rows.sum_to_owners(sums);
        y = i == rows.own_tile() ? sum : y;
        place = next;
        if (i + 1 < layout.tiles) {
            place.load(rows, tile);
            if (!kScalarA) {
                A_index += rows.tile_rows() * params.A_dim_stride;
                A.load(params, rows, A_index, place.rows_left);
            }
        }
    }
    warp.store(params, 0, row.output(params, y, x, step.z));
}

}  // namespace mamba
