// The forward scan of Mamba-2 over one segment: some heads of a group, chunk after chunk.
#pragma once

#include "common/cpu_product.h"
#include "ssd/cpu/chunk.h"

namespace mamba {
namespace MAMBA_ISA {

struct SsdForwardScratch {
    float* states;             // (heads, N, columns): transposed, so that vectors lie along headdim
    float *B, *B_columns, *C;  // (steps, N), (N, steps), (steps, N)
    float* products;           // (steps, steps): C . B
    float* weights;            // (steps, steps): what an input adds to a later output
    float *x, *inputs, *y;     // (steps, columns)
    float* D;                  // (columns)
    int64_t floats;
};

inline SsdForwardScratch carve_forward(const MambaSsd& p, int64_t heads, int64_t columns, float* base) {
    Carver carver = {base, 0};
    SsdForwardScratch s;
    const int64_t width = row_pitch(columns), dstate = row_pitch(p.dstate);
    s.states = carver.take(heads * p.dstate * width);
    s.B = carver.take(kChunk * dstate);
    s.B_columns = carver.take(p.dstate * kChunk);
    s.C = carver.take(kChunk * dstate);
    s.products = carver.take(kChunk * kChunk);
    s.weights = carver.take(kChunk * kChunk);
    s.x = carver.take(kChunk * width);
    s.inputs = carver.take(kChunk * width);
    s.y = carver.take(kChunk * width);
    s.D = carver.take(width);
    s.floats = carver.used;
    return s;
}

inline int64_t forward_scratch(const MambaSsd& p, int64_t heads, int64_t columns) {
    return carve_forward(p, heads, columns, nullptr).floats;
}

// weights[to][from] = C_to . B_from * decay * dt_from, for from <= to in one run.
inline void find_weights(const Chunk& chunk, const Decays& decays, const float* products, float* weights) {
    for (int r = 0; r < chunk.count; ++r) {
        const ChunkRun run = chunk.runs[r];
        for (int to = run.begin; to < run.end; ++to) {
            for (int from = run.begin / kLanes * kLanes; from <= to; from += kLanes) {
                const int64_t i = static_cast<int64_t>(to) * kChunk + from;
                store(weights + i, load(products + i) * decay_between(decays, from, to) * load(decays.dt + from));
            }
        }
    }
}

// Adds D x, gates with silu(z) and writes the outputs of one head.
inline void finish_outputs(const MambaSsd& p, const SsdSegment& segment, const Chunk& chunk, int64_t head,
                           const SsdForwardScratch& s) {
    const int64_t pitch = row_pitch(segment.columns);
    for (int64_t column = 0; column < segment.columns && p.D != nullptr; column += kLanes) {
        const int64_t offset = head * p.D_head_stride + (segment.column + column) * p.D_dim_stride;
        store(s.D + column, load_lanes(MAMBA_FLOAT32, p.D, offset, p.D_dim_stride, block_lanes(segment.columns - column)));
    }
    const int64_t z_offset = chunk.row * p.z_batch_stride + chunk.start * p.z_len_stride + head * p.z_head_stride;
    for (int step = 0; step < chunk.steps; ++step) {
        for (int64_t column = 0; column < segment.columns; column += kLanes) {
            const int64_t i = step * pitch + column;
            Vec y = load(s.y + i);
            if (p.D != nullptr) {
                y = fma(load(s.D + column), load(s.x + i), y);
            }
            if (p.z != nullptr) {
                const Vec z = load_lanes(p.dtype, p.z, z_offset + step * p.z_len_stride + segment.column + column, 1,
                                         block_lanes(segment.columns - column));
                y = y * (z * sigmoid(z));
            }
            store(s.y + i, y);
        }
    }
    const int64_t offset = chunk.row * p.out_batch_stride + chunk.start * p.out_len_stride + head * p.out_head_stride;
    store_rows(p.dtype, p.out, offset + segment.column, p.out_len_stride, segment.columns, chunk.steps, s.y);
}

// One head's outputs of one chunk. state: what enters the chunk, null for zero.
inline void chunk_outputs(const MambaSsd& p, const SsdSegment& segment, const Chunk& chunk, int64_t head, const Decays& decays,
                          const float* state, const SsdForwardScratch& s) {
    const int64_t width = row_pitch(segment.columns), dstate = row_pitch(p.dstate);
    int first = 0;  // steps before it have the entering state's part
    if (state != nullptr) {
        first = chunk.first().end;
        const Product entered = {s.C, dstate, 1, state, width, s.y, 0.0f, s.y, width};
        product(entered, first, segment.columns, p.dstate);
        scale_rows(s.y, decays.entering, 0, first, segment.columns, s.y);
    }
    fill_zero(s.y + first * width, (chunk.steps - first) * width);
    find_weights(chunk, decays, s.products, s.weights);
    for (int r = 0; r < chunk.count; ++r) {
        const ChunkRun run = chunk.runs[r];
        const float* weights = s.weights + static_cast<int64_t>(run.begin) * (kChunk + 1);
        float* y = s.y + run.begin * width;
        const Product within = {weights, kChunk, 1, s.x + run.begin * width, width, y, 1.0f, y, width};
        product_lower(within, run.end - run.begin, segment.columns);
    }
    finish_outputs(p, segment, chunk, head, s);
}

inline void forward_segment(const MambaSsd& p, const SsdSegment& segment, float* scratch) {
    const SsdForwardScratch s = carve_forward(p, segment.heads, segment.columns, scratch);
    const Sequence sequence = sequence_of(p, segment.batch);
    const int64_t width = row_pitch(segment.columns), dstate = row_pitch(p.dstate);
    const int64_t group = segment.head / (p.nheads / p.ngroups);
    const int64_t first_state = ((segment.batch * p.nheads + segment.head) * p.headdim + segment.column) * p.dstate;
    bool entered = p.initial_state != nullptr;  // states hold something
    for (int64_t i = 0; i < segment.heads && entered; ++i) {
        load_transposed(p.initial_state + first_state + i * p.headdim * p.dstate, p.dstate, segment.columns, p.dstate,
                        s.states + i * p.dstate * width);
    }
    const int64_t chunks = ceil_div(sequence.length, kChunk);
    for (int64_t index = 0; index < chunks; ++index) {
        Chunk chunk;
        find_chunk(p, sequence, index, chunk);
        const bool leaves = p.final_state != nullptr || index + 1 < chunks;  // somebody reads the states after the chunk
        if (leaves) {
            load_rows(p.dtype, p.B, B_offset(p, chunk, group), p.B_len_stride, p.dstate, chunk.steps, s.B);
        }
        if (p.out != nullptr) {
            load_rows(p.dtype, p.C, C_offset(p, chunk, group), p.C_len_stride, p.dstate, chunk.steps, s.C);
            load_columns(p.dtype, p.B, B_offset(p, chunk, group), p.B_len_stride, p.dstate, chunk.steps, s.B_columns);
            const Product products = {s.C, dstate, 1, s.B_columns, kChunk, s.products, 0.0f, s.products, kChunk};
            product_to_lower(products, chunk.steps, p.dstate);
        }
        const bool enters = entered && !chunk.restarts;
        for (int64_t i = 0; i < segment.heads; ++i) {
            const int64_t head = segment.head + i;
            float* state = s.states + i * p.dstate * width;
            Decays decays;
            find_decays(p, chunk, head, decays);
            load_rows(p.dtype, p.x, x_offset(p, chunk, head) + segment.column, p.x_len_stride, segment.columns, chunk.steps,
                      s.x);
            if (p.out != nullptr) {
                chunk_outputs(p, segment, chunk, head, decays, enters ? state : nullptr, s);
            }
            if (leaves) {
                const ChunkRun run = chunk.last();
                scale_rows(s.x, decays.dt, run.begin, run.end, segment.columns, s.inputs);
                scale_rows(s.inputs, decays.leaving, run.begin, run.end, segment.columns, s.inputs);
                const float carried = enters && chunk.count == 1 ? decays.carried : 0.0f;
                const Product added = {
                    s.B + run.begin * dstate, 1, dstate, s.inputs + run.begin * width, width, state, carried, state, width};
                product(added, p.dstate, segment.columns, run.end - run.begin);
            }
        }
        entered = true;
    }
    for (int64_t i = 0; i < segment.heads && p.final_state != nullptr; ++i) {
        float* final_state = p.final_state + first_state + i * p.headdim * p.dstate;
        if (entered) {
            store_transposed(final_state, p.dstate, segment.columns, p.dstate, s.states + i * p.dstate * width);
        } else {
            fill_zero(final_state, segment.columns * p.dstate);
        }
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
