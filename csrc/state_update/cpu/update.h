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

// B and C of one batch entry and group, as floats padded with zeros to whole vectors.
struct GroupTables {
    int64_t batch, group;  // which are loaded; batch -1: none
    alignas(64) float B[MAMBA_MAX_DSTATE + kLanes];
    alignas(64) float C[MAMBA_MAX_DSTATE + kLanes];
};

inline void load_group(const MambaSelectiveStateUpdate& p, int64_t batch, int64_t group, GroupTables& tables) {
    if (tables.batch == batch && tables.group == group) {
        return;
    }
    const int64_t B_offset = batch * p.B_batch_stride + group * p.B_group_stride;
    const int64_t C_offset = batch * p.C_batch_stride + group * p.C_group_stride;
    for (int64_t n = 0; n < p.dstate; n += kLanes) {
        const int count = block_lanes(p.dstate - n);
        store(tables.B + n, load_lanes(p.BC_dtype, p.B, B_offset + n * p.B_dstate_stride, p.B_dstate_stride, count));
        store(tables.C + n, load_lanes(p.BC_dtype, p.C, C_offset + n * p.C_dstate_stride, p.C_dstate_stride, count));
    }
    tables.batch = batch;
    tables.group = group;
}

// Advances one row of states and returns C . state, from the new states before they are rounded to their dtype.
inline float update_row(const MambaSelectiveStateUpdate& p, int64_t state_offset, int64_t A_offset, float dt, float dt_x,
                        const GroupTables& tables) {
    const Vec log_decay = set1(dt * kLog2e), input = set1(dt_x);
    // Mamba-2 has one A a head, given with stride 0: one exponential for all states
    const bool one_decay = p.A_dstate_stride == 0;
    Vec decay = zero(), y = zero();
    if (one_decay) {
        decay = exp2(log_decay * load_lanes(p.A_dtype, p.A, A_offset, 0, kLanes));
    }
    for (int64_t n = 0; n < p.dstate; n += kLanes) {
        const int count = block_lanes(p.dstate - n);
        const int64_t offset = state_offset + n * p.state_dstate_stride;
        if (!one_decay) {
            const int64_t A_n = A_offset + n * p.A_dstate_stride;
            decay = exp2(log_decay * load_lanes(p.A_dtype, p.A, A_n, p.A_dstate_stride, count));
        }
        Vec h = load_lanes(p.state_dtype, p.state, offset, p.state_dstate_stride, count);
        h = fma(decay, h, input * load(tables.B + n));
        store_lanes(p.state_dtype, p.state, offset, p.state_dstate_stride, count, h);
        const Vec C = load(tables.C + n);
        y = count == kLanes ? fma(h, C, y) : y + keep_lanes(h * C, count);
    }
    return sum(y);
}

inline void update_block(const MambaSelectiveStateUpdate& p, int64_t batch, int64_t head, int64_t first, GroupTables& tables) {
    const int lanes = block_lanes(p.headdim - first);
    const int64_t out_offset = batch * p.out_batch_stride + head * p.out_head_stride + first * p.out_dim_stride;
    const int64_t row = p.state_batch_indices != nullptr ? p.state_batch_indices[batch] : batch;
    if (row < 0) {
        store_lanes(p.x_dtype, p.out, out_offset, p.out_dim_stride, lanes, zero());
        return;
    }
    load_group(p, batch, head / (p.nheads / p.ngroups), tables);
    const Vec x = load_lanes(p.x_dtype, p.x, batch * p.x_batch_stride + head * p.x_head_stride + first * p.x_dim_stride,
                             p.x_dim_stride, lanes);
    Vec dt = load_lanes(p.dt_dtype, p.dt, batch * p.dt_batch_stride + head * p.dt_head_stride + first * p.dt_dim_stride,
                        p.dt_dim_stride, lanes);
    if (p.dt_bias != nullptr) {
        dt = dt + load_lanes(p.dt_bias_dtype, p.dt_bias, head * p.dt_bias_head_stride + first * p.dt_bias_dim_stride,
                             p.dt_bias_dim_stride, lanes);
    }
    if (p.dt_softplus) {
        Vec slope;
        dt = softplus(dt, slope);
    }
    alignas(64) float dt_rows[kLanes], dt_x_rows[kLanes], y_rows[kLanes] = {};
    store(dt_rows, dt);
    store(dt_x_rows, dt * x);
    for (int lane = 0; lane < lanes; ++lane) {
        const int64_t state = row * p.state_row_stride + head * p.state_head_stride + (first + lane) * p.state_dim_stride;
        const int64_t A = head * p.A_head_stride + (first + lane) * p.A_dim_stride;
        y_rows[lane] = update_row(p, state, A, dt_rows[lane], dt_x_rows[lane], tables);
    }
    Vec y = load(y_rows);
    if (p.D != nullptr) {
        const Vec D = load_lanes(p.D_dtype, p.D, head * p.D_head_stride + first * p.D_dim_stride, p.D_dim_stride, lanes);
        y = fma(D, x, y);
    }
    if (p.z != nullptr) {
        const Vec z = load_lanes(p.x_dtype, p.z, batch * p.z_batch_stride + head * p.z_head_stride + first * p.z_dim_stride,
                                 p.z_dim_stride, lanes);
        y = y * (z * sigmoid(z));
    }
    store_lanes(p.x_dtype, p.out, out_offset, p.out_dim_stride, lanes, y);
}

inline void update_blocks(const MambaSelectiveStateUpdate& p, int64_t begin, int64_t end) {
    GroupTables tables;
    tables.batch = -1;
    const int64_t blocks_per_head = ceil_div(p.headdim, kLanes);
    for (int64_t block = begin; block < end; ++block) {
        const int64_t head = block / blocks_per_head, part = block % blocks_per_head;
        update_block(p, head / p.nheads, head % p.nheads, part * kLanes, tables);
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
