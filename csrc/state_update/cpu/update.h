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

// B and C of one step of a batch entry and group, as floats padded with zeros to whole vectors; of bfloat16 states
// that are whole pairs of vectors also in the order in which load_pair gives those.
struct GroupTables {
    int64_t batch, step, group;  // which are loaded; batch -1: none
    alignas(64) float B[MAMBA_MAX_DSTATE + kLanes];
    alignas(64) float C[MAMBA_MAX_DSTATE + kLanes];
    alignas(64) float B_pairs[MAMBA_MAX_DSTATE];
    alignas(64) float C_pairs[MAMBA_MAX_DSTATE];
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
    if (p.state_dtype == MAMBA_BFLOAT16 && p.dstate % (2 * kLanes) == 0) {
        order_as_pairs(tables.B, p.dstate, tables.B_pairs);
        order_as_pairs(tables.C, p.dstate, tables.C_pairs);
    }
    tables.batch = batch;
    tables.step = step;
    tables.group = group;
}

// Where the rows of states of a block lie; data NULL: nowhere.
struct StateRows {
    void* data;
    int32_t dtype;
    int64_t offset, row_stride, stride;
};

// What the rows of a block have one of each.
struct RowInputs {
    alignas(64) float log_decay[kLanes];  // dt, to be multiplied by A: the logarithm to base 2 of the decay
    alignas(64) float decay[kLanes];      // where a row has one decay for all of its states
    alignas(64) float dt_x[kLanes];
};

// Some rows of a block, each kLanes / kTogether behind the one before: memory brings more at once of places that are not one
// run. Their elements are neighbours, whole vectors of them, as decode steps have them.
template <int kTogether, typename S>
struct PlainRows {
    static constexpr int kApart = kLanes / kTogether;
    const S* old_states[kTogether];
    S* new_states[kTogether];
    Vec input[kTogether], decay[kTogether], total[kTogether];

    MAMBA_INLINE PlainRows(const StateRows& from, const StateRows& to, const RowInputs& rows, int lane) {
        for (int i = 0; i < kTogether; ++i) {
            const int row = lane + i * kApart;
            old_states[i] = static_cast<const S*>(from.data) + from.offset + row * from.row_stride;
            new_states[i] = static_cast<S*>(to.data) + to.offset + row * to.row_stride;
            input[i] = set1(rows.dt_x[row]);
            decay[i] = set1(rows.decay[row]);
            total[i] = zero();
        }
    }
    // Each state with a decay of its own.
    MAMBA_INLINE void update(const float* A, int64_t A_row_stride, const RowInputs& rows, int lane, int64_t dstate,
                             int64_t ahead, const GroupTables& tables) {
        for (int64_t n = 0; n < dstate; n += kLanes) {
            for (int i = 0; i < kTogether; ++i) {
                const int row = lane + i * kApart;
                prefetch(old_states[i] + n + ahead);
                const Vec own_decay =
                    A == nullptr ? decay[i] : exp2(set1(rows.log_decay[row]) * load(A + row * A_row_stride + n));
                const Vec h = fma(own_decay, load(old_states[i] + n), input[i] * load(tables.B + n));
                store(new_states[i] + n, h);
                total[i] = fma(h, load(tables.C + n), total[i]);
            }
        }
    }
    // One decay a row, dstate a multiple of 2 * kLanes.
    MAMBA_INLINE void update_pairs(int64_t dstate, int64_t ahead, const float* B, const float* C) {
        for (int64_t n = 0; n < dstate; n += 2 * kLanes) {
            for (int i = 0; i < kTogether; ++i) {
                prefetch(old_states[i] + n + ahead);
                if (2 * kLanes * sizeof(S) > 64) {
                    prefetch(old_states[i] + n + ahead + kLanes);
                }
                Vec first, second;
                load_pair(old_states[i] + n, first, second);
                first = fma(decay[i], first, input[i] * load(B + n));
                second = fma(decay[i], second, input[i] * load(B + n + kLanes));
                store_pair(new_states[i] + n, first, second);
                total[i] = fma(second, load(C + n + kLanes), fma(first, load(C + n), total[i]));
            }
        }
    }
};

// `lane` and those that go with it. A: NULL where a row has one decay.
template <int kTogether, typename S>
MAMBA_INLINE void update_plain_rows(const StateRows& from, const StateRows& to, const float* A, int64_t A_row_stride,
                                    const RowInputs& rows, int lane, int64_t dstate, const GroupTables& tables, Vec* y) {
    // Of the elements that are fetched into the cache meanwhile: those of the next block, or as many as a page has.
    constexpr int64_t kPage = 4096 / sizeof(S);
    const int64_t block = kTogether > 1 ? kLanes * from.row_stride : 0, ahead = block > kPage ? block : kPage;
    PlainRows<kTogether, S> states(from, to, rows, lane);
    if (A == nullptr && dstate % (2 * kLanes) == 0) {
        const bool ordered = from.dtype == MAMBA_BFLOAT16;
        states.update_pairs(dstate, ahead, ordered ? tables.B_pairs : tables.B, ordered ? tables.C_pairs : tables.C);
    } else {
        states.update(A, A_row_stride, rows, lane, dstate, ahead, tables);
    }
    for (int i = 0; i < kTogether; ++i) {
        y[lane + i * PlainRows<kTogether, S>::kApart] = states.total[i];
    }
}

