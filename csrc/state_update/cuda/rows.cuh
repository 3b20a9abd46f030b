// Rows of states in a warp's registers, for kernels that advance a decode state: loads, one step of the recurrence, sums,
// stores.
#pragma once

#include "common/cuda_vector.cuh"

namespace mamba {

// How a warp walks rows of states, tile by tile. 2^lanes_log2 neighbouring lanes share a row, each with kVectors vectors of it,
// of kRows rows a tile. One access of all lanes covers neighbours in memory, if rows follow each other. A row has at least
// kRows lanes.
//
// What there is once for a row (dt, x, the sum) one lane computes for all: a warp may take `tiles` tiles, while they have no
// more rows than it has lanes, and each lane is the owner of row own_row().
//
// kWholeTiles: there is nothing but whole tiles, whose rows follow each other without a gap: a tile is one run of memory.
template <typename StateType, int kVectorStates, int kRowsOfLane, int kVectorsOfRow, bool kWholeTiles = false>
struct StateRows {
    using State = StateType;
    static constexpr int kVector = kVectorStates;
    static constexpr int kRows = kRowsOfLane;
    static constexpr int kVectors = kVectorsOfRow;
    static constexpr bool kWhole = kWholeTiles;
    static constexpr int kStates = kVector * kVectors;  // of a row in a lane
    using Tile = Packed<State, kVector>[kRows][kVectors];

    int lanes_log2, lane, part;  // part: the lane's place in its row

    __device__ __forceinline__ explicit StateRows(int log2)
        : lanes_log2(log2), lane(threadIdx.x & 31), part(lane & ((1 << log2) - 1)) {}

    __device__ __forceinline__ int tile_rows() const { return kRows << (5 - lanes_log2); }
    // The first state of vector v.
    __device__ __forceinline__ int state_of(int v) const { return ((v << lanes_log2) + part) * kVector; }
    // The row r of this lane, of a tile's rows.
    __device__ __forceinline__ int row_of(int r) const { return (r << (5 - lanes_log2)) + (lane >> lanes_log2); }
    __device__ __forceinline__ int own_tile() const { return part / kRows; }
    __device__ __forceinline__ int own_row() const { return own_tile() * tile_rows() + row_of(part % kRows); }
    // The value of the owner of this lane's row r.
    __device__ __forceinline__ float from_owner(float value, int tile, int r) const {
        return __shfl_sync(0xffffffffu, value, lane - part + tile * kRows + r);
    }
    // Adds up each of sums, which it overwrites, over the lanes of its row; n sums in n shuffles. A lane gets that of row
    // part % kRows: a tile's owners get theirs.
    __device__ __forceinline__ float sum_to_owners(float (&sums)[kRows]) const {
#pragma unroll
        for (int kept = kRows / 2; kept > 0; kept /= 2) {
            const bool upper = (lane & kept) != 0;
#pragma unroll
            for (int i = 0; i < kept; ++i) {
                const float given = upper ? sums[i] : sums[i + kept];
                sums[i] = (upper ? sums[i + kept] : sums[i]) + __shfl_xor_sync(0xffffffffu, given, kept);
            }
        }
        float sum = sums[0];
        for (int distance = kRows; distance >> lanes_log2 == 0; distance *= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        return sum;
    }
};

// Where a tile of states lies: row_of(0) at `first`, the lane's other rows `step` elements apart. Without `vectors` the kVector
// states of a lane are no aligned neighbours, or dstate is no multiple of them.
template <typename State>
struct StatePlace {
    State* first;
    int64_t step, dstate_stride;
    int rows_left, dstate;  // rows from the tile's first one on
    bool vectors = true;

    template <class Rows>
    __device__ __forceinline__ bool holds(const Rows& rows, int r, int v) const {
        return Rows::kWhole ? rows_left > 0 : rows.row_of(r) < rows_left && rows.state_of(v) < dstate;
    }
    template <class Rows>
    __device__ __forceinline__ State* at(const Rows& rows, int r, int v) const {
        if constexpr (Rows::kWhole) {
            return first + rows.part * Rows::kVector + (r * Rows::kVectors + v) * (32 * Rows::kVector);
        }
        return first + r * step + rows.state_of(v) * (Rows::kVector == 1 || !vectors ? dstate_stride : 1);
    }
    template <class Rows>
    __device__ __forceinline__ void next_tile(const Rows& rows) {
        first += Rows::kRows * step;
        rows_left -= rows.tile_rows();
    }
    template <class Rows>
    __device__ __forceinline__ void prefetch(const Rows& rows) const {
#pragma unroll
        for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
            for (int v = 0; v < Rows::kVectors; ++v) {
                if (holds(rows, r, v)) {
                    prefetch_to_L2(at(rows, r, v));
                }
            }
        }
    }
    // Zeros beyond headdim and dstate.
    template <class Rows>
    __device__ __forceinline__ void load(const Rows& rows, typename Rows::Tile& tile) const {
#pragma unroll
        for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
            for (int v = 0; v < Rows::kVectors; ++v) {
                tile[r][v] = packed_zero<State, Rows::kVector>();
                if (holds(rows, r, v)) {
                    if (vectors) {
                        tile[r][v] = packed_load<State, Rows::kVector>(at(rows, r, v));
                    } else {
                        tile[r][v] =
                            packed_gather<State, Rows::kVector>(at(rows, r, v), dstate_stride, dstate - rows.state_of(v));
                    }
                }
            }
        }
    }
    template <class Rows>
    __device__ __forceinline__ void store(const Rows& rows, int r, int v, const float* values) const {
        if (!holds(rows, r, v)) {
            return;
        }
        if constexpr (Rows::kVector == 1) {
            *at(rows, r, v) = from_float<State>(values[0]);
        } else if (vectors) {
            packed_store_once<State, Rows::kVector>(at(rows, r, v), pack<State, Rows::kVector>(values));
        } else {
            scatter<State, Rows::kVector>(at(rows, r, v), dstate_stride, dstate - rows.state_of(v), values);
        }
    }
};

// A tile's states from registers, rounded.
template <class Rows>
__device__ __forceinline__ void store_rows(const Rows& rows, const StatePlace<typename Rows::State>& place,
                                           const float (&h)[Rows::kRows][Rows::kStates]) {
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
#pragma unroll
        for (int v = 0; v < Rows::kVectors; ++v) {
            place.store(rows, r, v, h[r] + v * Rows::kVector);
        }
    }
}

// One step of some states of a row: h = decay h + dt_x B; returns C . h. With kTiedA `decay` is exp(dt A), else dt log2(e).
template <int kCount, bool kTiedA>
__device__ __forceinline__ float advance(float* h, float decay, float dt_x, const float* A, const float* B, const float* C) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        h[i] = fmaf(kTiedA ? decay : exp2_fast(decay * A[i]), h[i], dt_x * B[i]);
        sum = fmaf(C[i], h[i], sum);
    }
    return sum;
}

// The same where the row may end within these states: what lies beyond `left` can be NaN, and adds nothing.
template <int kCount>
__device__ __forceinline__ float advance_some(float* h, float decay, float dt_x, const float* A, const float* B, const float* C,
                                              bool tied_A, int left) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        h[i] = fmaf(tied_A ? decay : exp2_fast(decay * A[i]), h[i], dt_x * B[i]);
        sum = i < left ? fmaf(C[i], h[i], sum) : sum;
    }
    return sum;
}

}  // namespace mamba
