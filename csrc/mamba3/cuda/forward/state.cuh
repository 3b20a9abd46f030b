// A state between memory and the accumulators of the forward walks. In forward/warpgroup.cuh their columns are those of its
// tiles: pairs lie together.
#pragma once

#include "mamba3/cuda/forward/walk.cuh"
#include "ssd/cuda/chunk_tile.cuh"

namespace mamba {

// Which element of q, k or a row of the state lies in a tile's column: what an angle turns are neighbours.
template <bool kPairwise>
__device__ __forceinline__ int element_of_pair_column(int column, int dstate) {
    return kPairwise ? column : column / 2 + column % 2 * (dstate / 2);
}

// Of 16 rows from `row` on, of which `rows` exist in all.
template <bool kPairwise, int kGroups>
__device__ __forceinline__ void load_pair_state(float (&state)[kGroups][4], const float* from, int row, int rows, int dstate,
                                                int lane) {
    load_state<8 * kGroups>(state, from, row, rows, 0, dstate, lane,
                            [&](int column) { return element_of_pair_column<kPairwise>(column, dstate); });
}
template <bool kPairwise, int kGroups>
__device__ __forceinline__ void store_pair_state(float* to, const float (&state)[kGroups][4], int row, int rows, int dstate,
                                                 int lane) {
    store_state<8 * kGroups>(to, state, row, rows, 0, dstate, lane,
                             [&](int column) { return element_of_pair_column<kPairwise>(column, dstate); });
}

// Adds the step before a sequence's first one: its (1 - lambda) dt is the first step's. Of some ranks.
template <bool kPairwise, int kGroups>
__device__ __forceinline__ void add_pairs_before(float (&state)[kGroups][4], const MambaMamba3& p, const Mamba3Block& block,
                                                 int first_rank, int ranks, int row, int lane) {
    const SequenceRange& range = block.range;
    const int64_t head = block.head, sequence = block.sequence;
    const float dt = load_as_float(
        p.dt, range.row * p.dt_batch_stride + range.begin * p.dt_len_stride + head * p.dt_head_stride, p.dt_dtype);
    const float trap = load_as_float(
        p.trap, range.row * p.trap_batch_stride + range.begin * p.trap_len_stride + head * p.trap_head_stride, p.trap_dtype);
    const float nu = sigmoid(-trap) * dt;
    const int dstate = static_cast<int>(p.dstate);
#pragma unroll 1
    for (int r = first_rank; r < first_rank + ranks; ++r) {
        const float* const k = p.k_state + ((sequence * p.rank + r) * p.nheads + head) * p.dstate;
        float x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own = row + lane / 4 + 8 * i;
            x[i] = 0.0f;
            if (own < block.columns) {
                x[i] = nu * p.v_state[(sequence * p.nheads + head) * p.headdim + block.row0 + own];
                x[i] *= p.mimo_v != nullptr ? p.mimo_v[(head * p.rank + r) * p.headdim + block.row0 + own] : 1.0f;
            }
        }
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = 8 * j + lane % 4 * 2 + i % 2;
                const float entry = column < dstate ? k[element_of_pair_column<kPairwise>(column, dstate)] : 0.0f;
                state[j][i] = fmaf(x[i / 2], entry, state[j][i]);
            }
        }
    }
}

}  // namespace mamba
