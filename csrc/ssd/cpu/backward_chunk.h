// The second pass of the gradients of Mamba-2's scan, one chunk at a time; backward.h says what it starts from.
#pragma once

#include "ssd/cpu/backward.h"

namespace mamba {
namespace MAMBA_ISA {

// What a chunk's exponents get their gradients from, one value a step.
struct ExponentTerms {
    alignas(64) float within[kChunk];   // sum over pairs of steps of a run, one earlier, the other later or this one
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

// From C . B and x . dy: weights for dx, this head's part of the gradient of C . B, and the terms within runs. Each pair is
// added where it belongs: as differences of whole sums, strong decays would leave little but roundings.
inline void chunk_weights(const Chunk& chunk, const Decays& decays, const SsdBackwardScratch& s, ExponentTerms& terms) {
    alignas(64) float steps[kChunk];
    alignas(64) float since[kChunk] = {};  // of a step as the earlier one of a pair, with all later ones from `to` on
    for (int step = 0; step < kChunk; ++step) {
        steps[step] = static_cast<float>(step);
    }
    for (int r = 0; r < chunk.count; ++r) {
        const ChunkRun run = chunk.runs[r];
        const float low = static_cast<float>(run.begin);
        for (int to = run.end - 1; to >= run.begin; --to) {
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
                const Vec sums = load(since + from) + keep_steps(weight * dt * x_dy, step, low, high - 1.0f);
                store(since + from, sums);
                total = total + keep_steps(sums, step, low, high - 1.0f);
            }
            terms.within[to] = sum(total);
        }
    }
}

// One head's gradients of dt, A and dt_bias, from the terms and x . du (in direct).
inline void finish_steps(const MambaSsdBackward& q, const Chunk& chunk, int64_t head, bool enters, bool leaves,
                         const Decays& decays, const ExponentTerms& terms, float* direct, float* sums) {
    const MambaSsd& p = q.forward;
    double exponent[kChunk];
    for (int step = 0; step < chunk.steps; ++step) {
        exponent[step] = static_cast<double>(terms.within[step]);
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
    sums[0] = static_cast<float>(p.A_is_log != 0 ? dA * static_cast<double>(decays.A) : dA);  // -exp is its own derivative
    sums[1] = static_cast<float>(dbias);
    const int64_t offset = chunk.row * q.ddt_batch_stride + chunk.start * q.ddt_len_stride + head * q.ddt_head_stride;
    for (int step = 0; step < chunk.steps; step += kLanes) {
        store_lanes(p.dt_dtype, q.ddt, offset + step * q.ddt_len_stride, q.ddt_len_stride, block_lanes(chunk.steps - step),
                    load(direct + step));
    }
}

// One head of a chunk: dx, ddt, its sums, and its parts of dB, dC and the gradient of C . B.
inline void chunk_head(const MambaSsdBackward& q, const SsdBackwardSpace& space, int64_t batch, int64_t index, int64_t head,
                       const Chunk& chunk, bool enters, bool leaves, const SsdBackwardScratch& s) {
    const MambaSsd& p = q.forward;
    const int64_t width = row_pitch(p.headdim), dstate = row_pitch(p.dstate);
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
        const ChunkRun run = chunk.last();
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
        const ChunkRun run = chunk.first();
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
        const ChunkRun run = chunk.runs[r];
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
    const SsdBackwardScratch s = carve_backward(p, scratch);
    const Sequence sequence = sequence_of(p, batch);
    const int64_t dstate = row_pitch(p.dstate), group_heads = p.nheads / p.ngroups, floats = kChunk * dstate;
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
        const ChunkRun run = chunk.runs[r];
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
