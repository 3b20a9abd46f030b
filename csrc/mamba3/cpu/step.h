// A decoding step of heads of Mamba-3, their states in place: the state's rows are read and written once, where they lie.
#pragma once

#include "mamba3/cpu/output.h"

namespace mamba {
namespace MAMBA_ISA {
namespace mamba3 {

struct StepScratch {
    float *group_q, *group_k;         // (R, width), behind their norms, before bias and turn: of all heads of a group
    float *q, *k;                     // (R, width)
    float* weights;                   // (width)
    float *q_row, *k_row, *k_before;  // (R, N), as in memory
    float* vectors;                   // (N / lanes, 3, R, lanes): k_row, k_before, q_row
    float *v, *v_before, *z;          // (P)
    float *x, *x_before, *y;          // (R, P)
    float* angles;                    // (2, turned)
    float* sums;                      // (R, lanes, lanes)
    TurnTiles turns;
    Parameters parameters;
    int64_t floats;
};

inline StepScratch carve_step(const MambaMamba3& p, const Mamba3Layout& layout, float* base) {
    Carver carver = {base, 0};
    StepScratch s;
    float** const by_width[] = {&s.group_q, &s.group_k, &s.q, &s.k};
    s.weights = carver.take(layout.width);
    float** const by_N[] = {&s.q_row, &s.k_row, &s.k_before};
    float** const by_P[] = {&s.v, &s.v_before, &s.z};
    float** const by_row[] = {&s.x, &s.x_before, &s.y};
    float** const by_turn[] = {&s.turns.tanh, &s.turns.cos, &s.turns.sin};
    for (float** tile : by_width) {
        *tile = carver.take(p.rank * layout.width);
    }
    for (float** tile : by_N) {
        *tile = carver.take(p.rank * row_pitch(p.dstate));
    }
    for (float** tile : by_P) {
        *tile = carver.take(layout.pitch_P);
    }
    for (float** tile : by_row) {
        *tile = carver.take(p.rank * layout.pitch_P);
    }
    for (float** tile : by_turn) {
        *tile = carver.take(layout.turned);
    }
    s.vectors = carver.take(3 * p.rank * row_pitch(p.dstate));
    s.angles = carver.take(2 * layout.turned);
    s.sums = carver.take(p.rank * kLanes * kLanes);
    s.parameters = carve_parameters(p, layout, carver);
    s.floats = carver.used;
    return s;
}

inline int64_t step_scratch(const MambaMamba3& p, const Mamba3Layout& layout) {
    return carve_step(p, layout, nullptr).floats;
}

// A row of the state: h = decay (h + nu sum_r x_before_r k_before_r^T) + gamma sum_r x_r k_r^T. sums: for each r a vector
// whose lanes sum up to h q_r, from h before it is rounded.
template <typename T>
MAMBA_INLINE void step_row(const MambaMamba3& p, const Mamba3Layout& layout, float decay, float gamma, float nu,
                           const StepScratch& s, int64_t row, T* h, float* sums) {
    const int64_t N = p.dstate, pitch_P = layout.pitch_P, rank = p.rank;
    const float *k = s.vectors, *k_before = k + rank * kLanes, *q = k_before + rank * kLanes;
    for (int64_t r = 0; r < rank; ++r) {
        store(sums + r * kLanes * kLanes, zero());
    }
    for (int64_t n = 0, at = 0; n < N; n += kLanes, at += 3 * rank * kLanes) {
        const int lanes = block_lanes(N - n);
        Vec added = zero(), kept = lanes == kLanes ? load(h + n) : load_partial(h + n, lanes);
        for (int64_t r = 0; r < rank; ++r) {
            added = fma(set1(gamma * s.x[r * pitch_P + row]), load(k + at + r * kLanes), added);
            kept = fma(set1(nu * s.x_before[r * pitch_P + row]), load(k_before + at + r * kLanes), kept);
        }
        const Vec value = fma(set1(decay), kept, added);
        if (lanes == kLanes) {
            store(h + n, value);
        } else {
            store_partial(h + n, value, lanes);
        }
        for (int64_t r = 0; r < rank; ++r) {
            float* const total = sums + r * kLanes * kLanes;
            store(total, fma(value, load(q + at + r * kLanes), load(total)));
        }
    }
}

// As many rows at once as registers hold what belongs to them.
constexpr int rows_together(int rank) {
    return MAMBA_ISA_LEVEL == 2 || rank == 1 ? 2 : 1;
}

// The same of several rows, each kLanes / kTogether behind the one before, whole vectors of states: so k and q are loaded once
// for all, and memory brings more at once of places that are not one run.
template <typename T, int kRank, int kTogether>
MAMBA_INLINE void step_rows_together(const MambaMamba3& p, const Mamba3Layout& layout, float decay, float gamma, float nu,
                                     const StepScratch& s, int64_t row, T* h, float* sums) {
    constexpr int kApart = kLanes / kTogether;
    const int64_t N = p.dstate, pitch_P = layout.pitch_P, block = kLanes * N, page = 4096 / sizeof(T);
    const int64_t ahead = block > page ? block : page;  // of the elements that are fetched into the cache meanwhile
    const float* vectors = s.vectors;
    Vec totals[kTogether][kRank], x[kTogether][kRank], before[kTogether][kRank];
    for (int i = 0; i < kTogether; ++i) {
        for (int r = 0; r < kRank; ++r) {
            const int64_t place = r * pitch_P + row + i * kApart;
            totals[i][r] = zero();
            x[i][r] = set1(gamma * s.x[place]);
            before[i][r] = set1(nu * s.x_before[place]);
        }
    }
    for (int64_t n = 0; n < N; n += kLanes, vectors += 3 * kRank * kLanes) {
        Vec added[kTogether], kept[kTogether];
        for (int i = 0; i < kTogether; ++i) {
            prefetch(h + i * kApart * N + n + ahead);
            kept[i] = load(h + i * kApart * N + n);
            added[i] = zero();
        }
        for (int r = 0; r < kRank; ++r) {
            const Vec k = load(vectors + r * kLanes), k_before = load(vectors + (kRank + r) * kLanes);
            for (int i = 0; i < kTogether; ++i) {
                added[i] = fma(x[i][r], k, added[i]);
                kept[i] = fma(before[i][r], k_before, kept[i]);
            }
        }
        for (int i = 0; i < kTogether; ++i) {
            kept[i] = fma(set1(decay), kept[i], added[i]);
            store(h + i * kApart * N + n, kept[i]);
        }
        for (int r = 0; r < kRank; ++r) {
            const Vec q = load(vectors + (2 * kRank + r) * kLanes);
            for (int i = 0; i < kTogether; ++i) {
                totals[i][r] = fma(kept[i], q, totals[i][r]);
            }
        }
    }
    for (int i = 0; i < kTogether; ++i) {
        for (int r = 0; r < kRank; ++r) {
            store(sums + (r * kLanes + i * kApart) * kLanes, totals[i][r]);
        }
    }
}

// What a row of the state is multiplied with, in the order in which it is read.
inline void join_vectors(const MambaMamba3& p, const StepScratch& s) {
    const int64_t pitch_N = row_pitch(p.dstate);
    float* to = s.vectors;
    for (int64_t n = 0; n < p.dstate; n += kLanes) {
        const float* const rows[] = {s.k_row, s.k_before, s.q_row};
        for (const float* from : rows) {
            for (int64_t r = 0; r < p.rank; ++r, to += kLanes) {
                store(to, load(from + r * pitch_N + n));
            }
        }
    }
}

// kRank: p.rank, or 0 for any.
template <typename T, int kRank>
inline void step_rows(const MambaMamba3& p, const Mamba3Layout& layout, float decay, float gamma, float nu,
                      const StepScratch& s, T* state) {
    constexpr int kTogether = rows_together(kRank);
    for (int64_t first = 0; first < p.headdim; first += kLanes) {
        const int rows = block_lanes(p.headdim - first);
        T* const h = state + first * p.dstate;
        if (kRank > 0 && rows == kLanes && p.dstate % kLanes == 0) {
            for (int i = 0; i < kLanes / kTogether; ++i) {
                step_rows_together<T, kRank == 0 ? 1 : kRank, kTogether>(p, layout, decay, gamma, nu, s, first + i,
                                                                         h + i * p.dstate, s.sums + i * kLanes);
            }
        } else {
            fill_zero(s.sums, p.rank * kLanes * kLanes);
            for (int i = 0; i < rows; ++i) {
                step_row<T>(p, layout, decay, gamma, nu, s, first + i, h + i * p.dstate, s.sums + i * kLanes);
            }
        }
        for (int64_t r = 0; r < p.rank; ++r) {
            Vec sums[kLanes];
            for (int i = 0; i < kLanes; ++i) {
                sums[i] = load(s.sums + (r * kLanes + i) * kLanes);
            }
            store(s.y + r * layout.pitch_P + first, sum_each(sums));
        }
    }
}

template <typename T>
inline void step_state(const MambaMamba3& p, const Mamba3Layout& layout, float decay, float gamma, float nu,
                       const StepScratch& s, T* state) {
    if (p.rank == 1) {
        step_rows<T, 1>(p, layout, decay, gamma, nu, s, state);
    } else if (p.rank == 4) {
        step_rows<T, 4>(p, layout, decay, gamma, nu, s, state);
    } else {
        step_rows<T, 0>(p, layout, decay, gamma, nu, s, state);
    }
}

// ADT and DT of a head, where the projection is taken as it is.
struct StepRate {
    float adt, dt;
};

inline StepRate step_rate(const MambaMamba3Step& q, int64_t batch, int64_t head) {
    const MambaMamba3& p = q.scan;
    const Vec bias = load_lanes(q.parameter_dtype, q.dt_bias, head, 1, 1), one = set1(1.0f);
    const Vec a = load_lanes(p.adt_dtype, p.adt, batch * p.adt_batch_stride + head * p.adt_head_stride, 1, 1);
    Vec slope;
    const Vec dt =
        softplus(load_lanes(p.dt_dtype, p.dt, batch * p.dt_batch_stride + head * p.dt_head_stride, 1, 1) + bias, slope);
    const Vec heavy_tail = select_greater(zero(), a, one / (one - a), one + a);
    const Vec rate = q.A_softplus != 0 ? softplus(a, slope) : heavy_tail, least = set1(q.A_floor);
    return {first_lane(zero() - select_greater(least, rate, least, rate) * dt), first_lane(dt)};
}

// The rows of q or k, each divided by its root mean square, times weight; as they are without.
inline void norm_rows(const MambaMamba3Step& q, const Mamba3Layout& layout, const void* weight, float eps, float* weights,
                      float* rows) {
    if (weight == nullptr) {
        return;
    }
    load_matrix(layout, q.weight_dtype, weight, 0, 0, 1, weights, layout.width);
    for (int64_t r = 0; r < q.scan.rank; ++r) {
        float* row = rows + r * layout.width;
        const Vec rstd = set1(1.0f / ::sqrtf(dot_row(row, row, layout.width) / static_cast<float>(q.scan.dstate) + eps));
        for (int64_t i = 0; i < layout.width; i += kLanes) {
            store(row + i, load(row + i) * rstd * load(weights + i));
        }
    }
}

// q and k of a group's heads.
inline void load_step_group(const MambaMamba3Step& q, const Mamba3Layout& layout, const Chunk& chunk, int64_t group,
                            const StepScratch& s) {
    fill_zero(s.group_q, chunk.rows * layout.width);  // a norm has written NaN between the parts, if its row had one
    load_q(q.scan, layout, chunk, group, s.group_q);
    norm_rows(q, layout, q.q_weight, q.q_eps, s.weights, s.group_q);
    fill_zero(s.group_k, chunk.rows * layout.width);
    load_k(q.scan, layout, chunk, group, s.group_k);
    norm_rows(q, layout, q.k_weight, q.k_eps, s.weights, s.group_k);
}

inline void prefetch_elements(const void* data, int32_t dtype, int64_t first, int64_t count) {
    const int64_t size = dtype == MAMBA_FLOAT32 ? 4 : 2;
    for (int64_t i = 0; i < count * size && data != nullptr; i += 64) {
        prefetch(static_cast<const char*>(data) + first * size + i);
    }
}

// What a head reads beside its state, which the processor does not expect so far from the last head's.
inline void prefetch_head(const MambaMamba3Step& q, int64_t batch, int64_t head) {
    const MambaMamba3& p = q.scan;
    const int64_t matrix = p.rank * p.dstate, rows = p.rank * p.headdim;
    prefetch_elements(p.q_bias, q.parameter_dtype, head * matrix, matrix);
    prefetch_elements(p.k_bias, q.parameter_dtype, head * matrix, matrix);
    prefetch_elements(p.mimo_v, q.parameter_dtype, head * rows, rows);
    prefetch_elements(p.mimo_z, q.parameter_dtype, head * rows, rows);
    prefetch_elements(p.mimo_out, q.parameter_dtype, head * rows, rows);
    for (int64_t r = 0; r < p.rank; ++r) {
        prefetch_elements(q.state_k, q.k_dtype, ((batch * p.rank + r) * p.nheads + head) * p.dstate, p.dstate);
    }
    const int64_t row = batch * p.nheads + head;
    prefetch_elements(q.state_v, q.v_dtype, row * p.headdim, p.headdim);
    prefetch_elements(q.state_angle, MAMBA_FLOAT32, row * p.nangles, p.nangles);
}

// p: q.scan with ADT and DT. Of the group's q and k, in scratch memory, a head has its own bias and turn.
inline void step_head(const MambaMamba3Step& q, const MambaMamba3& p, const Mamba3Layout& layout, const Chunk& chunk,
                      int64_t head, StepScratch& s) {
    const int rank = chunk.rows;
    const int64_t batch = chunk.row, row = batch * p.nheads + head, pitch_N = row_pitch(p.dstate);
    Steps steps;
    find_steps(p, chunk, head, steps);
    load_angles(p, layout, q.state_angle + row * p.nangles, s.angles);
    find_turns(p, layout, chunk, head, steps, s.angles, s.turns);
    store_angles(p, layout, s.angles, q.state_angle + row * p.nangles);
    load_parameters(p, layout, head, s.parameters, q.parameter_dtype, q.weight_dtype);
    turn_rows(p, layout, chunk, s.group_q, s.parameters.q_bias, s.turns, s.q);
    turn_rows(p, layout, chunk, s.group_k, s.parameters.k_bias, s.turns, s.k);
    store_matrix(layout, MAMBA_FLOAT32, s.q_row, 0, pitch_N, rank, s.q, layout.width);
    store_matrix(layout, MAMBA_FLOAT32, s.k_row, 0, pitch_N, rank, s.k, layout.width);
    const int64_t k_offset = (batch * p.rank * p.nheads + head) * p.dstate, k_stride = p.nheads * p.dstate;
    load_rows(q.k_dtype, q.state_k, k_offset, k_stride, p.dstate, rank, s.k_before);
    store_rows(q.k_dtype, q.state_k, k_offset, k_stride, p.dstate, rank, s.k_row);
    load_v(p, chunk, head, s.v);
    load_rows(q.v_dtype, q.state_v, row * p.headdim, p.headdim, p.headdim, 1, s.v_before);
    store_rows(q.v_dtype, q.state_v, row * p.headdim, p.headdim, p.headdim, 1, s.v);
    project_rows(p, layout, s.v, s.parameters.mimo_v, 1, s.x);
    project_rows(p, layout, s.v_before, s.parameters.mimo_v, 1, s.x_before);
    join_vectors(p, s);
    if (row + 1 < p.batch * p.nheads) {
        prefetch_head(q, (row + 1) / p.nheads, (row + 1) % p.nheads);
    }

    const float decay = steps.carried, gamma = steps.gamma[0], nu = steps.rest[0] * steps.dt[0];
    const int64_t state = row * p.headdim * p.dstate;
    with_type(q.ssm_dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
        step_state(p, layout, decay, gamma, nu, s, static_cast<typename decltype(type)::type*>(q.state_ssm) + state);
    });
    if (p.z != nullptr) {
        load_rows(p.dtype, p.z, z_offset(p, chunk, head), p.z_len_stride, p.headdim, 1, s.z);
    }
    finish_rows(p, layout, s.parameters, 1, s.x, s.z, s.y);
    const int64_t out = batch * p.out_batch_stride + head * p.out_head_stride;
    store_rows(p.dtype, p.out, out, p.out_rank_stride, p.headdim, p.mimo_out != nullptr ? 1 : rank, s.y);
}

// Heads [begin, end), counted through the batch.
inline void step_heads(const MambaMamba3Step& q, const Mamba3Layout& layout, int64_t begin, int64_t end, float* scratch) {
    MambaMamba3 p = q.scan;
    StepRate rate;
    if (q.dt_bias != nullptr) {
        p.adt = &rate.adt;
        p.dt = &rate.dt;
        p.adt_dtype = p.dt_dtype = MAMBA_FLOAT32;
        p.adt_batch_stride = p.adt_head_stride = p.dt_batch_stride = p.dt_head_stride = 0;
    }
    StepScratch s = carve_step(p, layout, scratch);
    fill_zero(scratch, s.floats);
    int64_t loaded = -1;
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t batch = unit / p.nheads, head = unit % p.nheads, group = head / (p.nheads / p.ngroups);
        const Chunk chunk = {batch, 0, 1, static_cast<int>(p.rank), true};
        if (loaded != batch * p.ngroups + group) {
            loaded = batch * p.ngroups + group;
            load_step_group(q, layout, chunk, group, s);
        }
        if (q.dt_bias != nullptr) {
            rate = step_rate(q, batch, head);
        }
        step_head(q, p, layout, chunk, head, s);
    }
}

}  // namespace mamba3
}  // namespace MAMBA_ISA
}  // namespace mamba
