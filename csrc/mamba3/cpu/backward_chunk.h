// The gradients of one chunk of a head of Mamba-3's scan, and what goes over chunks, runs and heads; see backward.h.
#pragma once

#include "mamba3/cpu/backward.h"

namespace mamba {
namespace MAMBA_ISA {
namespace mamba3 {

inline void load_dout(const MambaMamba3Backward& q, const Mamba3Layout& layout, const Chunk& chunk, int64_t head, float* tile) {
    const MambaMamba3& p = q.forward;
    const int64_t offset = chunk.row * q.dout_batch_stride + chunk.start * q.dout_len_stride + head * q.dout_head_stride;
    const int64_t count = p.mimo_out != nullptr ? 1 : p.rank;
    for (int64_t r = 0; r < count; ++r) {
        for (int64_t column = 0; column < p.headdim; column += kLanes) {
            load_tile(p.dtype, q.dout, offset + r * q.dout_rank_stride + column, 1, q.dout_len_stride,
                      block_lanes(p.headdim - column), chunk.steps, tile + r * layout.pitch_P + column,
                      static_cast<int>(count * layout.pitch_P));
        }
    }
}

// A tile (steps, P) of a contiguous (B, L, H, P).
inline void store_steps(const MambaMamba3& p, const Chunk& chunk, int64_t head, const float* tile, void* data,
                        int64_t step_stride) {
    const int64_t offset = (chunk.row * p.seqlen + chunk.start) * step_stride + head * p.headdim;
    store_rows(p.dtype, data, offset, step_stride, p.headdim, chunk.steps, tile);
}

// dv of rows dx, in v's place; mimo_v's gradient.
inline void unproject_rows(const Backward& b, int steps, const float* dx, float* v) {
    const MambaMamba3& p = b.params->forward;
    const int64_t pitch = b.layout->pitch_P;
    const float* weight = b.tiles.parameters.mimo_v;
    for (int step = 0; step < steps; ++step) {
        for (int64_t column = 0; column < p.headdim; column += kLanes) {
            const Vec value = load(v + step * pitch + column);
            Vec total = zero();
            for (int64_t r = 0; r < p.rank; ++r) {
                const Vec d = load(dx + (step * p.rank + r) * pitch + column);
                if (weight != nullptr) {
                    float* sum_v = b.sums.mimo_v + r * pitch + column;
                    store(sum_v, fma(d, value, load(sum_v)));
                    total = fma(d, load(weight + r * pitch + column), total);
                } else {
                    total = total + d;
                }
            }
            store(v + step * pitch + column, total);
        }
    }
}

inline void backward_chunk(Backward& b, const Run& run, int64_t index, Pending& pending) {
    const MambaMamba3Backward& q = *b.params;
    const MambaMamba3& p = q.forward;
    const Mamba3Layout& layout = *b.layout;
    BackwardScratch& s = b.tiles;
    const int64_t width = layout.width, pitch = layout.pitch_P;
    const int rank = static_cast<int>(p.rank);
    const Chunk chunk = find_chunk(p, run, index);
    const bool ends = chunk.last && run.last;  // final states are this chunk's
    const bool enters = index > 0 || has_initial(p, run), leaves = !chunk.last || (ends && q.dfinal_ssm != nullptr);
    const float* state = s.states + index * width * pitch;
    Steps steps;
    Terms terms;
    find_steps(p, chunk, b.head, steps);
    load_chunk(b, chunk, steps, s.starts + index * 2 * layout.turned, true);

    // the rows of the output again, and their gradients
    transpose_tile(s.k, width, chunk.rows, width, s.columns, kRows);
    scan_rows(layout, chunk, rank, p.headdim, steps, state, s.q, s.columns, s.x, s.products, s.weights,
              needs_rows(p) ? s.y : nullptr);
    if (p.z != nullptr) {
        load_rows(p.dtype, p.z, z_offset(p, chunk, b.head), p.z_len_stride, p.headdim, chunk.steps, s.z);
    }
    load_dout(q, layout, chunk, b.head, s.dout);
    finish_rows_backward(p, layout, s.parameters, chunk.steps, s.x, s.z, s.y, s.dout, s.dy, s.dz, b.sums);
    if (p.z != nullptr) {
        store_steps(p, chunk, b.head, s.dz, q.dz, q.dz_step_stride);
    }

    // the leaving state
    fill_zero(s.dx, chunk.rows * pitch);
    fill_zero(s.dk, chunk.rows * width);
    fill_zero(s.dq, chunk.rows * width);
    for (int row = 0; row < kRows; ++row) {
        terms.left[row] = terms.entered[row] = 0.0f;
    }
    terms.carried = 0.0;
    if (leaves) {
        const Product to_dx = {s.k, width, 1, s.gradient, pitch, s.dx, 0.0f, s.dx, pitch};
        product(to_dx, chunk.rows, p.headdim, width);
        scale_rows(s.dx, steps.leaving, 0, chunk.rows, p.headdim, s.dx);
        for (int row = 0; row < chunk.rows; ++row) {
            terms.left[row] = dot_row(s.x + row * pitch, s.dx + row * pitch, p.headdim);
        }
        scale_rows(s.dx, steps.scale, 0, chunk.rows, p.headdim, s.dx);
        scale_rows(s.x, steps.scale, 0, chunk.rows, p.headdim, s.scaled);
        scale_rows(s.scaled, steps.leaving, 0, chunk.rows, p.headdim, s.scaled);
        transpose_tile(s.gradient, pitch, width, p.headdim, s.transposed, width);
        const Product to_dk = {s.scaled, pitch, 1, s.transposed, width, s.dk, 0.0f, s.dk, width};
        product(to_dk, chunk.rows, width, p.headdim);
    }
    // the entering state
    scale_rows(s.dy, steps.entering, 0, chunk.rows, p.headdim, s.scaled);
    if (enters) {
        transpose_tile(state, pitch, width, p.headdim, s.transposed, width);
        const Product to_dq = {s.scaled, pitch, 1, s.transposed, width, s.dq, 0.0f, s.dq, width};
        product(to_dq, chunk.rows, width, p.headdim);
        for (int row = 0; row < chunk.rows; ++row) {
            terms.entered[row] = dot_row(s.q + row * width, s.dq + row * width, width);
        }
        for (int64_t row = 0; row < width && leaves; ++row) {
            terms.carried += static_cast<double>(dot_row(state + row * pitch, s.gradient + row * pitch, p.headdim));
        }
        terms.carried *= static_cast<double>(steps.carried);
    }
    // within the chunk
    transpose_tile(s.x, pitch, chunk.rows, p.headdim, s.columns, kRows);
    const Product x_dy = {s.dy, pitch, 1, s.columns, kRows, s.slopes, 0.0f, s.slopes, kRows};
    product_to_steps(x_dy, chunk.rows, rank, p.headdim);
    find_slopes(chunk, rank, steps, s, terms);
    const Product to_dx = {s.weights, 1, kRows, s.dy, pitch, s.dx, 1.0f, s.dx, pitch};
    product_of_later_steps(to_dx, chunk.rows, rank, p.headdim);
    const Product to_dq = {s.slopes, kRows, 1, s.k, width, s.dq, 1.0f, s.dq, width};
    product_of_steps(to_dq, chunk.rows, rank, width);
    const Product to_dk = {s.slopes, 1, kRows, s.q, width, s.dk, 1.0f, s.dk, width};
    product_of_later_steps(to_dk, chunk.rows, rank, width);
    for (int64_t i = 0; i < chunk.rows * pitch && p.D != nullptr; i += kLanes) {
        store(s.dx + i, fma(set1(s.parameters.D), load(s.dy + i), load(s.dx + i)));
    }
    // the state's gradient before the chunk
    if (enters) {
        const Product before = {s.q, 1, width, s.scaled, pitch, s.gradient, leaves ? steps.carried : 0.0f, s.gradient, pitch};
        product(before, width, p.headdim, chunk.rows);
    }

    const int last = chunk.steps - 1;
    if (ends && q.dfinal_k != nullptr) {
        fill_zero(s.before, rank * width);
        load_matrix(layout, MAMBA_FLOAT32, q.dfinal_k, (run.sequence * p.rank * p.nheads + b.head) * p.dstate,
                    p.nheads * p.dstate, rank, s.before, width);
        add_rows(s.before, rank * width, s.dk + last * rank * width);
    }
    finish_turns(b, chunk, steps, terms);
    finish_steps(b, chunk, steps, terms, pending);
    unproject_rows(b, chunk.steps, s.dx, s.v);
    if (ends && q.dfinal_v != nullptr) {
        load_rows(MAMBA_FLOAT32, q.dfinal_v, (run.sequence * p.nheads + b.head) * p.headdim, p.headdim, p.headdim, 1, s.before);
        add_rows(s.before, round_up(p.headdim, kLanes), s.v + last * pitch);
    }
    store_steps(p, chunk, b.head, s.v, q.dv, q.dv_step_stride);
}

// Gradients of the states before a run's first step, whose h has had the step before it added; finishes the first step.
inline void backward_initial(Backward& b, const Run& run, const Pending& pending) {
    const MambaMamba3Backward& q = *b.params;
    const MambaMamba3& p = q.forward;
    const Mamba3Layout& layout = *b.layout;
    BackwardScratch& s = b.tiles;
    const int64_t width = layout.width, pitch = layout.pitch_P, row = run.sequence * p.nheads + b.head;
    const Chunk chunk = find_chunk(p, run, 0);
    Steps steps;
    find_steps(p, chunk, b.head, steps);
    double dnu = 0.0;
    if (has_initial(p, run)) {
        const int64_t k_state = (run.sequence * p.rank * p.nheads + b.head) * p.dstate;
        float *k = s.before, *dk = k + p.rank * width, *rows = dk + p.rank * width, *drows = rows + p.rank * pitch;
        float* v = drows + p.rank * pitch;
        const float nu = steps.rest[0] * steps.dt[0];
        fill_zero(k, p.rank * width);
        load_matrix(layout, MAMBA_FLOAT32, p.k_state, k_state, p.nheads * p.dstate, static_cast<int>(p.rank), k, width);
        load_rows(MAMBA_FLOAT32, p.v_state, row * p.headdim, p.headdim, p.headdim, 1, v);
        project_rows(p, layout, v, s.parameters.mimo_v, 1, rows);
        fill_zero(drows, p.rank * pitch);
        for (int64_t r = 0; r < p.rank; ++r) {
            for (int64_t n = 0; n < width; ++n) {
                const float along = dot_row(s.gradient + n * pitch, rows + r * pitch, p.headdim);
                const float k_n = k[r * width + n];
                dnu += static_cast<double>(along) * static_cast<double>(k_n);
                dk[r * width + n] = nu * along;
                for (int64_t column = 0; column < p.headdim; column += kLanes) {
                    float* to = drows + r * pitch + column;
                    store(to, fma(set1(nu * k_n), load(s.gradient + n * pitch + column), load(to)));
                }
            }
        }
        unproject_rows(b, 1, drows, v);
        store_matrix(layout, MAMBA_FLOAT32, q.dk_state, k_state, p.nheads * p.dstate, static_cast<int>(p.rank), dk, width);
        store_rows(MAMBA_FLOAT32, q.dv_state, row * p.headdim, p.headdim, p.headdim, 1, v);
        store_state(p, layout, q.dssm_state + row * p.headdim * p.dstate, s.gradient);
        for (int64_t i = 0; i < p.nangles; i += kLanes) {
            store_lanes(MAMBA_FLOAT32, q.dangle_state, row * p.nangles + i, 1, block_lanes(p.nangles - i),
                        load(s.dangles + i) + load(s.dangles + layout.turned + i));
        }
    }
    store_step(b, chunk.row, chunk.start, steps, 0, pending, dnu);
}

// The gradients of a sequence without steps are those of what it hands on.
inline void pass_gradients(const MambaMamba3Backward& q, int64_t sequence, int64_t head) {
    const MambaMamba3& p = q.forward;
    const int64_t row = sequence * p.nheads + head;
    for (int64_t i = row * p.nangles; i < (row + 1) * p.nangles; ++i) {
        q.dangle_state[i] = q.dfinal_angle != nullptr ? q.dfinal_angle[i] : 0.0f;
    }
    for (int64_t i = row * p.headdim * p.dstate; i < (row + 1) * p.headdim * p.dstate; ++i) {
        q.dssm_state[i] = q.dfinal_ssm != nullptr ? q.dfinal_ssm[i] : 0.0f;
    }
    for (int64_t i = row * p.headdim; i < (row + 1) * p.headdim; ++i) {
        q.dv_state[i] = q.dfinal_v != nullptr ? q.dfinal_v[i] : 0.0f;
    }
    for (int64_t r = 0; r < p.rank; ++r) {
        const int64_t offset = ((sequence * p.rank + r) * p.nheads + head) * p.dstate;
        for (int64_t i = offset; i < offset + p.dstate; ++i) {
            q.dk_state[i] = q.dfinal_k != nullptr ? q.dfinal_k[i] : 0.0f;
        }
    }
}

inline void backward_run(Backward& b, const Run& run) {
    const MambaMamba3Backward& q = *b.params;
    const MambaMamba3& p = q.forward;
    const Mamba3Layout& layout = *b.layout;
    BackwardScratch& s = b.tiles;
    const int64_t row = run.sequence * p.nheads + b.head, chunks = ceil_div(run.length, chunk_steps(p));
    if (chunks == 0) {
        if (p.ssm_state != nullptr) {
            pass_gradients(q, run.sequence, b.head);
        }
        return;
    }
    find_states(b, run, chunks);
    fill_zero(s.gradient, layout.width * layout.pitch_P);
    fill_zero(s.dangles, 2 * layout.turned);
    if (run.last && q.dfinal_ssm != nullptr) {
        load_state(p, layout, q.dfinal_ssm + row * p.headdim * p.dstate, s.gradient);
    }
    for (int64_t i = 0; i < p.nangles && run.last && q.dfinal_angle != nullptr; i += kLanes) {
        store(s.dangles + i, load_lanes(MAMBA_FLOAT32, q.dfinal_angle, row * p.nangles + i, 1, block_lanes(p.nangles - i)));
    }
    Pending pending = {0.0, 0.0};
    for (int64_t index = chunks - 1; index >= 0; --index) {
        backward_chunk(b, run, index, pending);
    }
    backward_initial(b, run, pending);
}

inline void backward(const MambaMamba3Backward& q, const Mamba3Layout& layout, const Mamba3Space& space, int64_t slot,
                     int64_t group, int64_t block, float* scratch) {
    const MambaMamba3& p = q.forward;
    const int64_t group_heads = p.nheads / p.ngroups, first = block * space.block_heads;
    const int64_t end = first + space.block_heads < group_heads ? first + space.block_heads : group_heads;
    Backward b;
    b.params = &q;
    b.layout = &layout;
    b.space = &space;
    b.group = group;
    b.block = block;
    b.tiles = carve_backward(p, layout, scratch);
    fill_zero(b.tiles.raw_q, kRows * layout.width);
    fill_zero(b.tiles.raw_k, kRows * layout.width);
    for (int64_t i = first; i < end; ++i) {
        b.head = group * group_heads + i;
        b.first_of_block = i == first;
        float* sums = space.sums + (slot * p.nheads + b.head) * space.sum_floats;
        fill_zero(sums, space.sum_floats);
        Carver carver = {sums, 0};
        b.sums = carve_sums(p, layout, carver);
        load_parameters(p, layout, b.head, b.tiles.parameters);
        for (int64_t sequence = slot * p.sequences / space.slots; sequence < (slot + 1) * p.sequences / space.slots;
             ++sequence) {
            Run run = first_run(p, sequence);
            do {
                backward_run(b, run);
            } while (next_run(p, run));
        }
    }
}

// ---- sums over blocks and slots --------------------------------------------------------------------------------------

inline void finish(const MambaMamba3Backward& q, const Mamba3Layout& layout, const Mamba3Space& space, int64_t group,
                   int64_t row, int64_t begin, int64_t end, float* tile) {
    const MambaMamba3& p = q.forward;
    const int64_t all = p.batch * p.seqlen, first = row * p.seqlen + begin, count = end - begin;
    const bool angles = group < 0;
    const int64_t pitch = angles ? layout.turned : p.rank * layout.width;
    const int64_t blocks = angles ? p.ngroups * space.blocks : space.blocks;
    for (int matrix = 0; matrix < (angles ? 1 : 2); ++matrix) {
        const float* parts = angles ? space.angles : space.matrices + (matrix * p.ngroups + group) * space.blocks * all * pitch;
        memcpy(tile, parts + first * pitch, static_cast<size_t>(count * pitch) * sizeof(float));
        for (int64_t block = 1; block < blocks; ++block) {
            add_rows(parts + (block * all + first) * pitch, count * pitch, tile);
        }
        if (angles) {
            for (int64_t i = 0; i < p.nangles; i += kLanes) {
                store_tile(p.angle_dtype, q.dangles, first * q.dangle_step_stride + i, 1, q.dangle_step_stride,
                           block_lanes(p.nangles - i), static_cast<int>(count), tile + i, static_cast<int>(pitch));
            }
        } else {
            store_matrix(layout, p.dtype, matrix == 0 ? q.dq : q.dk, (first * p.rank * p.ngroups + group) * p.dstate,
                         p.ngroups * p.dstate, static_cast<int>(count * p.rank), tile, layout.width);
        }
    }
}

inline void finish_head(const MambaMamba3Backward& q, const Mamba3Layout& layout, const Mamba3Space& space, int64_t head,
                        float* tile) {
    const MambaMamba3& p = q.forward;
    const int rank = static_cast<int>(p.rank);
    for (int64_t i = 0; i < space.sum_floats; ++i) {
        double total = 0.0;
        for (int64_t slot = 0; slot < space.slots; ++slot) {
            total += static_cast<double>(space.sums[(slot * p.nheads + head) * space.sum_floats + i]);
        }
        tile[i] = static_cast<float>(total);
    }
    Carver carver = {tile, 0};
    const ParameterSums sums = carve_sums(p, layout, carver);
    const int64_t bias = head * p.rank * p.dstate, rows = head * p.rank * p.headdim;
    store_matrix(layout, MAMBA_FLOAT32, q.dq_bias, bias, p.dstate, rank, sums.q_bias, layout.width);
    store_matrix(layout, MAMBA_FLOAT32, q.dk_bias, bias, p.dstate, rank, sums.k_bias, layout.width);
    if (p.mimo_v != nullptr) {
        store_rows(MAMBA_FLOAT32, q.dmimo_v, rows, p.headdim, p.headdim, rank, sums.mimo_v);
    }
    if (p.mimo_z != nullptr) {
        store_rows(MAMBA_FLOAT32, q.dmimo_z, rows, p.headdim, p.headdim, rank, sums.mimo_z);
    }
    if (p.mimo_out != nullptr) {
        store_rows(MAMBA_FLOAT32, q.dmimo_out, rows, p.headdim, p.headdim, rank, sums.mimo_out);
    }
    if (p.norm_weight != nullptr) {
        store_rows(MAMBA_FLOAT32, q.dnorm_weight, head * p.headdim, p.headdim, p.headdim, 1, sums.norm_weight);
    }
    if (p.D != nullptr) {
        q.dD[head] = *sums.D;
    }
}

}  // namespace mamba3
}  // namespace MAMBA_ISA
}  // namespace mamba
