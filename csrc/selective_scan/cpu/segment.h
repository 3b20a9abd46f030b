// What the forward and the backward scan share: the scratch layout, the tables of a block of channels, the tiles of B and C.
//
// Vector lanes are channels; kLanes of them make a block. Time is cut into tiles of MAMBA_SCAN_CHECKPOINT steps. Tiles are the
// outer loop and blocks the inner one, so that a tile of B and C is transposed to floats once for all blocks of a segment.
// Within a tile a few states at a time run over all steps: their h stays in registers, and no sum runs across lanes.
#pragma once

#include "common/cpu_tile.h"
#include "selective_scan/cpu/kernels.h"

namespace mamba {
namespace MAMBA_ISA {

constexpr int kSteps = MAMBA_SCAN_CHECKPOINT;
constexpr int kTile = kSteps * kLanes;
constexpr float kLog2e = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// Hands out consecutive pieces of a segment's scratch memory; with a null base it only counts.
class ScratchPieces {
 public:
    explicit ScratchPieces(float* base) : base_(base), used_(0) {}
    float* take(int64_t floats) {
        float* piece = base_ == nullptr ? nullptr : base_ + used_;
        used_ += round_up(floats, 16);  // every piece starts on a cache line
        return piece;
    }
    int64_t used() const { return used_; }

 private:
    float* base_;
    int64_t used_;
};

// Arrays that hold [state][lane] for each block of the segment, one after the other: the block whose first channel is the
// segment's channel `first` begins at first * dstate.
struct BlockTables {
    float* decay;  // A * log2 e
    float* state;  // forward: h. backward: the gradient that reaches h from later steps
    float* B;      // constant B and C, else null
    float* C;
    float* D;     // [lane]
    float* bias;  // [lane]
};

// The part of a tile's steps between two restarts.
struct Run {
    int first, end;
    bool restart;  // the state before step `first` counts as zero
};

inline int64_t round_to_lanes(int64_t count) {
    return round_up(count, kLanes);
}

inline BlockTables take_tables(const MambaSelectiveScan& p, int64_t channels, ScratchPieces& pieces) {
    const int64_t padded = round_to_lanes(channels);
    BlockTables tables;
    tables.decay = pieces.take(padded * p.dstate);
    tables.state = pieces.take(padded * p.dstate);
    tables.B = p.variable_B ? nullptr : pieces.take(padded * p.dstate);
    tables.C = p.variable_C ? nullptr : pieces.take(padded * p.dstate);
    tables.D = pieces.take(padded);
    tables.bias = pieces.take(padded);
    return tables;
}

// Rows of N states, one a channel, from and to a [state][lane] table; rows_before counts the rows before the block.
inline void load_states(const float* data, int64_t rows_before, int64_t dstate, int lanes, float* table) {
    load_tile(MAMBA_FLOAT32, data, rows_before * dstate, dstate, 1, lanes, static_cast<int>(dstate), table);
}
inline void store_states(float* data, int64_t rows_before, int64_t dstate, int lanes, const float* table) {
    store_tile(MAMBA_FLOAT32, data, rows_before * dstate, dstate, 1, lanes, static_cast<int>(dstate), table);
}

// The steps of a tile, counted as they are scanned: memory has them in the opposite order with `reverse`.
struct TileSteps {
    int64_t start;  // the first one
    int count;
    int64_t place;  // of the first in memory
    bool reverse;

    TileSteps(const MambaSelectiveScan& p, int64_t start_)
        : start(start_),
          count(static_cast<int>(p.seqlen - start < kSteps ? p.seqlen - start : kSteps)),
          place(p.reverse ? p.seqlen - start - count : start),
          reverse(p.reverse != 0) {}

