// The gradients of Mamba-3's scan, one head of a run after the other: forward through its chunks for the states that enter
// them, then back, with the gradient of the state that leaves.
//
// forward.h has the formulas. A decay of a step is in every term that crosses it, and the angle of a step in all later ones:
// their gradients are sums over what comes before and behind. Weight scale_t has a part of step t + 1, so that a step's
// gradients of dt and trap wait for the gradient of the scale before it.
#pragma once

#include "mamba3/cpu/forward.h"

namespace mamba {
namespace MAMBA_ISA {
namespace mamba3 {

struct BackwardScratch {
    float *states, *starts;                  // by chunk: the state that enters, (N, P), and the angles, (2, turned)
    float *angles, *dangles;                 // (2, turned): of pass one, and the gradient of the angles that leave a chunk
    float *gradient, *transposed;            // (N, P): gradient of the state that leaves; (P, N)
    float *raw_q, *raw_k, *q, *k, *dq, *dk;  // (rows, N)
    float* columns;                          // (N or P, rows)
    float *v, *z, *dz;                       // (steps, P)
    float *x, *scaled, *y, *dout, *dy, *dx;  // (rows, P)
    float *products, *weights, *slopes;      // (rows, rows)
    float* dturns;                           // (steps, turned)
    TurnTiles turns;
    float* before;
    Parameters parameters;
    int64_t floats;
};

inline BackwardScratch carve_backward(const MambaMamba3& p, const Mamba3Layout& layout, float* base) {
    Carver carver = {base, 0};
    BackwardScratch s;
    const int64_t chunks = ceil_div(p.seqlen, chunk_steps(p)), rows_N = kRows * layout.width, rows_P = kRows * layout.pitch_P;
    float** const by_N[] = {&s.raw_q, &s.raw_k, &s.q, &s.k, &s.dq, &s.dk};
    float** const by_P[] = {&s.v, &s.z, &s.dz, &s.x, &s.scaled, &s.y, &s.dout, &s.dy, &s.dx};
    float** const by_rows[] = {&s.products, &s.weights, &s.slopes};
    float** const by_turn[] = {&s.dturns, &s.turns.tanh, &s.turns.cos, &s.turns.sin};
    s.states = carver.take(chunks * layout.width * layout.pitch_P);
    s.starts = carver.take(chunks * 2 * layout.turned);
    s.angles = carver.take(2 * layout.turned);
    s.dangles = carver.take(2 * layout.turned);
    s.gradient = carver.take(layout.width * layout.pitch_P);
    s.transposed = carver.take(layout.width * layout.pitch_P);
    for (float** tile : by_N) {
        *tile = carver.take(rows_N);
    }
    for (float** tile : by_P) {
        *tile = carver.take(rows_P);
    }
    for (float** tile : by_rows) {
        *tile = carver.take(kRows * kRows);
    }
    for (float** tile : by_turn) {
        *tile = carver.take(kRows * layout.turned);
    }
    s.columns = carver.take(kRows * (layout.width > layout.pitch_P ? layout.width : layout.pitch_P));
    s.before = carver.take(2 * p.rank * (layout.width + layout.pitch_P) + layout.pitch_P);
    s.parameters = carve_parameters(p, layout, carver);
    s.floats = carver.used;
    return s;
}

inline int64_t backward_scratch(const MambaMamba3& p, const Mamba3Layout& layout) {
    return carve_backward(p, layout, nullptr).floats;
}

inline void add_rows(const float* from, int64_t floats, float* to) {
    for (int64_t i = 0; i < floats; i += kLanes) {
        store(to + i, load(to + i) + load(from + i));
    }
}

// One element of a contiguous gradient.
inline void store_one(int32_t dtype, void* data, int64_t index, double value) {
    alignas(64) float values[kLanes] = {static_cast<float>(value)};
    store_lanes(dtype, data, index, 1, 1, load(values));
}

// What the gradients of a chunk's steps are made of. By row, but for the last two.
struct Terms {
    alignas(64) float to[kRows];      // of the decays behind it: terms that end in this row
    alignas(64) float dscale[kRows];  // within the chunk: terms that begin in it, without its scale
    alignas(64) float dgamma[kRows];
    alignas(64) float entered[kRows];  // of the entering state
    alignas(64) float left[kRows];     // to the leaving state, without the row's scale
    double carried;                    // of the entering to the leaving state
    double dt[kRows];                  // gradients of dt through the angles, by step
};

// The step that waits for the scale before it.
struct Pending {
    double dscales, dt;  // dscale + dgamma, and the gradient of dt through the angles
};

struct Backward {
    const MambaMamba3Backward* params;
    const Mamba3Layout* layout;
    const Mamba3Space* space;
    int64_t group, block, head;
    bool first_of_block;
    ParameterSums sums;
    BackwardScratch tiles;
};

// q, k, x of a chunk, from the angles before it, which go on to those behind it.
inline void load_chunk(Backward& b, const Chunk& chunk, const Steps& steps, float* angles, bool with_q) {
    const MambaMamba3& p = b.params->forward;
    const Mamba3Layout& layout = *b.layout;
    BackwardScratch& s = b.tiles;
    find_turns(p, layout, chunk, b.head, steps, angles, s.turns);
    if (with_q) {
        load_q(p, layout, chunk, b.group, s.raw_q);
        turn_rows(p, layout, chunk, s.raw_q, s.parameters.q_bias, s.turns, s.q);
    }
    load_k(p, layout, chunk, b.group, s.raw_k);
    turn_rows(p, layout, chunk, s.raw_k, s.parameters.k_bias, s.turns, s.k);
    load_v(p, chunk, b.head, s.v);
    project_rows(p, layout, s.v, s.parameters.mimo_v, chunk.steps, s.x);
}

inline void find_states(Backward& b, const Run& run, int64_t chunks) {
    const MambaMamba3& p = b.params->forward;
    const Mamba3Layout& layout = *b.layout;
    BackwardScratch& s = b.tiles;
    const int64_t state = layout.width * layout.pitch_P, angles = 2 * layout.turned, row = run.sequence * p.nheads + b.head;
    fill_zero(s.states, state);
    load_angles(p, layout, has_initial(p, run) ? p.angle_state + row * p.nangles : nullptr, s.angles);
    if (has_initial(p, run)) {
        load_state(p, layout, p.ssm_state + row * p.headdim * p.dstate, s.states);
    }
    for (int64_t index = 0; index < chunks; ++index) {
        const Chunk chunk = find_chunk(p, run, index);
        Steps steps;
        find_steps(p, chunk, b.head, steps);
        memcpy(s.starts + index * angles, s.angles, static_cast<size_t>(angles) * sizeof(float));
        if (index == 0 && has_initial(p, run)) {
            add_step_before(p, layout, run, b.head, steps, s.parameters, s.before, s.states);
        }
        if (!chunk.last) {
            load_chunk(b, chunk, steps, s.angles, false);
            pass_state(layout, chunk, p.headdim, steps, s.k, s.x, s.scaled, s.states + index * state,
                       s.states + (index + 1) * state);
        }
    }
}

// Gradients of the products q . k (slopes), and those of weights and decays within the chunk. slopes: x . dy.
inline void find_slopes(const Chunk& chunk, int rank, const Steps& steps, const BackwardScratch& s, Terms& terms) {
    for (int row = 0; row < kRows; ++row) {
        terms.dscale[row] = 0.0f;
    }
    for (int to = 0; to < chunk.rows; ++to) {
        const int begin = to / rank * rank;
        const Vec gamma = set1(steps.gamma[to]);
        Vec total = zero(), dgamma = zero();
        for (int from = 0; from < begin + rank; from += kLanes) {
            const int64_t i = static_cast<int64_t>(to) * kRows + from;
            const Vec x_dy = load(s.slopes + i), scale = load(steps.scale + from), decay = decay_between(steps, from, to);
            const Vec term = x_dy * load(s.products + i);
            const Vec earlier = by_step(from, begin, rank, term * decay, zero());
            store(s.slopes + i, by_step(from, begin, rank, x_dy * decay * scale, x_dy * gamma));
            store(terms.dscale + from, load(terms.dscale + from) + earlier);
            total = fma(earlier, scale, total);
            dgamma = dgamma + by_step(from, begin, rank, zero(), term);
        }
        terms.to[to] = sum(total);
        terms.dgamma[to] = sum(dgamma);
    }
}

// Gradients of dt and trap of a step whose own and earlier scale have theirs.
inline void store_step(const Backward& b, int64_t row, int64_t step, const Steps& steps, int at, const Pending& own,
                       double dscale_before) {
    const MambaMamba3Backward& q = *b.params;
    const double lambda = static_cast<double>(steps.lambda[at]), rest = static_cast<double>(steps.rest[at]);
    const int64_t all = row * q.forward.seqlen + step, index = all * q.forward.nheads + b.head;
    store_one(q.forward.dt_dtype, q.ddt, index, lambda * own.dscales + rest * dscale_before + own.dt);
    store_one(q.forward.trap_dtype, q.dtrap, all * q.dtrap_step_stride + b.head,
              lambda * rest * static_cast<double>(steps.dt[at]) * (own.dscales - dscale_before));
}

// adt, dt and trap of a chunk's steps but the first, which waits, and of the step behind the chunk, which has waited.
inline void finish_steps(const Backward& b, const Chunk& chunk, const Steps& steps, const Terms& terms, Pending& pending) {
    const MambaMamba3Backward& q = *b.params;
    const int rank = static_cast<int>(q.forward.rank);
    double decay[kRows], dscale[kRows], dgamma[kRows], later = 0.0, earlier = 0.0;
    for (int step = chunk.steps - 1; step >= 0; --step) {
        dscale[step] = dgamma[step] = 0.0;
        double begun = 0.0;
        for (int row = step * rank; row < (step + 1) * rank; ++row) {
            later += static_cast<double>(terms.to[row]) + static_cast<double>(terms.entered[row]);
            begun += static_cast<double>(terms.dscale[row]) * static_cast<double>(steps.scale[row]);
            dscale[step] += static_cast<double>(terms.dscale[row]) + static_cast<double>(terms.left[row]);
            dgamma[step] += static_cast<double>(terms.dgamma[row]);
        }
        later -= begun;
        decay[step] = later + terms.carried;
    }
    for (int step = 0; step < chunk.steps; ++step) {
        const int64_t index = (chunk.row * q.forward.seqlen + chunk.start + step) * q.forward.nheads + b.head;
        store_one(q.forward.adt_dtype, q.dadt, index, decay[step] + earlier);
        for (int row = step * rank; row < (step + 1) * rank; ++row) {
            earlier += static_cast<double>(terms.left[row]) * static_cast<double>(steps.scale[row]);
        }
        const Pending own = {dscale[step] + dgamma[step], terms.dt[step]};
        if (step > 0) {
            store_step(b, chunk.row, chunk.start + step, steps, step, own, dscale[step - 1]);
        }
    }
    if (!chunk.last) {
        store_step(b, chunk.row, chunk.start + chunk.steps, steps, chunk.steps, pending, dscale[chunk.steps - 1]);
    }
    pending = {dscale[0] + dgamma[0], terms.dt[0]};
}

// Gradients of angles, and of dt through them, from those of q and k, which are turned back and added to the block's.
inline void finish_turns(Backward& b, const Chunk& chunk, const Steps& steps, Terms& terms) {
    const MambaMamba3Backward& q = *b.params;
    const MambaMamba3& p = q.forward;
    const Mamba3Layout& layout = *b.layout;
    const Mamba3Space& space = *b.space;
    BackwardScratch& s = b.tiles;
    const int64_t width = layout.width, turned = layout.turned, all = p.batch * p.seqlen,
                  first = chunk.row * p.seqlen + chunk.start;
    const int rank = static_cast<int>(p.rank);
    fill_zero(s.dturns, chunk.steps * turned);
    for (int matrix = 0; matrix < 2; ++matrix) {
        const float* tile = matrix == 0 ? s.q : s.k;
        float* gradient = matrix == 0 ? s.dq : s.dk;
        float* bias = matrix == 0 ? b.sums.q_bias : b.sums.k_bias;
        float* total =
            space.matrices + (((matrix * p.ngroups + b.group) * space.blocks + b.block) * all + first) * rank * width;
        for (int row = 0; row < chunk.rows; ++row) {
            const int step = row / rank;
            for (int64_t i = 0; i < turned; i += kLanes) {
                const int64_t at = step * turned + i, one = row * width + i, other = one + turned;
                const Vec cos = load(s.turns.cos + at), sin = load(s.turns.sin + at);
                const Vec da = load(gradient + one), db = load(gradient + other);
                store(s.dturns + at, load(s.dturns + at) + (load(tile + one) * db - load(tile + other) * da));
                store(gradient + one, da * cos + db * sin);
                store(gradient + other, db * cos - da * sin);
            }
            add_rows(gradient + row * width, width, bias + row % rank * width);
        }
        if (b.first_of_block) {
            memcpy(total, gradient, static_cast<size_t>(chunk.rows * width) * sizeof(float));
        } else {
            add_rows(gradient, chunk.rows * width, total);
        }
    }
    for (int step = 0; step < chunk.steps; ++step) {
        terms.dt[step] = 0.0;
    }
    for (int64_t i = 0; i < turned; i += kLanes) {
        Vec behind = zero();
        const Vec high = load(s.dangles + i), low = load(s.dangles + turned + i);
        for (int step = chunk.steps - 1; step >= 0; --step) {
            const Vec speed = load(s.turns.tanh + step * turned + i);
            behind = behind + load(s.dturns + step * turned + i);
            const Vec total = set1(kPi) * (high + (low + behind));
            terms.dt[step] += static_cast<double>(sum(speed * total));
            store(s.dturns + step * turned + i, (set1(1.0f) - speed * speed) * set1(steps.dt[step]) * total);
        }
        const Vec sum_high = high + behind, part = sum_high - high;
        store(s.dangles + i, sum_high);
        store(s.dangles + turned + i, low + ((high - (sum_high - part)) + (behind - part)));
    }
    if (p.angles_of_heads != 0) {
        for (int64_t i = 0; i < p.nangles; i += kLanes) {
            store_tile(p.angle_dtype, q.dangles, first * q.dangle_step_stride + b.head * p.nangles + i, 1, q.dangle_step_stride,
                       block_lanes(p.nangles - i), chunk.steps, s.dturns + i, static_cast<int>(turned));
        }
    } else {
        float* total = space.angles + ((b.group * space.blocks + b.block) * all + first) * turned;
        if (b.first_of_block) {
            memcpy(total, s.dturns, static_cast<size_t>(chunk.steps * turned) * sizeof(float));
        } else {
            add_rows(s.dturns, chunk.steps * turned, total);
        }
    }
}

}  // namespace mamba3
}  // namespace MAMBA_ISA
}  // namespace mamba
