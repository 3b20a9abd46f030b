// The second derivative of one segment: the forward scan and the gradients of backward.h over dual numbers, whose tangents are
// the derivatives in the given direction.
//
// With q_t the gradient that reaches h_{t-1} from step t on, x_t = dt_t u_t and a_t = exp(dt_t A), all of them dual:
//   h_t = a_t h_{t-1} + x_t B_t     out_t = sum over states of C_t h_t
//   g_t = C_t dout_t + q_{t+1}      q_t = a_t g_t      dA += dt_t q_t h_{t-1}
//   dC_t = sum over channels of dout_t h_t             dB_t = sum over channels of x_t g_t
// The first pass keeps the state before each tile, the second goes from the last tile to the first.
#pragma once

#include "selective_scan/cpu/backward.h"

namespace mamba {
namespace MAMBA_ISA {

struct Dual {
    Vec value, tangent;
};

MAMBA_INLINE Dual operator*(Dual a, Dual b) {
    return {a.value * b.value, fma(a.value, b.tangent, a.tangent * b.value)};
}
// The tangent of a * b + sum.
MAMBA_INLINE Vec tangent_fma(Dual a, Dual b, Vec sum) {
    return fma(a.value, b.tangent, fma(a.tangent, b.value, sum));
}
MAMBA_INLINE Dual fma(Dual a, Dual b, Dual c) {
    return {fma(a.value, b.value, c.value), tangent_fma(a, b, c.tangent)};
}

// Memory of values and of their tangents, alike. Both null: zeros.
struct DualPointer {
    float *value, *tangent;
    DualPointer operator+(int64_t floats) const {
        return value == nullptr ? *this : DualPointer{value + floats, tangent + floats};
    }
    Dual load_at(int64_t i) const { return {load(value + i), load(tangent + i)}; }
    Dual broadcast(int64_t i) const { return {set1(value[i]), set1(tangent[i])}; }
    void store_at(int64_t i, Dual of) const {
        store(value + i, of.value);
        store(tangent + i, of.tangent);
    }
};

// A block's tile, [step][lane].
struct DualTile {
    alignas(64) float value[kTile];
    alignas(64) float tangent[kTile];
    DualPointer from(int64_t floats) { return {value + floats, tangent + floats}; }
    void clear(int steps) {
        fill_zero(value, steps * kLanes);
        fill_zero(tangent, steps * kLanes);
    }
};

struct DoubleBackwardTiles {
    DualTile u, dt, dt_u, dout, out;
    DualTile ddt_u;  // gradient of dt * u: sum over states of g B
    DualTile ddt;    // sum over states of q h A; then the gradient of dt
    alignas(64) float h[2 * (kSteps + 1) * kBackwardStates * kLanes];
    alignas(64) float a[2 * kTile * kBackwardStates];
};

// Of neighbouring states; B, C, dB_sum and dC_sum start at a run's first step.
struct DualStatesAt {
    const float* rate;  // A * log2 e
    DualPointer A, start, B, C, state;
    float *dA, *dB, *dC;  // of tangents
    DualStatesAt after(int states) const {
        const int64_t floats = states * kLanes;
        return {rate + floats,  A + floats,  start + floats, B + states, C + states,
                state + floats, dA + floats, dB + floats,    dC + floats};
    }
};

// The decay of a step, which is written, and the state after it.
MAMBA_INLINE Dual dual_step(Dual dt, Dual dt_u, Vec rate, Dual A, Dual B, Dual h, Dual& decay) {
    const Vec a = exp2(dt.value * rate);
    decay = {a, a * tangent_fma(dt, A, zero())};
    return fma(decay, h, dt_u * B);
}

template <int kStates>
MAMBA_INLINE void dual_forward_states(const Run& run, DoubleBackwardTiles& t, const DualStatesAt& at, int pitch) {
    Dual A[kStates], h[kStates];
    for (int i = 0; i < kStates; ++i) {
        A[i] = at.A.load_at(i * kLanes);
        h[i] = at.state.load_at(i * kLanes);
    }
    const DualPointer dt = t.dt.from(run.first * kLanes), dt_u = t.dt_u.from(run.first * kLanes);
    for (int step = 0; step < run.end - run.first; ++step) {
        const Dual step_dt = dt.load_at(step * kLanes), step_dt_u = dt_u.load_at(step * kLanes);
        for (int i = 0; i < kStates; ++i) {
            Dual decay;
            const Dual B = at.B.broadcast(step * pitch + i);
            h[i] = dual_step(step_dt, step_dt_u, load(at.rate + i * kLanes), A[i], B, h[i], decay);
        }
    }
    for (int i = 0; i < kStates; ++i) {
        at.state.store_at(i * kLanes, h[i]);
    }
}

// at.state is q.
template <int kStates>
MAMBA_INLINE void dual_backward_states(const Run& run, DoubleBackwardTiles& t, const DualStatesAt& at, int pitch,
                                       int64_t dstate) {
    const int steps = run.end - run.first, skip = run.first * kLanes;
    const DualPointer dt = t.dt.from(skip), dt_u = t.dt_u.from(skip), dout = t.dout.from(skip), out = t.out.from(skip);
    const DualPointer ddt_u = t.ddt_u.from(skip), ddt = t.ddt.from(skip);
    const DualPointer states = {t.h, t.h + (kSteps + 1) * kBackwardStates * kLanes};
    const DualPointer decays = {t.a, t.a + kTile * kBackwardStates};
    Dual A[kStates], h[kStates], q[kStates];
    Vec dA[kStates];
    for (int i = 0; i < kStates; ++i) {
        A[i] = at.A.load_at(i * kLanes);
        h[i] = at.start.value ? at.start.load_at(i * kLanes) : Dual{zero(), zero()};
        states.store_at(i * kLanes, h[i]);
    }
    for (int step = 0; step < steps; ++step) {
        const Dual step_dt = dt.load_at(step * kLanes), step_dt_u = dt_u.load_at(step * kLanes);
        Dual step_out = out.load_at(step * kLanes);
        for (int i = 0; i < kStates; ++i) {
            Dual decay;
            const Dual B = at.B.broadcast(step * pitch + i);
            h[i] = dual_step(step_dt, step_dt_u, load(at.rate + i * kLanes), A[i], B, h[i], decay);
            step_out = fma(at.C.broadcast(step * pitch + i), h[i], step_out);
            decays.store_at((step * kStates + i) * kLanes, decay);
            states.store_at(((step + 1) * kStates + i) * kLanes, h[i]);
        }
        out.store_at(step * kLanes, step_out);
    }
    for (int i = 0; i < kStates; ++i) {
        q[i] = at.state.load_at(i * kLanes);
        dA[i] = zero();  // a tile's sum: long sums lose less so
    }
    for (int step = steps - 1; step >= 0; --step) {
        const Dual step_dt = dt.load_at(step * kLanes), step_dt_u = dt_u.load_at(step * kLanes);
        const Dual step_dout = dout.load_at(step * kLanes);
        Dual step_ddt_u = ddt_u.load_at(step * kLanes), step_ddt = ddt.load_at(step * kLanes);
        for (int i = 0; i < kStates; ++i) {
            const Dual g = fma(at.C.broadcast(step * pitch + i), step_dout, q[i]);
            float *const dB = at.dB + (step * dstate + i) * kLanes, *const dC = at.dC + (step * dstate + i) * kLanes;
            store(dB, tangent_fma(g, step_dt_u, load(dB)));
            store(dC, tangent_fma(step_dout, h[i], load(dC)));
            step_ddt_u = fma(g, at.B.broadcast(step * pitch + i), step_ddt_u);
            q[i] = decays.load_at((step * kStates + i) * kLanes) * g;
            h[i] = states.load_at((step * kStates + i) * kLanes);
            const Dual drate = q[i] * h[i];
            step_ddt = fma(drate, A[i], step_ddt);
            dA[i] = tangent_fma(drate, step_dt, dA[i]);
        }
        ddt_u.store_at(step * kLanes, step_ddt_u);
        ddt.store_at(step * kLanes, step_ddt);
    }
    for (int i = 0; i < kStates; ++i) {
        at.state.store_at(i * kLanes, run.restart ? Dual{zero(), zero()} : q[i]);
        store(at.dA + i * kLanes, load(at.dA + i * kLanes) + dA[i]);
    }
}

struct DoubleBackwardScratch {
    BlockTables forward;
    DualPointer A, state, B_tile, C_tile;
    float *dA, *dB_sum, *dC_sum;
    float* starts;  // the states before each tile: values of all blocks, then tangents
    DoubleBackwardScratch(const MambaSelectiveScan& p, int64_t channels, ScratchPieces& pieces) {
        const int64_t table = round_to_lanes(channels) * p.dstate, tile = kSteps * round_to_lanes(p.dstate);
        forward = take_tables(p, channels, pieces);
        A = take_dual(table, pieces);
        state = {forward.state, pieces.take(table)};
        B_tile = take_dual(tile, pieces);
        C_tile = take_dual(tile, pieces);
        dA = pieces.take(table);
        dB_sum = pieces.take(kTile * p.dstate);
        dC_sum = pieces.take(kTile * p.dstate);
        starts = pieces.take(2 * ceil_div(p.seqlen, kSteps) * table);
    }
    static DualPointer take_dual(int64_t floats, ScratchPieces& pieces) {
        float* const value = pieces.take(floats);
        return {value, pieces.take(floats)};
    }
};

inline int64_t double_backward_scratch(const MambaSelectiveScan& p, int64_t channels) {
    ScratchPieces pieces(nullptr);
    DoubleBackwardScratch scratch(p, channels, pieces);
    return pieces.used();
}

// One segment: its parameters, and what both passes over it use.
struct DoubleBackwardSegment {
    const MambaSelectiveScanDoubleBackward& q;
    const MambaSelectiveScan& p;
    const ScanSegment& s;
    const DoubleBackwardScratch& scratch;
    int pitch;
    int64_t table;  // floats of a table of all blocks
    DoubleBackwardTiles tiles;
    Run runs[kSteps];
    int run_count;

