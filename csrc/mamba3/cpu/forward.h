// The forward scan of Mamba-3: some heads of a group, chunk after chunk. With h the state that enters a chunk and W(t, s) the
// decay from step s to t,
//     y_t = W(t) h q_t + sum_{s < t} W(t, s) scale_s (q_t . k_s) x_s + gamma_t (q_t . k_t) x_t
// and h leaves as W h + sum_s W(end, s) scale_s x_s k_s^T. A step has R rows of q, k and x.
#pragma once

#include "mamba3/cpu/output.h"

namespace mamba {
namespace MAMBA_ISA {
namespace mamba3 {

struct ForwardScratch {
    float *states, *angles;        // by head: (N, P), (2, turned)
    float *raw_q, *raw_k, *q, *k;  // (rows, N)
    float* k_columns;              // (N, rows)
    float *v, *z;                  // (steps, P)
    float *x, *scaled, *y;         // (rows, P)
    float *products, *weights;     // (rows, rows)
    TurnTiles turns;
    float* before;  // for add_step_before
    Parameters parameters;
    int64_t floats;
};

inline ForwardScratch carve_forward(const MambaMamba3& p, const Mamba3Layout& layout, float* base) {
    Carver carver = {base, 0};
    ForwardScratch s;
    s.states = carver.take(kMamba3Heads * layout.width * layout.pitch_P);
    s.angles = carver.take(kMamba3Heads * 2 * layout.turned);
    s.raw_q = carver.take(kRows * layout.width);
    s.raw_k = carver.take(kRows * layout.width);
    s.q = carver.take(kRows * layout.width);
    s.k = carver.take(kRows * layout.width);
    s.k_columns = carver.take(layout.width * kRows);
    s.v = carver.take(kRows * layout.pitch_P);
    s.z = carver.take(kRows * layout.pitch_P);
    s.x = carver.take(kRows * layout.pitch_P);
    s.scaled = carver.take(kRows * layout.pitch_P);
    s.y = carver.take(kRows * layout.pitch_P);
    s.products = carver.take(kRows * kRows);
    s.weights = carver.take(kRows * kRows);
    s.turns.tanh = nullptr;
    s.turns.cos = carver.take(kRows * layout.turned);
    s.turns.sin = carver.take(kRows * layout.turned);
    s.before = carver.take(p.rank * (layout.width + layout.pitch_P) + layout.pitch_P);
    s.parameters = carve_parameters(p, layout, carver);
    s.floats = carver.used;
    return s;
}

inline int64_t forward_scratch(const MambaMamba3& p, const Mamba3Layout& layout) {
    return carve_forward(p, layout, nullptr).floats;
}

// earlier, own or zero where these lanes' rows, from `from` on, are before, in or behind the step that begins with row `begin`.
MAMBA_INLINE Vec by_step(int from, int begin, int rank, Vec earlier, Vec own) {
    if (from + kLanes <= begin) {
        return earlier;
    }
    alignas(64) float lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
        lanes[lane] = static_cast<float>(lane);
    }
    const Vec row = load(lanes);
    const Vec rest = select_greater(set1(static_cast<float>(begin + rank - from) - 0.5f), row, own, zero());
    return select_greater(set1(static_cast<float>(begin - from) - 0.5f), row, earlier, rest);
}

// weights(to, from) = what of from's x is in to's y, and zero in later steps of the block.
inline void find_weights(const Chunk& chunk, int rank, const Steps& steps, const float* products, float* weights) {
    for (int to = 0; to < chunk.rows; ++to) {
        const int begin = to / rank * rank;
        const Vec own = set1(steps.gamma[to]);
        for (int from = 0; from < begin + rank; from += kLanes) {
            const int64_t i = static_cast<int64_t>(to) * kRows + from;
            const Vec value = load(products + i), decay = decay_between(steps, from, to);
            store(weights + i, by_step(from, begin, rank, value * decay * load(steps.scale + from), value * own));
        }
    }
}

// y = the scan's rows of a chunk, before D. state: what enters, (N, P); products and weights are
// found on the way; with y null nothing else.
inline void scan_rows(const Mamba3Layout& layout, const Chunk& chunk, int rank, int64_t headdim, const Steps& steps,
                      const float* state, const float* q, const float* k_columns, const float* x, float* products,
                      float* weights, float* y) {
    const int64_t width = layout.width, pitch = layout.pitch_P;
    const Product between = {q, width, 1, k_columns, kRows, products, 0.0f, products, kRows};
    product_to_steps(between, chunk.rows, rank, width);
    find_weights(chunk, rank, steps, products, weights);
    if (y == nullptr) {
        return;
    }
    const Product entered = {q, width, 1, state, pitch, y, 0.0f, y, pitch};
    product(entered, chunk.rows, headdim, width);
    scale_rows(y, steps.entering, 0, chunk.rows, headdim, y);
    const Product within = {weights, kRows, 1, x, pitch, y, 1.0f, y, pitch};
    product_of_steps(within, chunk.rows, rank, headdim);
}

// state = what leaves the chunk; scaled: x times what of it leaves.
inline void pass_state(const Mamba3Layout& layout, const Chunk& chunk, int64_t headdim, const Steps& steps, const float* k,
                       const float* x, float* scaled, const float* from, float* to) {
    scale_rows(x, steps.scale, 0, chunk.rows, headdim, scaled);
    scale_rows(scaled, steps.leaving, 0, chunk.rows, headdim, scaled);
    const int64_t pitch = layout.pitch_P;
    const Product added = {k, 1, layout.width, scaled, pitch, from, steps.carried, to, pitch};
    product(added, layout.width, headdim, chunk.rows);
}

inline void store_finals(const MambaMamba3& p, const Mamba3Layout& layout, const Run& run, const Chunk& chunk, int64_t head,
                         const ForwardScratch& s, const float* state, const float* angles) {
    const int64_t row = run.sequence * p.nheads + head, last = chunk.steps - 1;
    store_angles(p, layout, angles, p.final_angle + row * p.nangles);
    store_state(p, layout, p.final_ssm + row * p.headdim * p.dstate, state);
    store_matrix(layout, MAMBA_FLOAT32, p.final_k, (run.sequence * p.rank * p.nheads + head) * p.dstate, p.nheads * p.dstate,
                 static_cast<int>(p.rank), s.k + last * p.rank * layout.width, layout.width);
    store_rows(MAMBA_FLOAT32, p.final_v, row * p.headdim, p.headdim, p.headdim, 1, s.v + last * layout.pitch_P);
}

// A sequence of no steps hands on what it got.
inline void copy_finals(const MambaMamba3& p, int64_t sequence, int64_t head) {
    const int64_t row = sequence * p.nheads + head;
    const struct {
        const float* from;
        float* to;
        int64_t offset, floats;
    } parts[3] = {{p.angle_state, p.final_angle, row * p.nangles, p.nangles},
                  {p.ssm_state, p.final_ssm, row * p.headdim * p.dstate, p.headdim * p.dstate},
                  {p.v_state, p.final_v, row * p.headdim, p.headdim}};
    const bool given = p.ssm_state != nullptr;
    for (const auto& part : parts) {
        for (int64_t i = part.offset; i < part.offset + part.floats; ++i) {
            part.to[i] = given ? part.from[i] : 0.0f;
        }
    }
    for (int64_t r = 0; r < p.rank; ++r) {
        const int64_t offset = ((sequence * p.rank + r) * p.nheads + head) * p.dstate;
        for (int64_t i = offset; i < offset + p.dstate; ++i) {
            p.final_k[i] = given ? p.k_state[i] : 0.0f;
        }
    }
}

inline void forward_chunk(const MambaMamba3& p, const Mamba3Layout& layout, const Run& run, int64_t index, int64_t head,
                          ForwardScratch& s, float* state, float* angles) {
    const int64_t pitch = layout.pitch_P;
    const int rank = static_cast<int>(p.rank);
    const Chunk chunk = find_chunk(p, run, index);
    Steps steps;
    find_steps(p, chunk, head, steps);
    find_turns(p, layout, chunk, head, steps, angles, s.turns);
    load_parameters(p, layout, head, s.parameters);
    turn_rows(p, layout, chunk, s.raw_q, s.parameters.q_bias, s.turns, s.q);
    turn_rows(p, layout, chunk, s.raw_k, s.parameters.k_bias, s.turns, s.k);
    transpose_tile(s.k, layout.width, chunk.rows, layout.width, s.k_columns, kRows);
    load_v(p, chunk, head, s.v);
    project_rows(p, layout, s.v, s.parameters.mimo_v, chunk.steps, s.x);
    if (index == 0 && has_initial(p, run)) {
        add_step_before(p, layout, run, head, steps, s.parameters, s.before, state);
    }
    scan_rows(layout, chunk, rank, p.headdim, steps, state, s.q, s.k_columns, s.x, s.products, s.weights, s.y);
    if (p.z != nullptr) {
        load_rows(p.dtype, p.z, z_offset(p, chunk, head), p.z_len_stride, p.headdim, chunk.steps, s.z);
    }
    finish_rows(p, layout, s.parameters, chunk.steps, s.x, s.z, s.y);
    const int64_t out = chunk.row * p.out_batch_stride + chunk.start * p.out_len_stride + head * p.out_head_stride;
    const int64_t count = p.mimo_out != nullptr ? 1 : p.rank;
    for (int64_t r = 0; r < count; ++r) {
        for (int64_t column = 0; column < p.headdim; column += kLanes) {
            store_tile(p.dtype, p.out, out + r * p.out_rank_stride + column, 1, p.out_len_stride,
                       block_lanes(p.headdim - column), chunk.steps, s.y + r * pitch + column, static_cast<int>(count * pitch));
        }
    }
    const bool wanted = run.last && p.final_ssm != nullptr;
    if (!chunk.last || wanted) {
        pass_state(layout, chunk, p.headdim, steps, s.k, s.x, s.scaled, state, state);
    }
    if (chunk.last && wanted) {
        store_finals(p, layout, run, chunk, head, s, state, angles);
    }
}

inline void forward(const MambaMamba3& p, const Mamba3Layout& layout, int64_t sequence, int64_t first_head, int64_t heads,
                    float* scratch) {
    ForwardScratch s = carve_forward(p, layout, scratch);
    const int64_t state = layout.width * layout.pitch_P, group = first_head / (p.nheads / p.ngroups);
    fill_zero(s.raw_q, kRows * layout.width);
    fill_zero(s.raw_k, kRows * layout.width);
    Run run = first_run(p, sequence);
    do {
        fill_zero(s.states, heads * state);
        for (int64_t i = 0; i < heads; ++i) {
            const int64_t row = run.sequence * p.nheads + first_head + i;
            const bool given = has_initial(p, run);
            if (given) {
                load_state(p, layout, p.ssm_state + row * p.headdim * p.dstate, s.states + i * state);
            }
            load_angles(p, layout, given ? p.angle_state + row * p.nangles : nullptr, s.angles + i * 2 * layout.turned);
        }
        const int64_t chunks = ceil_div(run.length, chunk_steps(p));
        for (int64_t index = 0; index < chunks; ++index) {
            const Chunk chunk = find_chunk(p, run, index);
            load_q(p, layout, chunk, group, s.raw_q);
            load_k(p, layout, chunk, group, s.raw_k);
            for (int64_t i = 0; i < heads; ++i) {
                forward_chunk(p, layout, run, index, first_head + i, s, s.states + i * state, s.angles + i * 2 * layout.turned);
            }
        }
        for (int64_t i = 0; i < heads && run.length == 0 && run.last && p.final_ssm != nullptr; ++i) {
            copy_finals(p, run.sequence, first_head + i);
        }
    } while (next_run(p, run));
}

}  // namespace mamba3
}  // namespace MAMBA_ISA
}  // namespace mamba
