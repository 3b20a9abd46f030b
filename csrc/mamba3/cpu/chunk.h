// What forward and backward of Mamba-3's scan share about a chunk: the weights of its steps, turned rows, products over steps.
#pragma once

#include "common/cpu_product.h"
#include "mamba3/cpu/tiles.h"
#include "mamba3/cpu/turns.h"

namespace mamba {
namespace MAMBA_ISA {
namespace mamba3 {

// ---- weights of steps ------------------------------------------------------------------------------------------------

// A step's decay counts as at least that in base 2, as in the CUDA kernels: zero in float32 over any number of steps, and no
// sum grows so large that it forgets what the steps behind it add.
constexpr double kLeastDecay = -32768.0;

// Exponents are sums of adt log2(e) from the chunk's first step on, each as a float and the rest that it loses: their
// differences between near steps must be exact where the sums have grown large.
struct Steps {
    // by step, and of the step behind the chunk, if the run has one
    alignas(64) float dt[kRows + 16];
    alignas(64) float lambda[kRows + 16];
    alignas(64) float rest[kRows + 16];  // 1 - lambda
    // by row
    alignas(64) float high[kRows];
    alignas(64) float low[kRows];
    alignas(64) float gamma[kRows];     // of a step's input in its own output
    alignas(64) float scale[kRows];     // in later ones
    alignas(64) float entering[kRows];  // decay of the state that enters the chunk, up to and with this step
    alignas(64) float leaving[kRows];   // decay from this step to the chunk's end
    float carried;                      // decay over the whole chunk
};

inline void load_steps(int32_t dtype, const void* data, int64_t offset, int64_t len_stride, int steps, float* values) {
    for (int step = 0; step < steps; step += kLanes) {
        store(values + step, load_lanes(dtype, data, offset + step * len_stride, len_stride, block_lanes(steps - step)));
    }
}

inline void find_steps(const MambaMamba3& p, const Chunk& chunk, int64_t head, Steps& s) {
    alignas(64) float adt[kRows + 16];
    const int steps = chunk.steps, known = chunk.last ? steps : steps + 1, rank = static_cast<int>(p.rank);
    load_steps(p.adt_dtype, p.adt, chunk.row * p.adt_batch_stride + chunk.start * p.adt_len_stride + head * p.adt_head_stride,
               p.adt_len_stride, steps, adt);
    load_steps(p.dt_dtype, p.dt, chunk.row * p.dt_batch_stride + chunk.start * p.dt_len_stride + head * p.dt_head_stride,
               p.dt_len_stride, known, s.dt);
    load_steps(p.trap_dtype, p.trap,
               chunk.row * p.trap_batch_stride + chunk.start * p.trap_len_stride + head * p.trap_head_stride, p.trap_len_stride,
               known, s.lambda);
    for (int step = 0; step < known; step += kLanes) {
        const Vec trap = load(s.lambda + step);
        store(s.lambda + step, sigmoid(trap));
        store(s.rest + step, sigmoid(zero() - trap));
    }
    double sum = 0.0;
    for (int step = 0; step < steps; ++step) {
        const double decay = static_cast<double>(adt[step]) * 1.4426950408889634;
        sum += decay < kLeastDecay ? kLeastDecay : decay;
        const float high = static_cast<float>(sum), low = static_cast<float>(sum - static_cast<double>(high));
        const float gamma = s.lambda[step] * s.dt[step];
        const float scale = step + 1 < known ? gamma + s.rest[step + 1] * s.dt[step + 1] : gamma;
        for (int row = step * rank; row < (step + 1) * rank; ++row) {
            s.high[row] = high;
            s.low[row] = low;
            s.gamma[row] = gamma;
            s.scale[row] = scale;
        }
    }
    for (int row = chunk.rows; row < kRows; ++row) {
        s.high[row] = s.high[chunk.rows - 1];
        s.low[row] = s.low[chunk.rows - 1];
        s.gamma[row] = s.scale[row] = 0.0f;
    }
    const Vec last_high = set1(s.high[chunk.rows - 1]), last_low = set1(s.low[chunk.rows - 1]);
    for (int row = 0; row < chunk.rows; row += kLanes) {
        const Vec high = load(s.high + row), low = load(s.low + row);
        store(s.entering + row, exp2(high + low));
        store(s.leaving + row, exp2((last_high - high) + (last_low - low)));
    }
    s.carried = s.entering[chunk.rows - 1];
}

// Decay of the inputs of the kLanes rows from `from` on, up to row `to`; of no meaning behind it.
MAMBA_INLINE Vec decay_between(const Steps& s, int from, int to) {
    return exp2((set1(s.high[to]) - load(s.high + from)) + (set1(s.low[to]) - load(s.low + from)));
}

// ---- turns -----------------------------------------------------------------------------------------------------------

// Angles of a head before a step, in turns: (2, turned), the floats and what they lack.
inline void load_angles(const MambaMamba3& p, const Mamba3Layout& layout, const float* state, float* angles) {
    for (int64_t i = 0; i < layout.turned; i += kLanes) {
        const bool given = state != nullptr && i < p.nangles;
        const Vec radians = given ? load_lanes(MAMBA_FLOAT32, state, i, 1, block_lanes(p.nangles - i)) : zero();
        const Turns turns = turns_of(radians);
        store(angles + i, turns.high);
        store(angles + layout.turned + i, turns.low);
    }
}
inline void store_angles(const MambaMamba3& p, const Mamba3Layout& layout, const float* angles, float* state) {
    for (int64_t i = 0; i < p.nangles; i += kLanes) {
        const Turns turns = {load(angles + i), load(angles + layout.turned + i)};
        store_lanes(MAMBA_FLOAT32, state, i, 1, block_lanes(p.nangles - i), radians(turns));
    }
}

struct TurnTiles {
    float *tanh, *cos, *sin;  // (steps, turned); tanh may be null
};

// Goes on through the chunk's steps.
inline void find_turns(const MambaMamba3& p, const Mamba3Layout& layout, const Chunk& chunk, int64_t head, const Steps& s,
                       float* angles, const TurnTiles& tiles) {
    const int64_t offset = chunk.row * p.angle_batch_stride + chunk.start * p.angle_len_stride +
                           (p.angles_of_heads != 0 ? head * p.angle_head_stride : 0);
    for (int64_t i = 0; i < layout.turned; i += kLanes) {
        Turns turns = {load(angles + i), load(angles + layout.turned + i)};
        const int lanes = i < p.nangles ? block_lanes(p.nangles - i) : 0;
        for (int step = 0; step < chunk.steps; ++step) {
            const int64_t at = step * layout.turned + i;
            const Vec angle =
                lanes > 0 ? load_lanes(p.angle_dtype, p.angles, offset + step * p.angle_len_stride + i, 1, lanes) : zero();
            const Vec speed = tanh(angle);
            Vec sin, cos;
            turns = add_turns(turns, speed * set1(0.5f * s.dt[step]));
            sin_cos(turns, sin, cos);
            store(tiles.cos + at, cos);
            store(tiles.sin + at, sin);
            if (tiles.tanh != nullptr) {
                store(tiles.tanh + at, speed);
            }
        }
        store(angles + i, turns.high);
        store(angles + layout.turned + i, turns.low);
    }
}

// rows = turn(raw + bias)
inline void turn_rows(const MambaMamba3& p, const Mamba3Layout& layout, const Chunk& chunk, const float* raw, const float* bias,
                      const TurnTiles& tiles, float* rows) {
    for (int row = 0; row < chunk.rows; ++row) {
        const int step = row / static_cast<int>(p.rank);
        const float* from = raw + row * layout.width;
        const float* add = bias + row % p.rank * layout.width;
        float* to = rows + row * layout.width;
        for (int64_t i = 0; i < layout.turned; i += kLanes) {
            const Vec cos = load(tiles.cos + step * layout.turned + i), sin = load(tiles.sin + step * layout.turned + i);
            const Vec a = load(from + i) + load(add + i);
            const Vec b = load(from + layout.turned + i) + load(add + layout.turned + i);
            store(to + i, a * cos - b * sin);
            store(to + layout.turned + i, a * sin + b * cos);
        }
        for (int64_t i = 2 * layout.turned; i < layout.width; i += kLanes) {
            store(to + i, load(from + i) + load(add + i));
        }
    }
}

// ---- products over the steps of a chunk ------------------------------------------------------------------------------

// out(row, column) for the columns of a row's own and earlier steps, and some behind.
inline void product_to_steps(const Product& p, int rows, int rank, int64_t depth) {
    for (int row = 0; row < rows; row += kLanes) {
        Product part = p;
        part.left += row * p.left_row;
        part.out += row * p.out_pitch;
        const int count = rows - row < kLanes ? rows - row : kLanes, columns = round_up(row + count, rank);
        product(part, count, columns, depth);
    }
}

// left is a lower triangle of steps: a row takes the depths of its own step and earlier ones, and no others.
inline void product_of_steps(const Product& p, int rows, int rank, int64_t columns) {
    if (rank == 1) {
        product_lower(p, rows, columns);
        return;
    }
    for (int row = 0; row < rows; row += rank) {
        Product part = p;
        part.left += row * p.left_row;
        part.in += row * p.out_pitch;
        part.out += row * p.out_pitch;
        product(part, rank, columns, row + rank);
    }
}

// left is an upper triangle of steps: a row takes the depths of its own step and later ones. With rank 1 there are zeros below
// in the blocks on the diagonal.
inline void product_of_later_steps(const Product& p, int rows, int rank, int64_t columns) {
    if (rank == 1) {
        product_upper(p, rows, columns);
        return;
    }
    for (int row = 0; row < rows; row += rank) {
        Product part = p;
        part.left += row * (p.left_row + p.left_depth);
        part.right += row * p.right_pitch;
        part.in += row * p.out_pitch;
        part.out += row * p.out_pitch;
        product(part, rank, columns, rows - row);
    }
}

// h += (1 - lambda) dt sum_r (mimo_v_r v) k_r^T of the step before the run; scratch: (R, width) and 2 (R, P).
inline void add_step_before(const MambaMamba3& p, const Mamba3Layout& layout, const Run& run, int64_t head, const Steps& s,
                            const Parameters& parameters, float* scratch, float* state) {
    float *k = scratch, *v = k + p.rank * layout.width, *rows = v + p.rank * layout.pitch_P;
    fill_zero(k, p.rank * layout.width);
    load_matrix(layout, MAMBA_FLOAT32, p.k_state, (run.sequence * p.rank * p.nheads + head) * p.dstate, p.nheads * p.dstate,
                static_cast<int>(p.rank), k, layout.width);
    load_rows(MAMBA_FLOAT32, p.v_state, (run.sequence * p.nheads + head) * p.headdim, p.headdim, p.headdim, 1, v);
    const float nu = s.rest[0] * s.dt[0];
    for (int64_t column = 0; column < p.headdim; column += kLanes) {
        store(v + column, load(v + column) * set1(nu));
    }
    project_rows(p, layout, v, parameters.mimo_v, 1, rows);
    const Product added = {k, 1, layout.width, rows, layout.pitch_P, state, 1.0f, state, layout.pitch_P};
    product(added, layout.width, p.headdim, p.rank);
}

}  // namespace mamba3
}  // namespace MAMBA_ISA
}  // namespace mamba
