// What one segment passes on, in either direction, without its outputs; segment.h says how the work is laid out.
//
// Forward h_t = a_t h_{t-1} + B_t dt_t u_t, backward w_t = a_t (w_{t+1} + C_t dy_t), from zero: the same but for the order.
#pragma once

#include "selective_scan/cpu/forward.h"

namespace mamba {
namespace MAMBA_ISA {

// A block's tiles, [step][lane].
struct CarryTiles {
    alignas(64) float dt[kTile];  // delta, then dt
    alignas(64) float in[kTile];  // u, then dt * u; or dout, then dy
    alignas(64) float z[kTile];
};

// One run of a block: states [state][lane] take in[step] times the matrix, a tile [step * pitch + state] if it varies, else a
// table [state][lane].
inline void carry_run(const Run& run, const CarryTiles& tiles, bool backward, int dstate, const float* decay, float* state,
                      const float* matrix, bool variable, int pitch) {
    const int steps = run.end - run.first;
    for (int n = 0; n < dstate; ++n) {
        const Vec rate = load(decay + n * kLanes);
        const Vec fixed = variable ? zero() : load(matrix + n * kLanes);
        Vec value = load(state + n * kLanes);
        for (int i = 0; i < steps; ++i) {
            const int step = backward ? steps - 1 - i : i;
            const int at = (run.first + step) * kLanes;
            const Vec now = variable ? set1(matrix[step * pitch + n]) : fixed;
            const Vec a = exp2(load(tiles.dt + at) * rate), in = load(tiles.in + at) * now;
            value = backward ? a * (value + in) : fma(a, value, in);
        }
        store(state + n * kLanes, value);
    }
}

// delta and what comes in become what carry_run reads; adds up dt.
inline void prepare_carry(const MambaSelectiveScan& p, bool backward, int steps, const float* bias, float* dt_sum,
                          CarryTiles& tiles) {
    Vec sum = load(dt_sum);
    for (int i = 0; i < steps * kLanes; i += kLanes) {
        Vec dt = load(tiles.dt + i) + load(bias), in = load(tiles.in + i);
        if (p.delta_softplus) {
            Vec slope;
            dt = softplus(dt, slope);
        }
        if (!backward) {
            in = dt * in;
        } else if (p.z != nullptr) {
            const Vec z = load(tiles.z + i);
            in = in * (z * sigmoid(z));
        }
        store(tiles.dt + i, dt);
        store(tiles.in + i, in);
        sum = sum + dt;
    }
    store(dt_sum, sum);
}

// q: null for the forward direction.
inline void carry_segment(const MambaSelectiveScan& p, const MambaSelectiveScanBackward* q, const ScanSegment& s,
                          float* memory) {
    ScratchPieces pieces(memory);
    const ForwardScratch scratch(p, s.channels, pieces);
    const BlockTables& tables = scratch.tables;
    const bool backward = q != nullptr, variable = backward ? p.variable_C : p.variable_B;
    const int pitch = static_cast<int>(round_to_lanes(p.dstate)), dstate = static_cast<int>(p.dstate);
    float* const dt_sum = tables.D;  // which nothing else needs here
    CarryTiles tiles;
    Run runs[kSteps];
    bool restarted = false;

    fill_tables(p, s, tables);
    fill_zero(tables.state, round_to_lanes(s.channels) * p.dstate);
    fill_zero(dt_sum, round_to_lanes(s.channels));
    const int64_t count = ceil_div(p.seqlen, kSteps);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t start = (backward ? count - 1 - i : i) * kSteps;
        const TileSteps steps(p, start);
        const int run_count = find_runs(p, s.batch, steps, runs);
        load_group_tiles(p, s, steps, scratch.B_tile, scratch.C_tile, pitch);
        for (int64_t first = 0; first < s.channels; first += kLanes) {
            const int64_t table = first * p.dstate;
            const TilePlace at = {s.batch, s.channel + first, block_lanes(s.channels - first), steps};
            load_rows(p.dtype, p.delta, p.delta_batch_stride, p.delta_dim_stride, at, tiles.dt);
            if (!backward) {
                load_rows(p.dtype, p.u, p.u_batch_stride, p.u_dim_stride, at, tiles.in);
            } else {
                load_rows(p.dtype, q->dout, q->dout_batch_stride, q->dout_dim_stride, at, tiles.in);
                if (p.z != nullptr) {
                    load_rows(p.dtype, p.z, p.z_batch_stride, p.z_dim_stride, at, tiles.z);
                }
            }
            prepare_carry(p, backward, steps.count, tables.bias + first, dt_sum + first, tiles);
            const float* const tile = backward ? scratch.C_tile : scratch.B_tile;
            const float* const constant = backward ? tables.C : tables.B;
            float* const state = tables.state + table;
            for (int j = 0; j < run_count; ++j) {
                const Run& run = runs[backward ? run_count - 1 - j : j];
                restarted = restarted || run.restart;
                if (run.restart && !backward) {
                    fill_zero(state, p.dstate * kLanes);
                }
                carry_run(run, tiles, backward, dstate, tables.decay + table, state,
                          variable ? tile + run.first * pitch : constant + table, variable, pitch);
                if (run.restart && backward) {
                    fill_zero(state, p.dstate * kLanes);
                }
            }
        }
    }
    const int64_t row = s.batch * p.dim + s.channel;
    float* const factors = p.workspace + p.batch * p.dim * p.dstate;
    for (int64_t first = 0; first < s.channels; first += kLanes) {
        const int lanes = block_lanes(s.channels - first);
        float *const state = tables.state + first * p.dstate, *const decay = tables.decay + first * p.dstate;
        store_states(p.workspace, row + first, p.dstate, lanes, state);
        for (int n = 0; n < dstate; ++n) {
            const Vec factor = exp2(load(decay + n * kLanes) * load(dt_sum + first));
            store(decay + n * kLanes, restarted ? set1(-1.0f) : factor);
        }
        store_states(factors, row + first, p.dstate, lanes, decay);
    }
}

inline void forward_carry_segment(const MambaSelectiveScan& p, const ScanSegment& s, float* memory) {
    carry_segment(p, nullptr, s, memory);
}

inline void backward_carry_segment(const ScanBackward& q, const ScanSegment& s, float* memory) {
    carry_segment(q.forward, &q, s, memory);
}

}  // namespace MAMBA_ISA
}  // namespace mamba