    // Contiguous (B, D, L).
    void load_line(const void* data, const TilePlace& at, float* tile) const {
        load_rows(MAMBA_FLOAT32, data, p.dim * p.seqlen, p.seqlen, at, tile);
    }
    void store_line(void* data, const TilePlace& at, const float* tile) const {
        store_rows(MAMBA_FLOAT32, data, p.dim * p.seqlen, p.seqlen, at, tile);
    }
    // Contiguous (B, D, N), or zeros where data is null.
    void load_table(const float* data, int64_t rows_before, float* to) const {
        for (int64_t first = 0; first < s.channels; first += kLanes) {
            const int lanes = block_lanes(s.channels - first);
            if (data == nullptr) {
                fill_zero(to + first * p.dstate, p.dstate * kLanes);
            } else {
                load_states(data, rows_before + first, p.dstate, lanes, to + first * p.dstate);
            }
        }
    }
    void store_table(float* data, const float* from) const {
        for (int64_t first = 0; first < s.channels; first += kLanes) {
            const int lanes = block_lanes(s.channels - first);
            store_states(data, s.batch * p.dim + s.channel + first, p.dstate, lanes, from + first * p.dstate);
        }
    }

    DualPointer starts(const TileSteps& steps) const {
        float* const value = scratch.starts + 2 * (steps.start / kSteps) * table;
        return {value, value + table};
    }
    TilePlace place(int64_t first, const TileSteps& steps) const {
        return {s.batch, s.channel + first, block_lanes(s.channels - first), steps};
    }