template <typename S>
inline void update_plain_block(const StateRows& from, const StateRows& to, const float* A, int64_t A_row_stride,
                               const RowInputs& rows, int lanes, int64_t dstate, const GroupTables& tables, Vec* y) {
    constexpr int kTogether = 2;
    if (lanes == kLanes) {
        for (int lane = 0; lane < kLanes / kTogether; ++lane) {
            update_plain_rows<kTogether, S>(from, to, A, A_row_stride, rows, lane, dstate, tables, y);
        }
        return;
    }
    for (int lane = 0; lane < lanes; ++lane) {
        update_plain_rows<1, S>(from, to, A, A_row_stride, rows, lane, dstate, tables, y);
    }
}

// Rows of any kind, which go to `to` and to `copy`.
inline void update_any_rows(const MambaSelectiveStateUpdate& p, const StateRows& from, const StateRows& to,
                            const StateRows& copy, int64_t A_offset, const RowInputs& rows, int lanes,
                            const GroupTables& tables, Vec* y) {
    for (int lane = 0; lane < lanes; ++lane) {
        const Vec log_decay = set1(rows.log_decay[lane]), input = set1(rows.dt_x[lane]);
        const int64_t from_row = from.offset + lane * from.row_stride, to_row = to.offset + lane * to.row_stride;
        const int64_t copy_row = copy.offset + lane * copy.row_stride;
        Vec decay = set1(rows.decay[lane]), total = zero();
        for (int64_t n = 0; n < p.dstate; n += kLanes) {
            const int count = block_lanes(p.dstate - n);
            if (p.A_dstate_stride != 0) {
                const int64_t A_n = A_offset + lane * p.A_dim_stride + n * p.A_dstate_stride;
                decay = exp2(log_decay * load_lanes(p.A_dtype, p.A, A_n, p.A_dstate_stride, count));
            }
            Vec h = load_lanes(from.dtype, from.data, from_row + n * from.stride, from.stride, count);
            h = fma(decay, h, input * load(tables.B + n));
            if (to.data != nullptr) {
                store_lanes(to.dtype, to.data, to_row + n * to.stride, to.stride, count, h);
            }
            if (copy.data != nullptr) {
                store_lanes(copy.dtype, copy.data, copy_row + n * copy.stride, copy.stride, count, h);
            }
            const Vec C = load(tables.C + n);
            total = count == kLanes ? fma(h, C, total) : total + keep_lanes(h * C, count);
        }
        y[lane] = total;
    }
}

// Advances the states of a block's rows and returns C . state, from the new states before they are rounded to a dtype.
inline Vec update_rows(const MambaSelectiveStateUpdate& p, const StateRows& from, const StateRows& to, const StateRows& copy,
                       int64_t A_offset, const RowInputs& rows, int lanes, const GroupTables& tables) {
    Vec y[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
        y[lane] = zero();
    }
    const bool one_decay = p.A_dstate_stride == 0;
    const bool plain_A = one_decay || (p.A_dtype == MAMBA_FLOAT32 && p.A_dstate_stride == 1);
    const bool plain = plain_A && p.dstate % kLanes == 0 && copy.data == nullptr && to.data != nullptr && from.stride == 1 &&
                       to.stride == 1 && from.dtype == to.dtype;
    const float* const A = one_decay || !plain ? nullptr : static_cast<const float*>(p.A) + A_offset;
    if (plain) {
        with_type(from.dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
            update_plain_block<typename decltype(type)::type>(from, to, A, p.A_dim_stride, rows, lanes, p.dstate, tables, y);
        });
        return sum_each(y);
    }
    update_any_rows(p, from, to, copy, A_offset, rows, lanes, tables, y);
    return sum_each(y);
}

// Rows `first` and following of one head: the lanes of a vector for what there is once for a row.
struct Block {
    int64_t batch, head, first;
    int lanes;
};

inline void update_step(const MambaSelectiveStateUpdate& p, const Block& b, int64_t step, const StateRows& from,
                        const StateRows& to, GroupTables& tables) {
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
    const int64_t A_offset = b.head * p.A_head_stride + b.first * p.A_dim_stride;
    const Vec log_decay = dt * set1(kLog2e);
    RowInputs rows;
    store(rows.log_decay, log_decay);
    store(rows.dt_x, dt * x);
    store(rows.decay, zero());
    if (p.A_dstate_stride == 0) {  // Mamba-2 has one A a head: one exponential for all states
        store(rows.decay, exp2(log_decay * load_lanes(p.A_dtype, p.A, A_offset, p.A_dim_stride, b.lanes)));
    }
    const int64_t copy_offset = b.batch * p.step_states_batch_stride + step * p.step_states_len_stride +
                                b.head * p.step_states_head_stride + b.first * p.step_states_dim_stride;
    const StateRows copy = {p.step_states, p.state_dtype, copy_offset, p.step_states_dim_stride, p.step_states_dstate_stride};
    Vec y = update_rows(p, from, to, copy, A_offset, rows, b.lanes, tables);
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
    const StateRows between_rows = {between, MAMBA_FLOAT32, 0, MAMBA_MAX_DSTATE, 1};
    const int64_t offset = b.head * p.state_head_stride + b.first * p.state_dim_stride;
    const StateRows old_rows = {p.state, p.state_dtype, from * p.state_row_stride + offset, p.state_dim_stride,
                                p.state_dstate_stride};
    const StateRows new_rows = {to < 0 ? nullptr : p.state, p.state_dtype, to * p.state_row_stride + offset, p.state_dim_stride,
                                p.state_dstate_stride};
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
