// The gradients of Mamba-2's scan. The first pass finds, for each head, the state that enters each chunk (from the front) and
// the gradient of the state that leaves it (from the back). With these, the second pass takes each chunk by itself.
//
// With W(t, s) the decay from step s to t within a run, h0 and g1 that state and that gradient, and in and out the decays
// from the chunk's begin and to its end, the gradients are those of
//     y_t = in_t h0 C_t + sum_{s <= t} W(t, s) dt_s (C_t . B_s) x_s,   h1 = in_end h0 + sum_s out_s dt_s x_s B_s^T.
// An exponent of a step r is in every decay that crosses it: its gradient is the sum of the terms from before r to r or later.
#pragma once

#include "ssd/cpu_chunk.h"
#include "ssd/cpu_product.h"

namespace mamba {
namespace MAMBA_ISA {

inline int64_t state_floats(const MambaSsd& p) {
    return p.headdim * ssd_pitch(p.dstate);
}
inline int64_t gradient_floats(const MambaSsd& p) {
    return p.dstate * ssd_pitch(p.headdim);
}

inline float* chunk_state(const MambaSsd& p, const SsdBackwardSpace& space, int64_t batch, int64_t head, int64_t chunk) {
    const int64_t row = (batch - space.first_batch) * space.heads + head - space.first_head;
    return space.states + (row * space.chunks + chunk) * state_floats(p);
}
inline float* chunk_gradient(const MambaSsd& p, const SsdBackwardSpace& space, int64_t batch, int64_t head, int64_t chunk) {
    const int64_t row = (batch - space.first_batch) * space.heads + head - space.first_head;
    return space.gradients + (row * space.chunks + chunk) * gradient_floats(p);
}

// Whether a state enters the chunk: one that is not zero, or one whose gradient is wanted.
inline bool state_enters(const MambaSsdBackward& q, int64_t index, const Chunk& chunk) {
    const bool initial = q.forward.initial_state != nullptr || q.dinitial_state != nullptr;
    return !chunk.restarts && (index > 0 || initial);
}
// Whether the state that leaves the chunk has a gradient.
inline bool gradient_leaves(const MambaSsdBackward& q, const Sequence& sequence, const SsdBackwardSpace& space, int64_t index) {
    if (index + 1 == space.chunks) {
        return q.dfinal_state != nullptr;
    }
    const int64_t next = (index + 1) * kChunk;
    const int32_t* seq_idx = q.forward.seq_idx;
    return seq_idx == nullptr ||
           seq_idx[sequence.row * q.forward.seqlen + next] == seq_idx[sequence.row * q.forward.seqlen + next - 1];
}

struct BackwardScratch {
    float *B, *B_columns, *C;     // (steps, N), (N, steps), (steps, N)
    float *dB, *dC, *entered;     // (steps, N): sums over heads, and one head's part from the entering state
    float *products, *dproducts;  // (steps, steps): C . B, and its gradient, added up over heads
    float *x_dy, *weights;        // (steps, steps): x . dy, and what an output's gradient adds to an earlier input's
    float *x, *x_columns, *dy;    // (steps, P), (P, steps), (steps, P)
    float *du, *scaled;           // (steps, P): gradient of dt x, and scaled rows
    float* gradient;              // (P, N): gradient of the leaving state
    float *D, *dD;                // (P)
    int64_t floats;
};

inline BackwardScratch carve_backward(const MambaSsd& p, float* base) {
    Carver carver = {base, 0};
    BackwardScratch s;
    const int64_t width = ssd_pitch(p.headdim), dstate = ssd_pitch(p.dstate);
    s.B = carver.take(kChunk * dstate);
    s.B_columns = carver.take(p.dstate * kChunk);
    s.C = carver.take(kChunk * dstate);
    s.dB = carver.take(kChunk * dstate);
    s.dC = carver.take(kChunk * dstate);
    s.entered = carver.take(kChunk * dstate);
    s.products = carver.take(kChunk * kChunk);
    s.dproducts = carver.take(kChunk * kChunk);
    s.x_dy = carver.take(kChunk * kChunk);
    s.weights = carver.take(kChunk * kChunk);
    s.x = carver.take(kChunk * width);
    s.x_columns = carver.take(p.headdim * kChunk);
    s.dy = carver.take(kChunk * width);
    s.du = carver.take(kChunk * width);
    s.scaled = carver.take(kChunk * width);
    s.gradient = carver.take(state_floats(p) > gradient_floats(p) ? state_floats(p) : gradient_floats(p));
    s.D = carver.take(width);
    s.dD = carver.take(width);
    s.floats = carver.used;
    return s;
}

inline int64_t backward_scratch(const MambaSsd& p) {
    return carve_backward(p, nullptr).floats;
}

inline void load_x(const MambaSsd& p, const Chunk& chunk, int64_t head, float* rows) {
    load_rows(p.dtype, p.x, x_offset(p, chunk, head), p.x_len_stride, p.headdim, chunk.steps, rows);
}
inline void load_dy(const MambaSsdBackward& q, const Chunk& chunk, int64_t head, float* rows) {
    const int64_t offset = chunk.row * q.dout_batch_stride + chunk.start * q.dout_len_stride + head * q.dout_head_stride;
    load_rows(q.forward.dtype, q.dout, offset, q.dout_len_stride, q.forward.headdim, chunk.steps, rows);
}

// ---- first pass ------------------------------------------------------------------------------------------------------

inline void backward_states(const MambaSsdBackward& q, const SsdBackwardSpace& space, int64_t batch, int64_t head,
                            float* scratch) {
    const MambaSsd& p = q.forward;
    const BackwardScratch s = carve_backward(p, scratch);
    const Sequence sequence = sequence_of(p, batch);
    const int64_t width = ssd_pitch(p.headdim), dstate = ssd_pitch(p.dstate), group = head / (p.nheads / p.ngroups);
    if (space.chunks > 0) {
        float* first = chunk_state(p, space, batch, head, 0);
        if (p.initial_state != nullptr) {
            load_rows(MAMBA_FLOAT32, p.initial_state, (batch * p.nheads + head) * p.headdim * p.dstate, p.dstate, p.dstate,
                      static_cast<int>(p.headdim), first);
        } else {
            fill_zero(first, state_floats(p));
        }
    }
    for (int64_t index = 0; index + 1 < space.chunks; ++index) {
        Chunk chunk;
        Decays decays;
        find_chunk(p, sequence, index, chunk);
        find_decays(p, chunk, head, decays);
        load_rows(p.dtype, p.B, B_offset(p, chunk, group), p.B_len_stride, p.dstate, chunk.steps, s.B);
        load_x(p, chunk, head, s.x);
        const Run run = chunk.last();
        scale_rows(s.x, decays.dt, run.begin, run.end, p.headdim, s.scaled);
        scale_rows(s.scaled, decays.leaving, run.begin, run.end, p.headdim, s.scaled);
        const float carried = state_enters(q, index, chunk) && chunk.count == 1 ? decays.carried : 0.0f;
        const Product added = {s.scaled + run.begin * width,
                               1,
                               width,
                               s.B + run.begin * dstate,
                               dstate,
                               chunk_state(p, space, batch, head, index),
                               carried,
                               chunk_state(p, space, batch, head, index + 1),
                               dstate};
        product(added, p.headdim, p.dstate, run.end - run.begin);
    }
}

inline void backward_gradients(const MambaSsdBackward& q, const SsdBackwardSpace& space, int64_t batch, int64_t head,
                               float* scratch) {
    const MambaSsd& p = q.forward;
    const BackwardScratch s = carve_backward(p, scratch);
    const Sequence sequence = sequence_of(p, batch);
    const int64_t width = ssd_pitch(p.headdim), dstate = ssd_pitch(p.dstate), group = head / (p.nheads / p.ngroups);
    const int64_t state = (batch * p.nheads + head) * p.headdim * p.dstate;
    float* last = space.chunks > 0 ? chunk_gradient(p, space, batch, head, space.chunks - 1) : s.gradient;
    if (q.dfinal_state != nullptr) {
        load_transposed(q.dfinal_state + state, p.dstate, p.headdim, p.dstate, last);
    } else {
        fill_zero(last, gradient_floats(p));
    }
    for (int64_t index = space.chunks - 1; index >= (q.dinitial_state != nullptr ? 0 : 1); --index) {
        Chunk chunk;
        find_chunk(p, sequence, index, chunk);
        if (!state_enters(q, index, chunk)) {
            continue;  // nobody reads the gradient of what leaves the chunk before
        }
        Decays decays;
        find_decays(p, chunk, head, decays);
        load_rows(p.dtype, p.C, C_offset(p, chunk, group), p.C_len_stride, p.dstate, chunk.steps, s.C);
        load_dy(q, chunk, head, s.dy);
        const Run run = chunk.first();
        scale_rows(s.dy, decays.entering, run.begin, run.end, p.headdim, s.scaled);
        const bool passes = chunk.count == 1 && gradient_leaves(q, sequence, space, index);
        float* before = index > 0 ? chunk_gradient(p, space, batch, head, index - 1) : s.gradient;
        const Product added = {
            s.C,    1,    dstate, s.scaled, width, chunk_gradient(p, space, batch, head, index), passes ? decays.carried : 0.0f,
            before, width};
        product(added, p.dstate, p.headdim, run.end);
    }
    if (q.dinitial_state != nullptr) {
        store_transposed(q.dinitial_state + state, p.dstate, p.headdim, p.dstate, s.gradient);
    }
}

// ---- second pass -----------------------------------------------------------------------------------------------------

// What a chunk's exponents get their gradients from, one value a step.
struct ExponentTerms {
    alignas(64) float to[kChunk];       // sum over earlier steps of the run
    alignas(64) float from[kChunk];     // sum over later steps of the run
    alignas(64) float entered[kChunk];  // of the entering state
    alignas(64) float left[kChunk];     // to the leaving state
    double carried;                     // of the entering to the leaving state
};

inline float dot_row(const float* a, const float* b, int64_t columns) {
    Vec total = zero();
    for (int64_t column = 0; column < columns; column += kLanes) {
        total = fma(load(a + column), load(b + column), total);
    }
    return sum(total);
}

// Zero outside [low, high] of the steps that these lanes stand for.
MAMBA_INLINE Vec keep_steps(Vec value, Vec step, float low, float high) {
    return select_greater(step, set1(high + 0.5f), zero(), select_greater(set1(low - 0.5f), step, zero(), value));
}

// From C . B and x . dy: weights for dx, this head's part of the gradient of C . B, and the terms within runs.
inline void chunk_weights(const Chunk& chunk, const Decays& decays, const BackwardScratch& s, ExponentTerms& terms) {
    alignas(64) float steps[kChunk];
    for (int step = 0; step < kChunk; ++step) {
        steps[step] = static_cast<float>(step);
        terms.from[step] = 0.0f;
    }
    for (int r = 0; r < chunk.count; ++r) {
        const Run run = chunk.runs[r];
        const float low = static_cast<float>(run.begin);
        for (int to = run.begin; to < run.end; ++to) {
            const float high = static_cast<float>(to);
            Vec total = zero();
            for (int from = run.begin / kLanes * kLanes; from < run.end; from += kLanes) {
                const int64_t i = static_cast<int64_t>(to) * kChunk + from;
                if (from > to) {
                    store(s.weights + i, zero());
                    continue;
                }
                const Vec step = load(steps + from), dt = load(decays.dt + from), x_dy = load(s.x_dy + i);
                const Vec decay = decay_between(decays, from, to);
                const Vec weight = decay * load(s.products + i);
                store(s.weights + i, keep_steps(weight, step, low, high));
                const Vec slope = keep_steps(decay * dt * x_dy, step, low, high);
                store(s.dproducts + i, load(s.dproducts + i) + slope);
                const Vec term = keep_steps(weight * dt * x_dy, step, low, high - 1.0f);
                total = total + term;
                store(terms.from + from, load(terms.from + from) + term);
            }
            terms.to[to] = sum(total);
        }
    }
}

// One head's gradients of dt, A and dt_bias, from the terms and x . du (in direct).
inline void finish_steps(const MambaSsdBackward& q, const Chunk& chunk, int64_t head, bool enters, bool leaves,
                         const Decays& decays, const ExponentTerms& terms, float* direct, float* sums) {
    const MambaSsd& p = q.forward;
    double exponent[kChunk];
    for (int r = 0; r < chunk.count; ++r) {
        const Run run = chunk.runs[r];
        double crossing = 0.0;
        for (int step = run.end - 1; step >= run.begin; --step) {
            crossing += static_cast<double>(terms.to[step]) - static_cast<double>(terms.from[step]);
            exponent[step] = step > run.begin ? crossing : 0.0;
        }
    }
    if (enters) {
        double later = 0.0;
        for (int step = chunk.first().end - 1; step >= 0; --step) {
            later += static_cast<double>(terms.entered[step]);
            exponent[step] += later + terms.carried;
        }
    }
    if (leaves) {
        double earlier = 0.0;
        for (int step = chunk.last().begin; step < chunk.last().end; ++step) {
            exponent[step] += earlier;
            earlier += static_cast<double>(terms.left[step]);
        }
    }
    double dA = 0.0, dbias = 0.0;
    for (int step = 0; step < chunk.steps; ++step) {
        dA += exponent[step] * static_cast<double>(decays.dt[step]);
        const double ddt = static_cast<double>(direct[step]) + exponent[step] * static_cast<double>(decays.A);
        direct[step] = static_cast<float>(ddt) * decays.slope[step];
        dbias += static_cast<double>(direct[step]);
    }
    sums[0] = static_cast<float>(dA);
    sums[1] = static_cast<float>(dbias);
    const int64_t offset = chunk.row * q.ddt_batch_stride + chunk.start * q.ddt_len_stride + head * q.ddt_head_stride;
    for (int step = 0; step < chunk.steps; step += kLanes) {
        store_lanes(p.dt_dtype, q.ddt, offset + step * q.ddt_len_stride, q.ddt_len_stride, block_lanes(chunk.steps - step),
                    load(direct + step));
    }
}

// One head of a chunk: dx, ddt, its sums, and its parts of dB, dC and the gradient of C . B.
inline void chunk_head(const MambaSsdBackward& q, const SsdBackwardSpace& space, int64_t batch, int64_t index, int64_t head,
                       const Chunk& chunk, bool enters, bool leaves, const BackwardScratch& s) {
    const MambaSsd& p = q.forward;
    const int64_t width = ssd_pitch(p.headdim), dstate = ssd_pitch(p.dstate);
    Decays decays;
    ExponentTerms terms;
    find_decays(p, chunk, head, decays);
    load_x(p, chunk, head, s.x);
    load_dy(q, chunk, head, s.dy);
    load_columns(p.dtype, p.x, x_offset(p, chunk, head), p.x_len_stride, p.headdim, chunk.steps, s.x_columns);
    const Product x_dy = {s.dy, width, 1, s.x_columns, kChunk, s.x_dy, 0.0f, s.x_dy, kChunk};
    product_to_lower(x_dy, chunk.steps, p.headdim);

    // the leaving state
    terms.carried = 0.0;
    fill_zero(s.du, chunk.steps * width);
    if (leaves) {
        const Run run = chunk.last();
        const float* gradient = chunk_gradient(p, space, batch, head, index);
        float* du = s.du + run.begin * width;
        const Product from_gradient = {s.B + run.begin * dstate, dstate, 1, gradient, width, du, 0.0f, du, width};
        product(from_gradient, run.end - run.begin, p.headdim, p.dstate);
        scale_rows(s.du, decays.leaving, run.begin, run.end, p.headdim, s.du);
        for (int step = run.begin; step < run.end; ++step) {
            terms.left[step] = decays.dt[step] * dot_row(s.x + step * width, s.du + step * width, p.headdim);
        }
        scale_rows(s.x, decays.dt, run.begin, run.end, p.headdim, s.scaled);
        scale_rows(s.scaled, decays.leaving, run.begin, run.end, p.headdim, s.scaled);
        load_transposed(gradient, width, p.dstate, p.headdim, s.gradient);
        float* dB = s.dB + run.begin * dstate;
        const Product to_dB = {s.scaled + run.begin * width, width, 1, s.gradient, dstate, dB, 1.0f, dB, dstate};
        product(to_dB, run.end - run.begin, p.dstate, p.headdim);
    }
    // the entering state
    if (enters) {
        const Run run = chunk.first();
        const float* state = chunk_state(p, space, batch, head, index);
        scale_rows(s.dy, decays.entering, run.begin, run.end, p.headdim, s.scaled);
        const Product from_state = {s.scaled, width, 1, state, dstate, s.entered, 0.0f, s.entered, dstate};
        product(from_state, run.end, p.dstate, p.headdim);
        for (int step = 0; step < run.end; ++step) {
            terms.entered[step] = dot_row(s.entered + step * dstate, s.C + step * dstate, p.dstate);
        }
        for (int64_t i = 0; i < run.end * dstate; i += kLanes) {
            store(s.dC + i, load(s.dC + i) + load(s.entered + i));
        }
        for (int64_t row = 0; row < p.headdim && leaves && chunk.count == 1; ++row) {
            terms.carried += static_cast<double>(dot_row(state + row * dstate, s.gradient + row * dstate, p.dstate));
        }
        terms.carried *= static_cast<double>(decays.carried);
    }
    // within the chunk
    chunk_weights(chunk, decays, s, terms);
    for (int r = 0; r < chunk.count; ++r) {
        const Run run = chunk.runs[r];
        float* du = s.du + run.begin * width;
        const Product within = {s.weights + static_cast<int64_t>(run.begin) * (kChunk + 1),
                                1,
                                kChunk,
                                s.dy + run.begin * width,
                                width,
                                du,
                                1.0f,
                                du,
                                width};
        product_upper(within, run.end - run.begin, p.headdim);
    }
    // dx = dt du + D dy, in place of du
    float* sums = space.sums + ((batch * space.chunks + index) * p.nheads + head) * (2 + p.headdim);
    for (int64_t column = 0; column < p.headdim && p.D != nullptr; column += kLanes) {
        const int64_t offset = head * p.D_head_stride + column * p.D_dim_stride;
        store(s.D + column, load_lanes(MAMBA_FLOAT32, p.D, offset, p.D_dim_stride, block_lanes(p.headdim - column)));
        store(s.dD + column, zero());
    }
    alignas(64) float direct[kChunk] = {};
    for (int step = 0; step < chunk.steps; ++step) {
        direct[step] = dot_row(s.x + step * width, s.du + step * width, p.headdim);
        const Vec dt = set1(decays.dt[step]);
        for (int64_t column = 0; column < p.headdim; column += kLanes) {
            const int64_t i = step * width + column;
            Vec dx = load(s.du + i) * dt;
            if (p.D != nullptr) {
                const Vec dy = load(s.dy + i);
                dx = fma(load(s.D + column), dy, dx);
                store(s.dD + column, fma(load(s.x + i), dy, load(s.dD + column)));
            }
            store(s.du + i, dx);
        }
    }
    for (int64_t column = 0; column < p.headdim && p.D != nullptr; column += kLanes) {
        store_lanes(MAMBA_FLOAT32, sums, 2 + column, 1, block_lanes(p.headdim - column), load(s.dD + column));
    }
    const int64_t dx_offset = chunk.row * q.dx_batch_stride + chunk.start * q.dx_len_stride + head * q.dx_head_stride;
    store_rows(p.dtype, q.dx, dx_offset, q.dx_len_stride, p.headdim, chunk.steps, s.du);
    finish_steps(q, chunk, head, enters, leaves, decays, terms, direct, sums);
}

inline void backward_chunk(const MambaSsdBackward& q, const SsdBackwardSpace& space, int64_t batch, int64_t group,
                           int64_t index, float* scratch) {
    const MambaSsd& p = q.forward;
    const BackwardScratch s = carve_backward(p, scratch);
    const Sequence sequence = sequence_of(p, batch);
    const int64_t dstate = ssd_pitch(p.dstate), group_heads = p.nheads / p.ngroups, floats = kChunk * dstate;
    Chunk chunk;
    find_chunk(p, sequence, index, chunk);
    const bool enters = state_enters(q, index, chunk), leaves = gradient_leaves(q, sequence, space, index);
    load_rows(p.dtype, p.B, B_offset(p, chunk, group), p.B_len_stride, p.dstate, chunk.steps, s.B);
    load_columns(p.dtype, p.B, B_offset(p, chunk, group), p.B_len_stride, p.dstate, chunk.steps, s.B_columns);
    load_rows(p.dtype, p.C, C_offset(p, chunk, group), p.C_len_stride, p.dstate, chunk.steps, s.C);
    const Product products = {s.C, dstate, 1, s.B_columns, kChunk, s.products, 0.0f, s.products, kChunk};
    product_to_lower(products, chunk.steps, p.dstate);

    const int64_t end = space.first_head + space.heads, group_end = (group + 1) * group_heads;
    const int64_t first_head = space.first_head > group * group_heads ? space.first_head : group * group_heads;
    const int64_t last_head = end < group_end ? end : group_end;
    float* partial = space.partial + (group * space.chunks + index) * 2 * floats;
    if (first_head == group * group_heads) {
        fill_zero(s.dB, floats);
        fill_zero(s.dC, floats);
    } else {
        memcpy(s.dB, partial, static_cast<size_t>(floats) * sizeof(float));
        memcpy(s.dC, partial + floats, static_cast<size_t>(floats) * sizeof(float));
    }
    fill_zero(s.dproducts, kChunk * kChunk);
    for (int64_t head = first_head; head < last_head; ++head) {
        chunk_head(q, space, batch, index, head, chunk, enters, leaves, s);
    }
    for (int r = 0; r < chunk.count; ++r) {
        const Run run = chunk.runs[r];
        const float* dproducts = s.dproducts + static_cast<int64_t>(run.begin) * (kChunk + 1);
        float* dB = s.dB + run.begin * dstate;
        float* dC = s.dC + run.begin * dstate;
        const Product to_dB = {dproducts, 1, kChunk, s.C + run.begin * dstate, dstate, dB, 1.0f, dB, dstate};
        product_upper(to_dB, run.end - run.begin, p.dstate);
        const Product to_dC = {dproducts, kChunk, 1, s.B + run.begin * dstate, dstate, dC, 1.0f, dC, dstate};
        product_lower(to_dC, run.end - run.begin, p.dstate);
    }
    if (last_head < group_end) {
        memcpy(partial, s.dB, static_cast<size_t>(floats) * sizeof(float));
        memcpy(partial + floats, s.dC, static_cast<size_t>(floats) * sizeof(float));
        return;
    }
    const int64_t dB_offset = chunk.row * q.dB_batch_stride + chunk.start * q.dB_len_stride + group * q.dB_group_stride;
    store_rows(p.dtype, q.dB, dB_offset, q.dB_len_stride, p.dstate, chunk.steps, s.dB);
    const int64_t dC_offset = chunk.row * q.dC_batch_stride + chunk.start * q.dC_len_stride + group * q.dC_group_stride;
    store_rows(p.dtype, q.dC, dC_offset, q.dC_len_stride, p.dstate, chunk.steps, s.dC);
}

}  // namespace MAMBA_ISA
}  // namespace mamba