    void load_matrix_tiles(const TileSteps& steps) {
        run_count = find_runs(p, s.batch, steps, runs);
        load_group_tiles(p, s, steps, scratch.B_tile.value, scratch.C_tile.value, pitch);
        const int64_t offset = (s.batch * p.ngroups + s.group) * p.dstate * p.seqlen + steps.place;
        load_group_tile(p, q.B_tangent, offset, p.seqlen, steps, scratch.B_tile.tangent, pitch);
        load_group_tile(p, q.C_tangent, offset, p.seqlen, steps, scratch.C_tile.tangent, pitch);
    }

    void load_driving_tiles(const TilePlace& at) {
        load_rows(p.dtype, p.u, p.u_batch_stride, p.u_dim_stride, at, tiles.u.value);
        load_rows(p.dtype, p.delta, p.delta_batch_stride, p.delta_dim_stride, at, tiles.dt.value);
        load_line(q.u_tangent, at, tiles.u.tangent);
        load_line(q.delta_tangent, at, tiles.dt.tangent);
        for (int i = 0; i < at.steps.count * kLanes; i += kLanes) {
            tiles.dt_u.from(0).store_at(i, tiles.dt.from(0).load_at(i) * tiles.u.from(0).load_at(i));
        }
    }

    DualStatesAt states_at(const Run& run, int64_t first, const TileSteps& steps) const {
        const int64_t at = first * p.dstate, sums = run.first * p.dstate * kLanes;
        const DualPointer none = {nullptr, nullptr};
        return {scratch.forward.decay + at,
                scratch.A + at,
                run.restart ? none : starts(steps) + at,
                scratch.B_tile + run.first * pitch,
                scratch.C_tile + run.first * pitch,
                scratch.state + at,
                scratch.dA + at,
                scratch.dB_sum + sums,
                scratch.dC_sum + sums};
    }

