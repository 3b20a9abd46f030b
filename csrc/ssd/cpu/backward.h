// The gradients of Mamba-2's scan. The first pass finds, for each head, the state that enters each chunk (from the front) and
// the gradient of the state that leaves it (from the back). With these, the second pass takes each chunk by itself.
//
// With W(t, s) the decay from step s to t within a run, h0 and g1 that state and that gradient, and in and out the decays
// from the chunk's begin and to its end, the gradients are those of
//     y_t = in_t h0 C_t + sum_{s <= t} W(t, s) dt_s (C_t . B_s) x_s,   h1 = in_end h0 + sum_s out_s dt_s x_s B_s^T.
// An exponent of a step r is in every decay that crosses it: its gradient is the sum of the terms from before r to r or later.
#pragma once

#include "common/cpu_product.h"
#include "ssd/cpu/chunk.h"

namespace mamba {
namespace MAMBA_ISA {

inline int64_t state_floats(const MambaSsd& p) {
    return p.headdim * row_pitch(p.dstate);
}
inline int64_t gradient_floats(const MambaSsd& p) {
    return p.dstate * row_pitch(p.headdim);
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

struct SsdBackwardScratch {
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

inline SsdBackwardScratch carve_backward(const MambaSsd& p, float* base) {
    Carver carver = {base, 0};
    SsdBackwardScratch s;
    const int64_t width = row_pitch(p.headdim), dstate = row_pitch(p.dstate);
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
    const SsdBackwardScratch s = carve_backward(p, scratch);
    const Sequence sequence = sequence_of(p, batch);
    const int64_t width = row_pitch(p.headdim), dstate = row_pitch(p.dstate), group = head / (p.nheads / p.ngroups);
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
        const ChunkRun run = chunk.last();
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
    const SsdBackwardScratch s = carve_backward(p, scratch);
    const Sequence sequence = sequence_of(p, batch);
    const int64_t width = row_pitch(p.headdim), dstate = row_pitch(p.dstate), group = head / (p.nheads / p.ngroups);
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
        const ChunkRun run = chunk.first();
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

}  // namespace MAMBA_ISA
}  // namespace mamba