    // The row of a tile that belongs to memory's first step, and the distance to the next one's.
    template <typename Element>
    Element* row(Element* tile, int pitch) const {
        return reverse ? tile + (count - 1) * pitch : tile;
    }
    int to_next(int pitch) const { return reverse ? -pitch : pitch; }
};

// Where a block's tile lies in a (B, D, L) tensor.
struct TilePlace {
    int64_t batch, channel;
    int lanes;
    TileSteps steps;
};

inline void load_rows(int32_t dtype, const void* data, int64_t batch_stride, int64_t dim_stride, const TilePlace& at,
                      float* tile) {
    const int64_t offset = at.batch * batch_stride + at.channel * dim_stride + at.steps.place;
    load_tile(dtype, data, offset, dim_stride, 1, at.lanes, at.steps.count, at.steps.row(tile, kLanes),
              at.steps.to_next(kLanes));
}
inline void store_rows(int32_t dtype, void* data, int64_t batch_stride, int64_t dim_stride, const TilePlace& at,
                       const float* tile) {
    const int64_t offset = at.batch * batch_stride + at.channel * dim_stride + at.steps.place;
    store_tile(dtype, data, offset, dim_stride, 1, at.lanes, at.steps.count, at.steps.row(tile, kLanes),
               at.steps.to_next(kLanes));
}
// What the rows hold is added to the tile, before that is stored there. old: memory for a tile.
inline void add_rows(int32_t dtype, const void* data, int64_t batch_stride, int64_t dim_stride, const TilePlace& at, float* old,
                     float* tile) {
    load_rows(dtype, data, batch_stride, dim_stride, at, old);
    for (int i = 0; i < at.steps.count * kLanes; i += kLanes) {
        store(tile + i, load(tile + i) + load(old + i));
    }
}

// Everything but the state.
inline void fill_tables(const MambaSelectiveScan& p, const ScanSegment& s, const BlockTables& tables) {
    for (int64_t first = 0; first < s.channels; first += kLanes) {
        const int64_t channel = s.channel + first;
        const int lanes = block_lanes(s.channels - first);
        float* decay = tables.decay + first * p.dstate;
        load_states(p.A, channel, p.dstate, lanes, decay);
        for (int64_t n = 0; n < p.dstate; ++n) {
            store(decay + n * kLanes, maximum(set1(-3.4e38f), load(decay + n * kLanes) * set1(kLog2e)));  // finite; NaN stays
        }
        if (!p.variable_B) {
            load_states(static_cast<const float*>(p.B), channel, p.dstate, lanes, tables.B + first * p.dstate);
        }
        if (!p.variable_C) {
            load_states(static_cast<const float*>(p.C), channel, p.dstate, lanes, tables.C + first * p.dstate);
        }
        store(tables.D + first, p.D ? load_lanes(MAMBA_FLOAT32, p.D, channel, 1, lanes) : zero());
        store(tables.bias + first, p.delta_bias ? load_lanes(MAMBA_FLOAT32, p.delta_bias, channel, 1, lanes) : zero());
    }
}

// tile[step * pitch + state], padded with zeros to whole vectors of states.
inline void load_group_tile(const MambaSelectiveScan& p, const void* data, int64_t offset, int64_t dstate_stride,
                            const TileSteps& steps, float* tile, int pitch) {
    for (int n = 0; n < p.dstate; n += kLanes) {
        load_tile(p.dtype, data, offset + n * dstate_stride, dstate_stride, 1, block_lanes(p.dstate - n), steps.count,
                  steps.row(tile, pitch) + n, steps.to_next(pitch));
    }
}

inline void load_group_tiles(const MambaSelectiveScan& p, const ScanSegment& s, const TileSteps& steps, float* B_tile,
                             float* C_tile, int pitch) {
    if (p.variable_B) {
        const int64_t offset = s.batch * p.B_batch_stride + s.group * p.B_group_stride + steps.place;
        load_group_tile(p, p.B, offset, p.B_dstate_stride, steps, B_tile, pitch);
    }
    if (p.variable_C) {
        const int64_t offset = s.batch * p.C_batch_stride + s.group * p.C_group_stride + steps.place;
        load_group_tile(p, p.C, offset, p.C_dstate_stride, steps, C_tile, pitch);
    }
}

// Cuts a tile at the steps where seq_idx changes; returns the number of runs. Step 0 of a sequence is no restart.
inline int find_runs(const MambaSelectiveScan& p, int64_t batch, const TileSteps& steps, Run* runs) {
    runs[0] = {0, steps.count, false};
    if (p.seq_idx == nullptr) {
        return 1;
    }
    const int32_t* const seq_idx = steps.row(p.seq_idx + batch * p.seqlen + steps.place, 1);
    const int to_next = steps.to_next(1);
    int count = 0;
    for (int step = steps.start > 0 ? 0 : 1; step < steps.count; ++step) {
        if (seq_idx[step * to_next] != seq_idx[(step - 1) * to_next]) {
            if (step > 0) {
                runs[count++].end = step;
            }
            runs[count] = {step, steps.count, true};
        }
    }
    return count + 1;
}

}  // namespace MAMBA_ISA
}  // namespace mamba