    void forward_tile(const TileSteps& steps) {
        load_matrix_tiles(steps);
        for (int64_t i = 0; i < table; i += kLanes) {
            starts(steps).store_at(i, scratch.state.load_at(i));
        }
        for (int64_t first = 0; first < s.channels; first += kLanes) {
            load_driving_tiles(place(first, steps));
            for (int i = 0; i < run_count; ++i) {
                DualStatesAt at = states_at(runs[i], first, steps);
                if (runs[i].restart) {
                    fill_zero(at.state.value, p.dstate * kLanes);
                    fill_zero(at.state.tangent, p.dstate * kLanes);
                }
                int n = 0;
                for (; n + kBackwardStates <= p.dstate; n += kBackwardStates, at = at.after(kBackwardStates)) {
                    dual_forward_states<kBackwardStates>(runs[i], tiles, at, pitch);
                }
                for (; n < p.dstate; ++n, at = at.after(1)) {
                    dual_forward_states<1>(runs[i], tiles, at, pitch);
                }
            }
        }
    }

    void backward_tile(const TileSteps& steps) {
        load_matrix_tiles(steps);
        fill_zero(scratch.dB_sum, steps.count * p.dstate * kLanes);
        fill_zero(scratch.dC_sum, steps.count * p.dstate * kLanes);
        for (int64_t first = 0; first < s.channels; first += kLanes) {
            const TilePlace place_of = place(first, steps);
            load_driving_tiles(place_of);
            load_line(q.dout, place_of, tiles.dout.value);
            load_line(q.dout_tangent, place_of, tiles.dout.tangent);
            tiles.out.clear(steps.count);
            tiles.ddt_u.clear(steps.count);
            tiles.ddt.clear(steps.count);
            for (int i = run_count - 1; i >= 0; --i) {
                DualStatesAt at = states_at(runs[i], first, steps);
                int n = 0;
                for (; n + kBackwardStates <= p.dstate; n += kBackwardStates, at = at.after(kBackwardStates)) {
                    dual_backward_states<kBackwardStates>(runs[i], tiles, at, pitch, p.dstate);
                }
                for (; n < p.dstate; ++n, at = at.after(1)) {
                    dual_backward_states<1>(runs[i], tiles, at, pitch, p.dstate);
                }
            }
            store_lines(place_of);
        }
        store_group_sums(p, s, steps, scratch.dB_sum, scratch.B_tile.value, pitch, q.dB_tangent);
        store_group_sums(p, s, steps, scratch.dC_sum, scratch.C_tile.value, pitch, q.dC_tangent);
    }

    void store_lines(const TilePlace& at) {
        for (int i = 0; i < at.steps.count * kLanes; i += kLanes) {
            const Dual ddt_u = tiles.ddt_u.from(0).load_at(i);
            const Dual ddt = fma(ddt_u, tiles.u.from(0).load_at(i), tiles.ddt.from(0).load_at(i));
            tiles.ddt.from(0).store_at(i, ddt);
            store(tiles.ddt_u.tangent + i, tangent_fma(ddt_u, tiles.dt.from(0).load_at(i), zero()));
        }
        store_rows(p.dtype, p.out, p.out_batch_stride, p.out_dim_stride, at, tiles.out.value);
        store_line(q.out_tangent, at, tiles.out.tangent);
        store_line(q.ddelta, at, tiles.ddt.value);
        store_line(q.ddelta_tangent, at, tiles.ddt.tangent);
        store_line(q.du_tangent, at, tiles.ddt_u.tangent);
    }

    void run() {
        const int64_t row = s.batch * p.dim + s.channel, tile_count = ceil_div(p.seqlen, kSteps);
        fill_tables(p, s, scratch.forward);
        load_table(p.A, s.channel, scratch.A.value);
        load_table(q.A_tangent, s.channel, scratch.A.tangent);
        load_table(p.initial_state, row, scratch.state.value);
        load_table(q.initial_state_tangent, row, scratch.state.tangent);
        for (int64_t tile = 0; tile < tile_count; ++tile) {
            forward_tile(TileSteps(p, tile * kSteps));
        }
        store_table(q.last_state_tangent, scratch.state.tangent);
        load_table(q.dlast_state, row, scratch.state.value);
        fill_zero(scratch.state.tangent, table);
        fill_zero(scratch.dA, table);
        for (int64_t tile = tile_count - 1; tile >= 0; --tile) {
            backward_tile(TileSteps(p, tile * kSteps));
        }
        store_table(q.dA_tangent, scratch.dA);
        store_table(q.dinitial_state_tangent, scratch.state.tangent);
    }
};

inline void double_backward_segment(const MambaSelectiveScanDoubleBackward& q, const ScanSegment& s, float* memory) {
    ScratchPieces pieces(memory);
    const DoubleBackwardScratch scratch(q.forward, s.channels, pieces);
    const int pitch = static_cast<int>(round_to_lanes(q.forward.dstate));
    const int64_t table = round_to_lanes(s.channels) * q.forward.dstate;
    DoubleBackwardSegment segment{q, q.forward, s, scratch, pitch, table, {}, {}, 0};
    segment.run();
}

}  // namespace MAMBA_ISA
}  // namespace mamba
