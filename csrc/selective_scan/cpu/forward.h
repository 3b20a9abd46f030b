// The forward scan of one segment; segment.h says how the work is laid out.
#pragma once

#include "selective_scan/cpu/segment.h"

namespace mamba {
namespace MAMBA_ISA {

// A block's tiles, [step][lane].
struct ForwardTiles {
    alignas(64) float dt[kTile];    // delta, then dt
    alignas(64) float dt_u[kTile];  // u, then dt * u
    alignas(64) float y[kTile];
    alignas(64) float z[kTile];
};

// kStates neighbouring states over some steps: adds C h to y. B and C are tiles [step * pitch + state] where they vary with
// time, else tables [state][lane].
template <int kStates, bool kVariableB, bool kVariableC>
MAMBA_INLINE void forward_states(int steps, const float* dt, const float* dt_u, float* y, const float* decay, float* state,
                                 const float* B, const float* C, int pitch) {
    Vec rate[kStates], h[kStates], fixed_B[kStates], fixed_C[kStates];
    for (int i = 0; i < kStates; ++i) {
        rate[i] = load(decay + i * kLanes);
        h[i] = load(state + i * kLanes);
        fixed_B[i] = kVariableB ? zero() : load(B + i * kLanes);
        fixed_C[i] = kVariableC ? zero() : load(C + i * kLanes);
    }
    for (int step = 0; step < steps; ++step) {
        const Vec step_dt = load(dt + step * kLanes);
        const Vec step_dt_u = load(dt_u + step * kLanes);
        Vec step_y = load(y + step * kLanes);
        for (int i = 0; i < kStates; ++i) {
            const Vec B_i = kVariableB ? set1(B[step * pitch + i]) : fixed_B[i];
            const Vec C_i = kVariableC ? set1(C[step * pitch + i]) : fixed_C[i];
            h[i] = fma(exp2(step_dt * rate[i]), h[i], step_dt_u * B_i);
            step_y = fma(h[i], C_i, step_y);
        }
        store(y + step * kLanes, step_y);
    }
    for (int i = 0; i < kStates; ++i) {
        store(state + i * kLanes, h[i]);
    }
}

template <bool kVariableB, bool kVariableC>
inline void forward_all_states(int dstate, int steps, const float* dt, const float* dt_u, float* y, const float* decay,
                               float* state, const float* B, const float* C, int pitch) {
    const int B_next = kVariableB ? 1 : kLanes, C_next = kVariableC ? 1 : kLanes;
    int n = 0;
    for (; n + 4 <= dstate; n += 4) {
        forward_states<4, kVariableB, kVariableC>(steps, dt, dt_u, y, decay + n * kLanes, state + n * kLanes, B + n * B_next,
                                                  C + n * C_next, pitch);
    }
    for (; n < dstate; ++n) {
        forward_states<1, kVariableB, kVariableC>(steps, dt, dt_u, y, decay + n * kLanes, state + n * kLanes, B + n * B_next,
                                                  C + n * C_next, pitch);
    }
}

// One run of a block. B and C point at the run's first step (variable) or at the block's table (constant).
inline void forward_run(const MambaSelectiveScan& p, const Run& run, ForwardTiles& tiles, const float* decay, float* state,
                        const float* B, const float* C, int pitch) {
    const int dstate = static_cast<int>(p.dstate), steps = run.end - run.first, skip = run.first * kLanes;
    if (run.restart) {
        fill_zero(state, p.dstate * kLanes);
    }
    const float *dt = tiles.dt + skip, *dt_u = tiles.dt_u + skip;
    float* y = tiles.y + skip;
    if (p.variable_B && p.variable_C) {
        forward_all_states<true, true>(dstate, steps, dt, dt_u, y, decay, state, B, C, pitch);
    } else if (p.variable_B) {
        forward_all_states<true, false>(dstate, steps, dt, dt_u, y, decay, state, B, C, pitch);
    } else if (p.variable_C) {
        forward_all_states<false, true>(dstate, steps, dt, dt_u, y, decay, state, B, C, pitch);
    } else {
        forward_all_states<false, false>(dstate, steps, dt, dt_u, y, decay, state, B, C, pitch);
    }
}

// delta and u become dt and dt * u, y starts as D u.
inline void prepare_forward(const MambaSelectiveScan& p, int steps, Vec D, Vec bias, ForwardTiles& tiles) {
    for (int i = 0; i < steps * kLanes; i += kLanes) {
        const Vec u = load(tiles.dt_u + i);
        Vec dt = load(tiles.dt + i) + bias;
        if (p.delta_softplus) {
            Vec slope;
            dt = softplus(dt, slope);
        }
        store(tiles.dt + i, dt);
        store(tiles.dt_u + i, dt * u);
        store(tiles.y + i, p.D ? D * u : zero());
    }
}

inline void gate_forward(int steps, ForwardTiles& tiles) {
    for (int i = 0; i < steps * kLanes; i += kLanes) {
        const Vec z = load(tiles.z + i);
        store(tiles.y + i, load(tiles.y + i) * (z * sigmoid(z)));
    }
}

struct ForwardScratch {
    BlockTables tables;
    float *B_tile, *C_tile;
    ForwardScratch(const MambaSelectiveScan& p, int64_t channels, ScratchPieces& pieces)
        : tables(take_tables(p, channels, pieces)),
          B_tile(pieces.take(kSteps * round_to_lanes(p.dstate))),
          C_tile(pieces.take(kSteps * round_to_lanes(p.dstate))) {}
};

inline int64_t forward_scratch(const MambaSelectiveScan& p, int64_t channels) {
    ScratchPieces pieces(nullptr);
    ForwardScratch scratch(p, channels, pieces);
    return pieces.used();
}

inline void forward_segment(const MambaSelectiveScan& p, const ScanSegment& s, float* memory) {
    ScratchPieces pieces(memory);
    const ForwardScratch scratch(p, s.channels, pieces);
    const BlockTables& tables = scratch.tables;
    const int pitch = static_cast<int>(round_to_lanes(p.dstate));
    const int64_t checkpoints = p.seqlen > 0 ? (p.seqlen - 1) / kSteps : 0;
    const int64_t state_row = s.batch * p.dim + s.channel;
    ForwardTiles tiles;
    Run runs[kSteps];

    fill_tables(p, s, tables);
    fill_zero(tables.state, round_to_lanes(s.channels) * p.dstate);
    for (int64_t first = 0; first < s.channels && p.initial_state != nullptr; first += kLanes) {
        load_states(p.initial_state, state_row + first, p.dstate, block_lanes(s.channels - first),
                    tables.state + first * p.dstate);
    }
    for (int64_t start = 0; start < p.seqlen; start += kSteps) {
        const TileSteps steps(p, start);
        const int run_count = find_runs(p, s.batch, steps, runs);
        load_group_tiles(p, s, steps, scratch.B_tile, scratch.C_tile, pitch);
        for (int64_t first = 0; first < s.channels; first += kLanes) {
            const int64_t table = first * p.dstate;
            const TilePlace at = {s.batch, s.channel + first, block_lanes(s.channels - first), steps};
            load_rows(p.dtype, p.u, p.u_batch_stride, p.u_dim_stride, at, tiles.dt_u);
            load_rows(p.dtype, p.delta, p.delta_batch_stride, p.delta_dim_stride, at, tiles.dt);
            prepare_forward(p, steps.count, load(tables.D + first), load(tables.bias + first), tiles);
            for (int i = 0; i < run_count; ++i) {
                const float* B = p.variable_B ? scratch.B_tile + runs[i].first * pitch : tables.B + table;
                const float* C = p.variable_C ? scratch.C_tile + runs[i].first * pitch : tables.C + table;
                forward_run(p, runs[i], tiles, tables.decay + table, tables.state + table, B, C, pitch);
            }
            if (p.z != nullptr) {
                load_rows(p.dtype, p.z, p.z_batch_stride, p.z_dim_stride, at, tiles.z);
                gate_forward(steps.count, tiles);
            }
            if (p.add) {
                add_rows(p.dtype, p.out, p.out_batch_stride, p.out_dim_stride, at, tiles.z, tiles.y);
            }
            store_rows(p.dtype, p.out, p.out_batch_stride, p.out_dim_stride, at, tiles.y);
            if (p.checkpoints != nullptr && start + kSteps < p.seqlen) {
                const int64_t checkpoint_row = (s.batch * checkpoints + start / kSteps) * p.dim + at.channel;
                store_states(p.checkpoints, checkpoint_row, p.dstate, at.lanes, tables.state + table);
            }
        }
    }
    for (int64_t first = 0; first < s.channels && p.last_state != nullptr; first += kLanes) {
        store_states(p.last_state, state_row + first, p.dstate, block_lanes(s.channels - first),
                     tables.state + first * p.dstate);
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
