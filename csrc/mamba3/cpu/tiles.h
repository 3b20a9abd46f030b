// Where the steps of Mamba-3's scan lie, and the tiles that hold them: runs, chunks, matrices, states, parameters.
#pragma once

#include "common/cpu_rows.h"
#include "mamba3/cpu/kernels.h"

namespace mamba {
namespace MAMBA_ISA {
namespace mamba3 {

constexpr int kRows = kMamba3Rows;

// ---- where steps lie -------------------------------------------------------------------------------------------------

// Steps [begin, begin + length) of a row of the tensors that hand on their states: all of a sequence, or what seq_idx leaves
// together. first, last: of the sequence whose states are row `sequence` of the states.
struct Run {
    int64_t sequence, row, begin, length;
    bool first, last;
};

inline void end_run(const MambaMamba3& p, Run& run) {
    int64_t end = p.cu_seqlens != nullptr ? p.cu_seqlens[run.sequence + 1] : p.seqlen;
    run.last = true;
    for (int64_t step = run.begin + 1; step < end && p.seq_idx != nullptr; ++step) {
        const int32_t* seq_idx = p.seq_idx + run.row * p.seqlen + step;
        if (seq_idx[0] != seq_idx[-1]) {
            end = step;
            run.last = false;
        }
    }
    run.length = end - run.begin;
}

inline Run first_run(const MambaMamba3& p, int64_t sequence) {
    Run run = {sequence, p.cu_seqlens != nullptr ? 0 : sequence, p.cu_seqlens != nullptr ? p.cu_seqlens[sequence] : 0, 0, true,
               true};
    end_run(p, run);
    return run;
}

// Goes on to the sequence's next run; false if there is none.
inline bool next_run(const MambaMamba3& p, Run& run) {
    if (run.last) {
        return false;
    }
    run.begin += run.length;
    run.first = false;
    end_run(p, run);
    return true;
}

// Whether a state from outside enters the run.
inline bool has_initial(const MambaMamba3& p, const Run& run) {
    return run.first && p.ssm_state != nullptr;
}

struct Chunk {
    int64_t row, start;  // in the tensors
    int steps, rows;     // rows: steps times rank
    bool last;           // of its run
};

inline int64_t chunk_steps(const MambaMamba3& p) {
    return p.rank < kRows ? kRows / p.rank : 1;
}

inline Chunk find_chunk(const MambaMamba3& p, const Run& run, int64_t index) {
    const int64_t most = chunk_steps(p), done = index * most, left = run.length - done;
    Chunk chunk;
    chunk.row = run.row;
    chunk.start = run.begin + done;
    chunk.steps = static_cast<int>(left < most ? left : most);
    chunk.rows = chunk.steps * static_cast<int>(p.rank);
    chunk.last = left <= most;
    return chunk;
}

// ---- tiles -----------------------------------------------------------------------------------------------------------

// The entries of pairs of neighbours that rows of q, k or a bias begin with: first ones and second ones at once.
inline void load_pairs(const Mamba3Layout& layout, int32_t dtype, const void* data, int64_t offset, int64_t row_stride,
                       int rows, float* tile, int64_t pitch) {
    for (int64_t i = 0; i < layout.count[0]; i += kLanes) {
        const int64_t left = 2 * (layout.count[0] - i);
        for (int row = 0; row < rows; ++row) {
            const int64_t at = offset + row * row_stride + 2 * i;
            const Vec a = load_lanes(dtype, data, at, 1, block_lanes(left));
            const Vec b = left > kLanes ? load_lanes(dtype, data, at + kLanes, 1, block_lanes(left - kLanes)) : zero();
            Vec first, second;
            split_alternate(a, b, first, second);
            store(tile + row * pitch + layout.column[0] + i, first);
            store(tile + row * pitch + layout.column[1] + i, second);
        }
    }
}

inline void store_pairs(const Mamba3Layout& layout, int32_t dtype, void* data, int64_t offset, int64_t row_stride, int rows,
                        const float* tile, int64_t pitch) {
    for (int64_t i = 0; i < layout.count[0]; i += kLanes) {
        const int64_t left = 2 * (layout.count[0] - i);
        for (int row = 0; row < rows; ++row) {
            const int64_t at = offset + row * row_stride + 2 * i;
            const float* const from = tile + row * pitch + i;
            Vec a, b;
            join_alternate(load(from + layout.column[0]), load(from + layout.column[1]), a, b);
            store_lanes(dtype, data, at, 1, block_lanes(left), a);
            if (left > kLanes) {
                store_lanes(dtype, data, at + kLanes, 1, block_lanes(left - kLanes), b);
            }
        }
    }
}

// Rows of q or k, of a bias or of a state of k. Columns between the parts are left alone.
inline void load_matrix(const Mamba3Layout& layout, int32_t dtype, const void* data, int64_t offset, int64_t row_stride,
                        int rows, float* tile, int64_t pitch) {
    const bool pairs = layout.stride[0] == 2;
    if (pairs) {
        load_pairs(layout, dtype, data, offset, row_stride, rows, tile, pitch);
    }
    for (int part = pairs ? 2 : 0; part < 4; ++part) {
        load_rows(dtype, data, offset + layout.begin[part], row_stride, layout.count[part], rows, tile + layout.column[part],
                  pitch);
    }
}

inline void store_matrix(const Mamba3Layout& layout, int32_t dtype, void* data, int64_t offset, int64_t row_stride, int rows,
                         const float* tile, int64_t pitch) {
    const bool pairs = layout.stride[0] == 2;
    if (pairs) {
        store_pairs(layout, dtype, data, offset, row_stride, rows, tile, pitch);
    }
    for (int part = pairs ? 2 : 0; part < 4; ++part) {
        store_rows(dtype, data, offset + layout.begin[part], row_stride, layout.count[part], rows, tile + layout.column[part],
                   pitch);
    }
}

// The steps of a chunk, all rows of one group, before bias and turn.
inline void load_group(const MambaMamba3& p, const Mamba3Layout& layout, const Chunk& chunk, int64_t group, const void* data,
                       const int64_t* strides, float* tile) {
    const int64_t offset = chunk.row * strides[0] + chunk.start * strides[1] + group * strides[3];
    for (int64_t r = 0; r < p.rank; ++r) {
        load_matrix(layout, p.dtype, data, offset + r * strides[2], strides[1], chunk.steps, tile + r * layout.width,
                    p.rank * layout.width);
    }
}
inline void load_q(const MambaMamba3& p, const Mamba3Layout& layout, const Chunk& chunk, int64_t group, float* tile) {
    const int64_t strides[4] = {p.q_batch_stride, p.q_len_stride, p.q_rank_stride, p.q_group_stride};
    load_group(p, layout, chunk, group, p.q, strides, tile);
}
inline void load_k(const MambaMamba3& p, const Mamba3Layout& layout, const Chunk& chunk, int64_t group, float* tile) {
    const int64_t strides[4] = {p.k_batch_stride, p.k_len_stride, p.k_rank_stride, p.k_group_stride};
    load_group(p, layout, chunk, group, p.k, strides, tile);
}
inline void load_v(const MambaMamba3& p, const Chunk& chunk, int64_t head, float* tile) {
    load_rows(p.dtype, p.v, chunk.row * p.v_batch_stride + chunk.start * p.v_len_stride + head * p.v_head_stride,
              p.v_len_stride, p.headdim, chunk.steps, tile);
}

// A head's state, (P, N) in memory, as (N, P): vectors lie along headdim.
inline void load_state(const MambaMamba3& p, const Mamba3Layout& layout, const float* state, float* tile) {
    for (int64_t column = 0; column < p.headdim; column += kLanes) {
        for (int part = 0; part < 4; ++part) {
            load_tile(MAMBA_FLOAT32, state, column * p.dstate + layout.begin[part], p.dstate, layout.stride[part],
                      block_lanes(p.headdim - column), static_cast<int>(layout.count[part]),
                      tile + layout.column[part] * layout.pitch_P + column, static_cast<int>(layout.pitch_P));
        }
    }
}
inline void store_state(const MambaMamba3& p, const Mamba3Layout& layout, float* state, const float* tile) {
    for (int64_t column = 0; column < p.headdim; column += kLanes) {
        for (int part = 0; part < 4; ++part) {
            store_tile(MAMBA_FLOAT32, state, column * p.dstate + layout.begin[part], p.dstate, layout.stride[part],
                       block_lanes(p.headdim - column), static_cast<int>(layout.count[part]),
                       tile + layout.column[part] * layout.pitch_P + column, static_cast<int>(layout.pitch_P));
        }
    }
}

// to[column][row] = from[row][column]
inline void transpose_tile(const float* from, int64_t pitch, int64_t rows, int64_t columns, float* to, int64_t to_pitch) {
    for (int64_t row = 0; row < rows; row += kLanes) {
        load_tile(MAMBA_FLOAT32, from, row * pitch, pitch, 1, block_lanes(rows - row), static_cast<int>(columns), to + row,
                  static_cast<int>(to_pitch));
    }
}

inline float dot_row(const float* a, const float* b, int64_t columns) {
    Vec total = zero();
    for (int64_t column = 0; column < columns; column += kLanes) {
        total = fma(load(a + column), load(b + column), total);
    }
    return sum(total);
}

// rows[row] = v[row / rank] * weight[row % rank], or without weight v.
inline void project_rows(const MambaMamba3& p, const Mamba3Layout& layout, const float* v, const float* weight, int steps,
                         float* rows) {
    const int64_t pitch = layout.pitch_P;
    for (int step = 0; step < steps; ++step) {
        for (int64_t r = 0; r < p.rank; ++r) {
            for (int64_t column = 0; column < p.headdim; column += kLanes) {
                const Vec value = load(v + step * pitch + column);
                store(rows + (step * p.rank + r) * pitch + column,
                      weight != nullptr ? value * load(weight + r * pitch + column) : value);
            }
        }
    }
}

inline float first_lane(Vec values) {
    alignas(64) float lanes[kLanes];
    store(lanes, values);
    return *lanes;
}

// What one head's parameters are, in tiles; null where there is none.
struct Parameters {
    float *q_bias, *k_bias;             // (R, width)
    float *mimo_v, *mimo_z, *mimo_out;  // (R, P)
    float* norm_weight;                 // (P)
    float D;
};

inline Parameters carve_parameters(const MambaMamba3& p, const Mamba3Layout& layout, Carver& carver) {
    Parameters s;
    const int64_t matrix = p.rank * layout.width, rows = p.rank * layout.pitch_P;
    s.q_bias = carver.take(matrix);
    s.k_bias = carver.take(matrix);
    s.mimo_v = p.mimo_v != nullptr ? carver.take(rows) : nullptr;
    s.mimo_z = p.mimo_z != nullptr ? carver.take(rows) : nullptr;
    s.mimo_out = p.mimo_out != nullptr ? carver.take(rows) : nullptr;
    s.norm_weight = p.norm_weight != nullptr ? carver.take(layout.pitch_P) : nullptr;
    return s;
}

// dtype: of all but norm_weight, which is of weight_dtype; float32 but for a step.
inline void load_parameters(const MambaMamba3& p, const Mamba3Layout& layout, int64_t head, Parameters& s,
                            int32_t dtype = MAMBA_FLOAT32, int32_t weight_dtype = MAMBA_FLOAT32) {
    const int rank = static_cast<int>(p.rank);
    fill_zero(s.q_bias, p.rank * layout.width);
    fill_zero(s.k_bias, p.rank * layout.width);
    const int64_t bias = head * p.rank * p.dstate, rows = head * p.rank * p.headdim;
    load_matrix(layout, dtype, p.q_bias, bias, p.dstate, rank, s.q_bias, layout.width);
    load_matrix(layout, dtype, p.k_bias, bias, p.dstate, rank, s.k_bias, layout.width);
    if (s.mimo_v != nullptr) {
        load_rows(dtype, p.mimo_v, rows, p.headdim, p.headdim, rank, s.mimo_v);
    }
    if (s.mimo_z != nullptr) {
        load_rows(dtype, p.mimo_z, rows, p.headdim, p.headdim, rank, s.mimo_z);
    }
    if (s.mimo_out != nullptr) {
        load_rows(dtype, p.mimo_out, rows, p.headdim, p.headdim, rank, s.mimo_out);
    }
    if (s.norm_weight != nullptr) {
        load_rows(weight_dtype, p.norm_weight, head * p.headdim, p.headdim, p.headdim, 1, s.norm_weight);
    }
    s.D = p.D != nullptr ? first_lane(load_lanes(dtype, p.D, head, 1, 1)) : 0.0f;
}

}  // namespace mamba3
}  // namespace MAMBA_ISA
}  // namespace mamba
