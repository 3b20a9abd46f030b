// The backward scan of one segment: tiles from last to first, each recomputed from its checkpoint.
//
// With g_t the gradient that reaches h_t from later steps, and x_t = dt_t A:
//   dh_t = C_t dy_t + g_t      g_{t-1} = exp(x_t) dh_t      dx_t = g_{t-1} h_{t-1}
//   dC_t = sum over channels of dy_t h_t      dB_t = sum over channels of dh_t dt_t u_t
// The sums over channels are kept as vectors over all blocks of the segment, and added up across lanes once a tile.
#pragma once

#include "selective_scan/cpu/segment.h"

namespace mamba {
namespace MAMBA_ISA {

// States that run through a tile together; their h and decays of all steps should stay in the L1 cache.
constexpr int kBackwardStates = 2;

// A block's tiles, [step][lane].
struct BackwardTiles {
    alignas(64) float u[kTile];
    alignas(64) float dt[kTile];     // delta, then dt
    alignas(64) float slope[kTile];  // d dt / d delta
    alignas(64) float dt_u[kTile];
    alignas(64) float dy[kTile];          // dout, then the gradient of the ungated output
    alignas(64) float y[kTile];           // the ungated output
    alignas(64) float z[kTile];           // z, later dz
    alignas(64) float gate_slope[kTile];  // dout * d silu(z) / dz
    alignas(64) float ddt_u[kTile];       // gradient of dt * u: sum over states of dh B
    alignas(64) float ddecay[kTile];      // sum over states of dx A log2 e
    alignas(64) float h[(kSteps + 1) * kBackwardStates * kLanes];
    alignas(64) float a[kTile * kBackwardStates];
};

struct BackwardTables {
    BlockTables forward;  // state is g
    float* dA;            // [state][lane] of each block
    float *dB, *dC;       // constant B and C, else null
    float *dD, *dbias;    // [lane] of each block
};

// Pointers of kStates neighbouring states; B, C, dB_sum and dC_sum start at a run's first step.
struct StatesAt {
    const float *decay, *start, *B, *C;
    float *g, *dA, *dB, *dC;
};

// kStates states over the steps of one run; start is null where the state starts from zero. For variable B (C), B is a tile
// [step * pitch + state] and dB is [(step * dstate + state) * kLanes + lane], else both are tables [state][lane].
template <int kStates, bool kVariableB, bool kVariableC>
MAMBA_INLINE void backward_states(const Run& run, BackwardTiles& t, const StatesAt& at, int pitch, int64_t dstate) {
    const int steps = run.end - run.first, skip = run.first * kLanes;
    const float *dt = t.dt + skip, *dt_u = t.dt_u + skip, *dy = t.dy + skip;
    float *y = t.y + skip, *ddt_u = t.ddt_u + skip, *ddecay = t.ddecay + skip;
    Vec rate[kStates], h[kStates], fixed_B[kStates], fixed_C[kStates];
    for (int i = 0; i < kStates; ++i) {
        rate[i] = load(at.decay + i * kLanes);
        h[i] = at.start ? load(at.start + i * kLanes) : zero();
        fixed_B[i] = kVariableB ? zero() : load(at.B + i * kLanes);
        fixed_C[i] = kVariableC ? zero() : load(at.C + i * kLanes);
        store(t.h + i * kLanes, h[i]);
    }
    for (int step = 0; step < steps; ++step) {
        const Vec step_dt = load(dt + step * kLanes), step_dt_u = load(dt_u + step * kLanes);
        Vec step_y = load(y + step * kLanes);
        for (int i = 0; i < kStates; ++i) {
            const Vec B = kVariableB ? set1(at.B[step * pitch + i]) : fixed_B[i];
            const Vec C = kVariableC ? set1(at.C[step * pitch + i]) : fixed_C[i];
            const Vec a = exp2(step_dt * rate[i]);
            h[i] = fma(a, h[i], step_dt_u * B);
            step_y = fma(h[i], C, step_y);
            store(t.a + (step * kStates + i) * kLanes, a);
            store(t.h + ((step + 1) * kStates + i) * kLanes, h[i]);
        }
        store(y + step * kLanes, step_y);
    }
    Vec g[kStates], dA[kStates], dB[kStates], dC[kStates];
    for (int i = 0; i < kStates; ++i) {
        g[i] = load(at.g + i * kLanes);
        dA[i] = dB[i] = dC[i] = zero();  // a tile's sums, added to the totals in one go: long sums lose less so
    }
    for (int step = steps - 1; step >= 0; --step) {
        const Vec step_dt = load(dt + step * kLanes), step_dt_u = load(dt_u + step * kLanes);
        const Vec step_dy = load(dy + step * kLanes);
        Vec step_ddt_u = load(ddt_u + step * kLanes), step_ddecay = load(ddecay + step * kLanes);
        for (int i = 0; i < kStates; ++i) {
            const Vec B = kVariableB ? set1(at.B[step * pitch + i]) : fixed_B[i];
            const Vec C = kVariableC ? set1(at.C[step * pitch + i]) : fixed_C[i];
            const Vec dh = fma(C, step_dy, g[i]);
            if (kVariableB) {
                float* sum = at.dB + (step * dstate + i) * kLanes;
                store(sum, fma(dh, step_dt_u, load(sum)));
            } else {
                dB[i] = fma(dh, step_dt_u, dB[i]);
            }
            if (kVariableC) {
                float* sum = at.dC + (step * dstate + i) * kLanes;
                store(sum, fma(step_dy, h[i], load(sum)));
            } else {
                dC[i] = fma(step_dy, h[i], dC[i]);
            }
            step_ddt_u = fma(dh, B, step_ddt_u);
            g[i] = load(t.a + (step * kStates + i) * kLanes) * dh;
            h[i] = load(t.h + (step * kStates + i) * kLanes);
            const Vec dx = g[i] * h[i];
            step_ddecay = fma(dx, rate[i], step_ddecay);
            dA[i] = fma(dx, step_dt, dA[i]);
        }
        store(ddt_u + step * kLanes, step_ddt_u);
        store(ddecay + step * kLanes, step_ddecay);
    }
    for (int i = 0; i < kStates; ++i) {
        store(at.g + i * kLanes, run.restart ? zero() : g[i]);
        store(at.dA + i * kLanes, load(at.dA + i * kLanes) + dA[i]);
        if (!kVariableB) {
            store(at.dB + i * kLanes, load(at.dB + i * kLanes) + dB[i]);
        }
        if (!kVariableC) {
            store(at.dC + i * kLanes, load(at.dC + i * kLanes) + dC[i]);
        }
    }
}

template <bool kVariableB, bool kVariableC>
inline void backward_all_states(const Run& run, BackwardTiles& t, StatesAt at, int pitch, int dstate) {
    int n = 0;
    while (n < dstate) {
        int states = 1;
        if (n + kBackwardStates <= dstate) {
            states = kBackwardStates;
            backward_states<kBackwardStates, kVariableB, kVariableC>(run, t, at, pitch, dstate);
        } else {
            backward_states<1, kVariableB, kVariableC>(run, t, at, pitch, dstate);
        }
        n += states;
        at.decay += states * kLanes;
        at.start += at.start ? states * kLanes : 0;
        at.B += states * (kVariableB ? 1 : kLanes);
        at.C += states * (kVariableC ? 1 : kLanes);
        at.g += states * kLanes;
        at.dA += states * kLanes;
        at.dB += states * kLanes;
        at.dC += states * kLanes;
    }
}

inline void backward_run(const MambaSelectiveScan& p, const Run& run, BackwardTiles& t, const StatesAt& at, int pitch) {
    const int dstate = static_cast<int>(p.dstate);
    if (p.variable_B && p.variable_C) {
        backward_all_states<true, true>(run, t, at, pitch, dstate);
    } else if (p.variable_B) {
        backward_all_states<true, false>(run, t, at, pitch, dstate);
    } else if (p.variable_C) {
        backward_all_states<false, true>(run, t, at, pitch, dstate);
    } else {
        backward_all_states<false, false>(run, t, at, pitch, dstate);
    }
}

// From u, delta, z and dout to what the states need.
inline void prepare_backward(const MambaSelectiveScan& p, int steps, Vec D, Vec bias, BackwardTiles& t) {
    for (int i = 0; i < steps * kLanes; i += kLanes) {
        const Vec u = load(t.u + i);
        Vec dt = load(t.dt + i) + bias, slope = set1(1.0f);
        if (p.delta_softplus) {
            dt = softplus(dt, slope);
        }
        store(t.dt + i, dt);
        store(t.slope + i, slope);
        store(t.dt_u + i, dt * u);
        store(t.y + i, p.D ? D * u : zero());
        store(t.ddt_u + i, zero());
        store(t.ddecay + i, zero());
        if (p.z != nullptr) {
            const Vec dout = load(t.dy + i), z = load(t.z + i), s = sigmoid(z);
            const Vec silu = z * s;
            store(t.z + i, silu);
            store(t.gate_slope + i, dout * fma(silu, set1(1.0f) - s, s));
            store(t.dy + i, dout * silu);
        }
    }
}

// From the sums over states to the gradients: du ends in ddt_u, ddelta in ddecay, dz in gate_slope, out in y.
inline void finish_backward(const MambaSelectiveScan& p, int steps, Vec D, float* dD, float* dbias, BackwardTiles& t) {
    Vec D_sum = zero(), bias_sum = zero();
    for (int i = 0; i < steps * kLanes; i += kLanes) {
        const Vec u = load(t.u + i), dy = load(t.dy + i), ddt_u = load(t.ddt_u + i), y = load(t.y + i);
        const Vec ddt = fma(ddt_u, u, load(t.ddecay + i) * set1(kLn2));
        const Vec ddelta = ddt * load(t.slope + i);
        const Vec du = ddt_u * load(t.dt + i);
        store(t.ddt_u + i, p.D ? fma(D, dy, du) : du);
        store(t.ddecay + i, ddelta);
        bias_sum = bias_sum + ddelta;
        D_sum = fma(dy, u, D_sum);
        if (p.z != nullptr) {
            store(t.gate_slope + i, load(t.gate_slope + i) * y);
            store(t.y + i, y * load(t.z + i));
        }
    }
    store(dD, load(dD) + D_sum);
    store(dbias, load(dbias) + bias_sum);
}

// Adds up sums[(step * dstate + state) * kLanes + lane] over lanes and writes (N, L) rows of dB or dC. tile is space for
// steps * pitch floats.
inline void store_group_sums(const MambaSelectiveScan& p, const ScanSegment& s, const TileSteps& steps, const float* sums,
                             float* tile, int pitch, float* gradient) {
    const int dstate = static_cast<int>(p.dstate);
    const int64_t row = ((s.slot * p.batch + s.batch) * p.ngroups + s.group) * p.dstate;
    for (int n = 0; n < dstate; n += kLanes) {
        const int count = block_lanes(dstate - n);
        for (int step = 0; step < steps.count; ++step) {
            Vec rows[kLanes];
            for (int i = 0; i < kLanes; ++i) {
                rows[i] = i < count ? load(sums + (step * p.dstate + n + i) * kLanes) : zero();
            }
            transpose(rows);
            for (int half = kLanes / 2; half > 0; half /= 2) {
                for (int i = 0; i < half; ++i) {
                    rows[i] = rows[i] + rows[i + half];
                }
            }
            store(tile + step * pitch + n, rows[0]);
        }
        store_tile(MAMBA_FLOAT32, gradient, (row + n) * p.seqlen + steps.place, p.seqlen, 1, count, steps.count,
                   steps.row(tile, pitch) + n, steps.to_next(pitch));
    }
}

struct BackwardScratch {
    BackwardTables tables;
    float* start;  // the block's state before the tile
    float *B_tile, *C_tile, *dB_sum, *dC_sum;
    BackwardScratch(const MambaSelectiveScan& p, int64_t channels, ScratchPieces& pieces) {
        const int64_t padded = round_to_lanes(channels), tile = kSteps * round_to_lanes(p.dstate);
        tables.forward = take_tables(p, channels, pieces);
        tables.dA = pieces.take(padded * p.dstate);
        tables.dB = p.variable_B ? nullptr : pieces.take(padded * p.dstate);
        tables.dC = p.variable_C ? nullptr : pieces.take(padded * p.dstate);
        tables.dD = pieces.take(padded);
        tables.dbias = pieces.take(padded);
        start = pieces.take(kLanes * p.dstate);
        B_tile = pieces.take(tile);
        C_tile = pieces.take(tile);
        dB_sum = p.variable_B ? pieces.take(kTile * p.dstate) : nullptr;
        dC_sum = p.variable_C ? pieces.take(kTile * p.dstate) : nullptr;
    }
};

inline int64_t backward_scratch(const MambaSelectiveScan& p, int64_t channels) {
    ScratchPieces pieces(nullptr);
    BackwardScratch scratch(p, channels, pieces);
    return pieces.used();
}

// The state before a tile: a checkpoint, the initial state, or null for zero.
inline const float* load_start(const MambaSelectiveScan& p, const TilePlace& at, float* table) {
    if (at.steps.start > 0) {
        const int64_t checkpoints = (p.seqlen - 1) / kSteps;
        const int64_t row = (at.batch * checkpoints + at.steps.start / kSteps - 1) * p.dim + at.channel;
        load_states(p.checkpoints, row, p.dstate, at.lanes, table);
        return table;
    }
    if (p.initial_state != nullptr) {
        load_states(p.initial_state, at.batch * p.dim + at.channel, p.dstate, at.lanes, table);
        return table;
    }
    return nullptr;
}

inline void backward_block(const ScanBackward& q, const BackwardScratch& scratch, const TilePlace& at, int64_t first,
                           const Run* runs, int run_count, BackwardTiles& t) {
    const MambaSelectiveScan& p = q.forward;
    const BackwardTables& tables = scratch.tables;
    const int pitch = static_cast<int>(round_to_lanes(p.dstate));
    const int64_t table = first * p.dstate;
    const Vec D = load(tables.forward.D + first);
    load_rows(p.dtype, p.u, p.u_batch_stride, p.u_dim_stride, at, t.u);
    load_rows(p.dtype, p.delta, p.delta_batch_stride, p.delta_dim_stride, at, t.dt);
    load_rows(p.dtype, q.dout, q.dout_batch_stride, q.dout_dim_stride, at, t.dy);
    if (p.z != nullptr) {
        load_rows(p.dtype, p.z, p.z_batch_stride, p.z_dim_stride, at, t.z);
    }
    prepare_backward(p, at.steps.count, D, load(tables.forward.bias + first), t);
    const float* start = load_start(p, at, scratch.start);
    for (int i = run_count - 1; i >= 0; --i) {
        const int64_t tile = runs[i].first * pitch, sums = runs[i].first * p.dstate * kLanes;
        StatesAt states;
        states.decay = tables.forward.decay + table;
        states.start = i > 0 || runs[i].restart ? nullptr : start;
        states.B = p.variable_B ? scratch.B_tile + tile : tables.forward.B + table;
        states.C = p.variable_C ? scratch.C_tile + tile : tables.forward.C + table;
        states.g = tables.forward.state + table;
        states.dA = tables.dA + table;
        states.dB = p.variable_B ? scratch.dB_sum + sums : tables.dB + table;
        states.dC = p.variable_C ? scratch.dC_sum + sums : tables.dC + table;
        backward_run(p, runs[i], t, states, pitch);
    }
    finish_backward(p, at.steps.count, D, tables.dD + first, tables.dbias + first, t);
    store_rows(p.dtype, q.du, q.du_batch_stride, q.du_dim_stride, at, t.ddt_u);
    store_rows(p.dtype, q.ddelta, q.ddelta_batch_stride, q.ddelta_dim_stride, at, t.ddecay);
    if (p.z != nullptr && p.add) {
        add_rows(p.dtype, q.dz, q.dz_batch_stride, q.dz_dim_stride, at, t.u, t.gate_slope);
    }
    if (p.z != nullptr) {
        store_rows(p.dtype, q.dz, q.dz_batch_stride, q.dz_dim_stride, at, t.gate_slope);
    }
    if (p.out != nullptr && p.add) {
        add_rows(p.dtype, p.out, p.out_batch_stride, p.out_dim_stride, at, t.u, t.y);
    }
    if (p.out != nullptr) {
        store_rows(p.dtype, p.out, p.out_batch_stride, p.out_dim_stride, at, t.y);
    }
}

inline void backward_segment(const ScanBackward& q, const ScanSegment& s, float* memory) {
    const MambaSelectiveScan& p = q.forward;
    ScratchPieces pieces(memory);
    const BackwardScratch scratch(p, s.channels, pieces);
    const BackwardTables& tables = scratch.tables;
    const int pitch = static_cast<int>(round_to_lanes(p.dstate));
    const int64_t table_floats = round_to_lanes(s.channels) * p.dstate, row = s.batch * p.dim + s.channel;
    BackwardTiles t;
    Run runs[kSteps];

    fill_tables(p, s, tables.forward);
    fill_zero(tables.forward.state, table_floats);
    fill_zero(tables.dA, table_floats);
    fill_zero(tables.dD, round_to_lanes(s.channels));
    fill_zero(tables.dbias, round_to_lanes(s.channels));
    if (!p.variable_B) {
        fill_zero(tables.dB, table_floats);
    }
    if (!p.variable_C) {
        fill_zero(tables.dC, table_floats);
    }
    for (int64_t first = 0; first < s.channels && q.dlast_state != nullptr; first += kLanes) {
        load_states(q.dlast_state, row + first, p.dstate, block_lanes(s.channels - first),
                    tables.forward.state + first * p.dstate);
    }
    const int64_t tiles = ceil_div(p.seqlen, kSteps);
    for (int64_t start = (tiles - 1) * kSteps; start >= 0; start -= kSteps) {
        const TileSteps steps(p, start);
        const int run_count = find_runs(p, s.batch, steps, runs);
        load_group_tiles(p, s, steps, scratch.B_tile, scratch.C_tile, pitch);
        if (p.variable_B) {
            fill_zero(scratch.dB_sum, steps.count * p.dstate * kLanes);
        }
        if (p.variable_C) {
            fill_zero(scratch.dC_sum, steps.count * p.dstate * kLanes);
        }
        for (int64_t first = 0; first < s.channels; first += kLanes) {
            const TilePlace at = {s.batch, s.channel + first, block_lanes(s.channels - first), steps};
            backward_block(q, scratch, at, first, runs, run_count, t);
        }
        if (p.variable_B) {
            store_group_sums(p, s, steps, scratch.dB_sum, scratch.B_tile, pitch, q.parts.dB);
        }
        if (p.variable_C) {
            store_group_sums(p, s, steps, scratch.dC_sum, scratch.C_tile, pitch, q.parts.dC);
        }
    }
    for (int64_t first = 0; first < s.channels; first += kLanes) {
        const int lanes = block_lanes(s.channels - first);
        const int64_t table = first * p.dstate;
        store_states(q.parts.dA, row + first, p.dstate, lanes, tables.dA + table);
        if (!p.variable_B) {
            store_states(q.parts.dB, row + first, p.dstate, lanes, tables.dB + table);
        }
        if (!p.variable_C) {
            store_states(q.parts.dC, row + first, p.dstate, lanes, tables.dC + table);
        }
        if (q.parts.dD != nullptr) {
            store_lanes(MAMBA_FLOAT32, q.parts.dD, row + first, 1, lanes, load(tables.dD + first));
        }
        if (q.parts.ddelta_bias != nullptr) {
            store_lanes(MAMBA_FLOAT32, q.parts.ddelta_bias, row + first, 1, lanes, load(tables.dbias + first));
        }
        if (q.dinitial_state != nullptr) {
            store_states(q.dinitial_state, row + first, p.dstate, lanes, tables.forward.state + table);
        }
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
