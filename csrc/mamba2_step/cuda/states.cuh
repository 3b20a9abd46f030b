// A warp's rows of states in a Mamba-2 layer's decode step: through a ring in shared memory, one step, and back.
#pragma once

#include "mamba2_step/cuda/inputs.cuh"
#include "state_update/cuda/ring.cuh"

namespace mamba {

// The warp's rows follow each other, in one head or in several: of this lane first and then each `row_step` of them.
template <class Rows, class Params>
struct Mamba2StepStates {
    using State = typename Rows::State;
    static constexpr int kVector = Rows::kVector, kRows = Rows::kRows, kVectors = Rows::kVectors;

    const Mamba2StepBlock<Params>& block;
    const Rows rows;
    const StateRing<Rows, kStepDepth> ring;
    int tiles, row_step, lane_row, dstate;
    int64_t lane_step, vector_step, dstate_stride;
    State *first, *next;  // of lane_row; of the next tile to be loaded
    int next_row, next_slot = 0;

    __device__ __forceinline__ Mamba2StepStates(const Mamba2StepBlock<Params>& block, unsigned char* memory)
        : block(block),
          rows(block.layout.lanes_log2),
          ring(memory + threadIdx.x / 32 * StateRing<Rows, kStepDepth>::kWarpBytes),
          row_step(32 >> block.layout.lanes_log2),
          dstate(static_cast<int>(block.p.dstate)),
          dstate_stride(Rows::kWhole ? 1 : block.p.state_dstate_stride) {
        const Params& p = block.p;
        const int first_row = static_cast<int>(threadIdx.x / 32) * block.layout.warp_tiles * rows.tile_rows();
        lane_row = first_row + rows.row_of(0);
        tiles = ceil_div(block.count - first_row, rows.tile_rows());
        tiles = tiles < block.layout.warp_tiles ? tiles : block.layout.warp_tiles;
        const uint32_t head = block.layout.headdim.quotient(block.first);
        first = static_cast<State*>(p.state) + block.batch * p.state_batch_stride +
                (block.group * block.layout.group_heads + head) * p.state_head_stride +
                (block.first - head * block.layout.headdim.divisor + lane_row) * p.state_dim_stride +
                rows.state_of(0) * dstate_stride;
        lane_step = row_step * p.state_dim_stride;
        vector_step = (kVector << block.layout.lanes_log2) * dstate_stride;
        next = first;
        next_row = lane_row;
    }
    __device__ __forceinline__ bool holds(int row, int v) const {
        return Rows::kWhole || (row < block.count && rows.state_of(v) < dstate);
    }
    // Vector v of row r of this lane, of a tile at `first_row`.
    __device__ __forceinline__ State* place_of(State* first_row, int r, int v) const {
        if constexpr (Rows::kWhole) {
            return first_row + (r * kVectors + v) * (32 * kVector);
        } else {
            return first_row + r * lane_step + v * vector_step;
        }
    }
    // Calls each(r, v) for what the lane has of the tile whose first row is `row`.
    template <class Each>
    __device__ __forceinline__ void of_tile(int row, const Each& each) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (holds(row + r * row_step, v)) {
                    each(r, v);
                }
            }
        }
    }
    // All tiles come as far as the L2.
    __device__ __forceinline__ void prefetch() const {
        if (rows.part % (kCacheLine / 16) != 0) {
            return;
        }
        State* place = first;
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            of_tile(lane_row + tile * kRows * row_step, [&](int r, int v) { prefetch_to_L2(place_of(place, r, v)); });
            place += kRows * lane_step;
        }
    }
    // Begins the copy of the next tile; not wanted: of nothing, which the wait counts too.
    __device__ __forceinline__ void load_tile(bool wanted) {
        if (wanted) {
            of_tile(next_row, [&](int r, int v) {
                const State* const from = place_of(next, r, v);
                if (Rows::kWhole || block.layout.vectors) {
                    ring.load(next_slot, r, v, from);
                } else {
                    ring.gather(next_slot, r, v, from, dstate_stride, dstate - rows.state_of(v));
                }
            });
            next += kRows * lane_step;
            next_row += rows.tile_rows();
            next_slot = ring.after(next_slot);
        }
        cp_async_commit_group();
    }
    // One step of vector v of a row; returns C . h.
    __device__ __forceinline__ float advance_vector(int slot, int r, int v, State* place, float2 decay_dt_x, const float* B,
                                                    const float* C, bool inside) const {
        float h[kVector];
        ring.read(slot, r, v, h);
        if constexpr (Rows::kWhole) {
            const float sum = advance<kVector, true>(h, decay_dt_x.x, decay_dt_x.y, nullptr, B, C);
            packed_store_once<State, kVector>(place, pack<State, kVector>(h));
            return sum;
        } else {
            const int left = inside ? dstate - rows.state_of(v) : 0;
            const float sum = advance_some<kVector>(h, decay_dt_x.x, decay_dt_x.y, h, B, C, true, left);
            if (inside && block.layout.vectors) {
                packed_store_once<State, kVector>(place, pack<State, kVector>(h));
            } else {
                ring.scatter(slot, r, v, place, dstate_stride, left, h);
            }
            return sum;
        }
    }
    // The step of all rows; adds C . h to their y in shared memory.
    __device__ __forceinline__ void advance_all() {
        float B[Rows::kStates], C[Rows::kStates];
#pragma unroll
        for (int i = 0; i < Rows::kStates; ++i) {
            const int n = rows.state_of(i / kVector) + i % kVector;
            B[i] = Rows::kWhole || n < dstate ? block.shared.BC[n] : 0.0f;
            C[i] = Rows::kWhole || n < dstate ? block.shared.BC[dstate + n] : 0.0f;
        }
        int slot = 0, row = lane_row;  // of the tile's first
        State* states = first;
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            float sums[kRows];
            cp_async_wait_group<kStepDepth - 1>();
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const int row_r = row + r * row_step;
                const float2 decay_dt_x =
                    Rows::kWhole || row_r < block.count ? block.shared.decay_dt_x[row_r] : make_float2(0.0f, 0.0f);
                sums[r] = 0.0f;
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    sums[r] += advance_vector(slot, r, v, place_of(states, r, v), decay_dt_x, B + v * kVector, C + v * kVector,
                                              holds(row_r, v));
                }
            }
            states += kRows * lane_step;
            slot = ring.after(slot);
            load_tile(tile + kStepDepth < tiles);
            const float sum = rows.sum_to_owners(sums);
            const int own = row + rows.part % kRows * row_step;
            if (rows.part < kRows && own < block.count) {
                block.shared.y[own] += sum;
            }
            row += rows.tile_rows();
        }
    }
};

}  // namespace mamba
