// The decode step of the state space. dt, x, z and D of a block are vectors over rows of headdim; the state itself is a vector
// over dstate, row by row.
#pragma once

#include "common/cpu_tile.h"

namespace mamba {
namespace MAMBA_ISA {

constexpr float kLog2e = 1.44269504f;

// value with zeros from lane `count` on, whatever was there.
inline Vec keep_lanes(Vec value, int count) {
    float row[kLanes];
    store(row, value);
    return load_partial(row, count);
}

// B and C of one step of a batch entry and group, as floats padded with zeros to whole vectors.
struct GroupTables {
    int64_t batch, step, group;  // which are loaded; batch -1: none
    alignas(64) float B[MAMBA_MAX_DSTATE + kLanes];
    alignas(64) float C[MAMBA_MAX_DSTATE + kLanes];
};

inline void load_group(const MambaSelectiveStateUpdate& p, int64_t batch, int64_t step, int64_t group, GroupTables& tables) {
    if (tables.batch == batch && tables.step == step && tables.group == group) {
        return;
    }
    const int64_t B_offset = batch * p.B_batch_stride + step * p.B_len_stride + group * p.B_group_stride;
    const int64_t C_offset = batch * p.C_batch_stride + step * p.C_len_stride + group * p.C_group_stride;
    for (int64_t n = 0; n < p.dstate; n += kLanes) {
        const int count = block_lanes(p.dstate - n);
        store(tables.B + n, load_lanes(p.BC_dtype, p.B, B_offset + n * p.B_dstate_stride, p.B_dstate_stride, count));
        store(tables.C + n, load_lanes(p.BC_dtype, p.C, C_offset + n * p.C_dstate_stride, p.C_dstate_stride, count));
    }
    tables.batch = batch;
    tables.step = step;
    tables.group = group;
}

// Where a row of states lies; data NULL: nowhere.
struct StateRow {
    void* data;
    int32_t dtype;
    int64_t offset, stride;
};

// update_row where from and to are rows of neighbours, whole vectors of them, and A is one value or a row of floats: as
// decode steps have them. A: NULL where there is one decay for all.
template <typename S>
inline float update_plain_row(const void* from, void* to, const float* A, Vec decay, Vec log_decay, Vec input, int64_t dstate,
                              const GroupTables& tables) {
    const S* const old_states = static_cast<const S*>(from);
    S* const new_states = static_cast<S*>(to);
    Vec y = zero();
    for (int64_t n = 0; n < dstate; n += kLanes) {
        if (A != nullptr) {
            decay = exp2(log_decay * load(A + n));
        }
        const Vec h = fma(decay, load(old_states + n), input * load(tables.B + n));
        store(new_states + n, h);
        y = fma(h, load(tables.C + n), y);
    }
    return sum(y);
}

// Advances one row of states and returns C . state, from the new states before they are rounded to a dtype. They go to `to` and
// to `copy`.
inline float update_row(const MambaSelectiveStateUpdate& p, const StateRow& from, const StateRow& to, const StateRow& copy,
                        int64_t A_offset, float dt, float dt_x, const GroupTables& tables) {
    const Vec log_decay = set1(dt * kLog2e), input = set1(dt_x);
    // Mamba-2 has one A a head, given with stride 0: one exponential for all states
    const bool one_decay = p.A_dstate_stride == 0;
    Vec decay = zero(), y = zero();
    if (one_decay) {
        decay = exp2(log_decay * load_lanes(p.A_dtype, p.A, A_offset, 0, kLanes));
    }
    const bool plain_A = one_decay || (p.A_dtype == MAMBA_FLOAT32 && p.A_dstate_stride == 1);
    if (plain_A && p.dstate % kLanes == 0 && copy.data == nullptr && to.data != nullptr && from.stride == 1 && to.stride == 1 &&
        from.dtype == to.dtype) {
        const float* const A = one_decay ? nullptr : static_cast<const float*>(p.A) + A_offset;
        const int64_t width = from.dtype == MAMBA_FLOAT32 ? 4 : 2;
        const void* const old_row = static_cast<const char*>(from.data) + from.offset * width;
        void* const new_row = static_cast<char*>(to.data) + to.offset * width;
        if (from.dtype == MAMBA_FLOAT32) {
            return update_plain_row<float>(old_row, new_row, A, decay, log_decay, input, p.dstate, tables);
        }
#ifndef MAMBA_DISABLE_HALF
        if (from.dtype == MAMBA_FLOAT16) {
            return update_plain_row<Half>(old_row, new_row, A, decay, log_decay, input, p.dstate, tables);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (from.dtype == MAMBA_BFLOAT16) {
            return update_plain_row<Bfloat16>(old_row, new_row, A, decay, log_decay, input, p.dstate, tables);
        }
#endif
    }
    for (int64_t n = 0; n < p.dstate; n += kLanes) {
        const int count = block_lanes(p.dstate - n);
        if (!one_decay) {
            const int64_t A_n = A_offset + n * p.A_dstate_stride;
            decay = exp2(log_decay * load_lanes(p.A_dtype, p.A, A_n, p.A_dstate_stride, count));
        }
        Vec h = load_lanes(from.dtype, from.data, from.offset + n * from.stride, from.stride, count);
        h = fma(decay, h, input * load(tables.B + n));
        if (to.data != nullptr) {
            store_lanes(to.dtype, to.data, to.offset + n * to.stride, to.stride, count, h);
        }
        if (copy.data != nullptr) {
            store_lanes(copy.dtype, copy.data, copy.offset + n * copy.stride, copy.stride, count, h);
        }
        const Vec C = load(tables.C + n);
        y = count == kLanes ? fma(h, C, y) : y + keep_lanes(h * C, count);
    }
    return sum(y);
}

// Rows `first` and following of one head: the lanes of a vector for what there is once for a row.
struct Block {
    int64_t batch, head, first;
    int lanes;
};

inline void update_step(const MambaSelectiveStateUpdate& p, const Block& b, int64_t step, const StateRow* from,
                        const StateRow* to, GroupTables& tables) {
    load_group(p, b.batch, step, b.head / (p.nheads / p.ngroups), tables);
    const int64_t x_offset =
        b.batch * p.x_batch_stride + step * p.x_len_stride + b.head * p.x_head_stride + b.first * p.x_dim_stride;
    const int64_t dt_offset =
        b.batch * p.dt_batch_stride + step * p.dt_len_stride + b.head * p.dt_head_stride + b.first * p.dt_dim_stride;
    const Vec x = load_lanes(p.x_dtype, p.x, x_offset, p.x_dim_stride, b.lanes);
    Vec dt = load_lanes(p.dt_dtype, p.dt, dt_offset, p.dt_dim_stride, b.lanes);
    if (p.dt_bias != nullptr) {
        dt = dt + load_lanes(p.dt_bias_dtype, p.dt_bias, b.head * p.dt_bias_head_stride + b.first * p.dt_bias_dim_stride,
                             p.dt_bias_dim_stride, b.lanes);
    }
    if (p.dt_softplus) {
        Vec slope;
        dt = softplus(dt, slope);
    }
    alignas(64) float dt_rows[kLanes], dt_x_rows[kLanes], y_rows[kLanes] = {};
    store(dt_rows, dt);
    store(dt_x_rows, dt * x);
    for (int lane = 0; lane < b.lanes; ++lane) {
        const int64_t row = b.first + lane;
        StateRow copy = {p.step_states, p.state_dtype, 0, p.step_states_dstate_stride};
        copy.offset = b.batch * p.step_states_batch_stride + step * p.step_states_len_stride +
                      b.head * p.step_states_head_stride + row * p.step_states_dim_stride;
        y_rows[lane] = update_row(p, from[lane], to[lane], copy, b.head * p.A_head_stride + row * p.A_dim_stride, dt_rows[lane],
                                  dt_x_rows[lane], tables);
    }
    Vec y = load(y_rows);
    if (p.D != nullptr) {
        const Vec D = load_lanes(p.D_dtype, p.D, b.head * p.D_head_stride + b.first * p.D_dim_stride, p.D_dim_stride, b.lanes);
        y = fma(D, x, y);
    }
    if (p.z != nullptr) {
        const int64_t z_offset =
            b.batch * p.z_batch_stride + step * p.z_len_stride + b.head * p.z_head_stride + b.first * p.z_dim_stride;
        const Vec z = load_lanes(p.x_dtype, p.z, z_offset, p.z_dim_stride, b.lanes);
        y = y * (z * sigmoid(z));
    }
    const int64_t out_offset =
        b.batch * p.out_batch_stride + step * p.out_len_stride + b.head * p.out_head_stride + b.first * p.out_dim_stride;
    store_lanes(p.x_dtype, p.out, out_offset, p.out_dim_stride, b.lanes, y);
}

inline void update_block(const MambaSelectiveStateUpdate& p, const Block& b, GroupTables& tables) {
    const int64_t from = p.state_batch_indices != nullptr ? p.state_batch_indices[b.batch] : b.batch;
    if (from < 0) {
        for (int64_t step = 0; step < p.seqlen; ++step) {
            const int64_t out_offset = b.batch * p.out_batch_stride + step * p.out_len_stride + b.head * p.out_head_stride +
                                       b.first * p.out_dim_stride;
            store_lanes(p.x_dtype, p.out, out_offset, p.out_dim_stride, b.lanes, zero());
        }
        return;
    }
    const int64_t to = p.dst_state_batch_indices != nullptr ? p.dst_state_batch_indices[b.batch] : from;
    // Between steps the states are float32, here.
    alignas(64) float between[kLanes][MAMBA_MAX_DSTATE];
    StateRow old_rows[kLanes], new_rows[kLanes], between_rows[kLanes];
    for (int lane = 0; lane < b.lanes; ++lane) {
        const int64_t offset = b.head * p.state_head_stride + (b.first + lane) * p.state_dim_stride;
        old_rows[lane] = {p.state, p.state_dtype, from * p.state_row_stride + offset, p.state_dstate_stride};
        new_rows[lane] = {to < 0 ? nullptr : p.state, p.state_dtype, to * p.state_row_stride + offset, p.state_dstate_stride};
        between_rows[lane] = {between[lane], MAMBA_FLOAT32, 0, 1};
    }
    for (int64_t step = 0; step < p.seqlen; ++step) {
        update_step(p, b, step, step == 0 ? old_rows : between_rows, step + 1 == p.seqlen ? new_rows : between_rows, tables);
    }
}

inline void update_blocks(const MambaSelectiveStateUpdate& p, int64_t begin, int64_t end) {
    GroupTables tables;
    tables.batch = -1;
    const int64_t blocks_per_head = ceil_div(p.headdim, kLanes);
    for (int64_t block = begin; block < end; ++block) {
        const int64_t head = block / blocks_per_head, part = block % blocks_per_head;
        const int64_t first = part * kLanes;
        update_block(p, {head / p.nheads, head % p.nheads, first, block_lanes(p.headdim - first)}, tables);
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
