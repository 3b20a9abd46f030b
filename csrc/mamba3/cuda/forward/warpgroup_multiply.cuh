// One of the two warpgroups of forward/warpgroup.cuh: it multiplies the tiles that the other one makes, for the rows of y of
// SISO, or for a state alone.
#pragma once

#include "mamba3/cuda/backward/gate.cuh"
#include "mamba3/cuda/forward/state.cuh"
#include "mamba3/cuda/forward/warpgroup_output.cuh"
#include "ssd/cuda/chunk_tile.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// M (row t, row s) is (q_t . k_s) weighted by what s adds to t, for the warp's 16 rows t, as operands of 16 rows s each; those
// behind the warp's own are zero. The weights are found while the tensor cores multiply. From rows of the tiles of 16 before
// the warp's own, the decay is that to the tile's last row, and from there on: neither overflows unless the decay of some pair
// does.
struct Mamba3PairWeights {
    static constexpr int kTiles = kMamba3ChunkRows / 16;
    const float* near;    // of the lane's first columns: the decay to the tile's last row, times scale
    float on[kTiles][2];  // from there to the lane's rows
    // In the warp's own tile: of columns and rows that are both among the first eight or the last, and of the first columns in
    // the last rows.
    float2 beside[2], below;

    __device__ __forceinline__ Mamba3PairWeights(const Mamba3ChunkValues& values, const float* own_near, int warp, int lane)
        : near(own_near + lane % 4 * 2) {
        const int row = lane / 4, column = lane % 4 * 2, t = 16 * warp + row;
        const float high[2] = {values.of[kMamba3High][t], values.of[kMamba3High][t + 8]},
                    low[2] = {values.of[kMamba3Low][t], values.of[kMamba3Low][t + 8]};
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
            if (k < warp) {
                const float last_high = values.of[kMamba3High][16 * k + 15], last_low = values.of[kMamba3Low][16 * k + 15];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    on[k][half] = exp2_fast((high[half] - last_high) + (low[half] - last_low));
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int s = 16 * warp + 8 * half + column;
            const float2 from_high = *reinterpret_cast<const float2*>(&values.of[kMamba3High][s]);
            const float2 from_low = *reinterpret_cast<const float2*>(&values.of[kMamba3Low][s]);
            const float2 scale = *reinterpret_cast<const float2*>(&values.of[kMamba3Scale][s]);
            const auto weight = [&](int to) {
                return make_float2(exp2_fast((high[to] - from_high.x) + (low[to] - from_low.x)) * scale.x,
                                   exp2_fast((high[to] - from_high.y) + (low[to] - from_low.y)) * scale.y);
            };
            if (half == 0) {
                below = weight(1);
            }
            const float gamma = values.of[kMamba3Gamma][t + 8 * half];
            const float2 earlier = weight(half);
            beside[half].x = column < row ? earlier.x : column == row ? gamma : 0.0f;
            beside[half].y = column + 1 < row ? earlier.y : column + 1 == row ? gamma : 0.0f;
        }
    }
    template <typename T>
    __device__ __forceinline__ void mix(Operand<T> (&M)[kTiles], const float (&products)[8][4], int warp) const {
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
            M[k].r[0][0] = M[k].r[0][1] = M[k].r[0][2] = M[k].r[0][3] = 0u;
            const auto set = [&](int half, int side, float x, float y) {
                const float(&own)[4] = products[2 * k + side];
                set_pair<T>(M[k], 2 * side + half, own[2 * half] * x, own[2 * half + 1] * y);
            };
            if (k == warp) {
                set(0, 0, beside[0].x, beside[0].y);
                set(1, 0, below.x, below.y);
                set(1, 1, beside[1].x, beside[1].y);
            } else if (k < warp) {
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const float2 from = *reinterpret_cast<const float2*>(near + 16 * k + 8 * side);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        set(half, side, from.x * on[k][half], from.y * on[k][half]);
                    }
                }
            }
        }
    }
};

// Where the multiplying warpgroup's state comes from and goes to.
template <int kStates>
struct Mamba3WalkState {
    float h[kStates / 8][4];

    template <bool kPairwise>
    __device__ __forceinline__ void load(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch, const Mamba3Block& block,
                                         bool adds_up_segments, int row, int lane) {
        const bool from_end = launch.direction < 0, first = !from_end && block.segment == 0;
        const float* from = from_end ? launch.backward.dfinal : first ? p.ssm_state : nullptr;
        from += from != nullptr ? block.state_index(p) : 0;
        if (adds_up_segments && block.segment > 0) {
            from = block.end_of(p, launch, block.segment - 1);
        }
        if (from != nullptr) {
            load_pair_state<kPairwise>(h, from, row, block.columns, static_cast<int>(p.dstate), lane);
        } else {
            set_to_zero(h);
        }
        if (first && p.ssm_state != nullptr && block.chunks > 0) {
            add_pairs_before<kPairwise>(h, p, block, 0, static_cast<int>(p.rank), row, lane);
        }
    }
    template <bool kPairwise>
    __device__ __forceinline__ void store(float* to, const MambaMamba3& p, const Mamba3Block& block, int row, int lane) const {
        store_pair_state<kPairwise>(to, h, row, block.columns, static_cast<int>(p.dstate), lane);
    }
    // To the tile that tensor cores and bulk copies read. at: the lane's place of stmatrix_x4.
    template <typename T>
    __device__ __forceinline__ void show(T* at) const {
#pragma unroll
        for (int k = 0; k < kStates / 16; ++k) {
            Operand<T> part;
            a_from_accumulators<T>(part, h[2 * k], h[2 * k + 1]);
            stmatrix_x4(columns_on(at, k), part.r[0]);
        }
        fence_proxy_async();
    }
};

// Begins sum += a b^T over kStates columns; a, b: descriptors of tiles of 64 rows.
template <typename T, int kStates>
__device__ __forceinline__ void begin_product_of_states(float (&sum)[8][4], uint64_t a, uint64_t b) {
    set_to_zero(sum);
    warpgroup_fence_operand(sum);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStates / 16; ++k) {
        const int at = k / 4 * kBlock + k % 4 * kColumns16;
        wgmma<T, 0>(sum, a + at, b + at);
    }
    wgmma_commit_group();
}

// x^T weighted by what the rows add to the state behind the chunk, for the warp's 16 columns of headdim.
template <typename T>
__device__ __forceinline__ void weigh_x(Operand<T> (&weighted)[kMamba3ChunkRows / 16], const T* x_tile, const float* adding,
                                        int row, int lane) {
    const int own = opaque(lane) & 31;
    const T* const from = x_tile + Mamba3XTile::at(own / 16 * 8 + own % 8, row + own / 8 % 2 * 8);
#pragma unroll
    for (int k = 0; k < kMamba3ChunkRows / 16; ++k) {
        ldmatrix_x4_trans(weighted[k].r[0], from + 16 * k * kMamba3StateRows);
        weight_a<T>(weighted[k], adding + 16 * k, own);
    }
}

// Begins sum += a b of 64 rows; b: of their tile.
template <typename T, int kGroups>
__device__ __forceinline__ void begin_product_of_rows(float (&sum)[kGroups][4], Operand<T> (&a)[kMamba3ChunkRows / 16],
                                                      uint64_t b) {
    warpgroup_fence_operands(sum, a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kMamba3ChunkRows / 16; ++k) {
        wgmma<T, 1>(sum, a[k].r[0], b + k * kRows16);
    }
    wgmma_commit_group();
}

// A walk that finds the rows of y; SISO. All of a block's chunks.
template <typename T, int kStates>
__device__ __forceinline__ void multiply_mamba3_rows(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                     const Mamba3Block& block, Mamba3WalkShared<T, kStates, 1, true>& shared) {
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0) & 3;
    const int row = 16 * warp;
    // Of stmatrix_x4 and ldmatrix_x4. Found again each time: it would be spilled.
    const auto own_rows = [&] {
        const int own = opaque(lane) & 31;
        return Mamba3XTile::at(row + own % 16, own / 16 * 8);
    };
    Mamba3WalkState<kStates> state;
    state.template load<true>(p, launch, block, true, row, lane);
    state.show(shared.state + own_rows());
    Mamba3Finisher<T> finisher(p, launch, block, shared.rows.z, warp, lane);
    for (int i = 0; i < block.chunks; ++i) {
        __syncthreads();  // the chunk's tiles are there
        const Mamba3ChunkValues& now = shared.values[i % 2];
        const T* const x_tile = shared.x[i % 2];
        const uint64_t q_rows = tile_descriptor(shared.stage[i % 2].q, kBlock * 16);
        const uint64_t k_rows = tile_descriptor(shared.stage[i % 2].k, kBlock * 16);
        const uint64_t x = tile_descriptor(x_tile, kBlock * 16), H = tile_descriptor(shared.state, kBlock * 16);
        float y[8][4];
        Operand<T> M[kMamba3ChunkRows / 16], weighted[kMamba3ChunkRows / 16];
        float products[8][4];
        begin_product_of_states<T, kStates>(products, q_rows, k_rows);  // q_t . k_s
        finisher.begin_z_copies();
        const Mamba3PairWeights weights(now, shared.rows.near[i % 2], warp, opaque(lane) & 31);
        wgmma_wait_group<0>();
        warpgroup_fence_operand(products);
        weights.mix(M, products, warp);
        begin_product_of_states<T, kStates>(y, q_rows, H);  // H q_t
        __syncwarp();                                       // or what follows is begun between the products
        weigh_x(weighted, x_tile, now.of[kMamba3Adding], row, lane);
        const float carry = now.of[kMamba3Entering][kMamba3ChunkRows - 1];
        scale_rows(state.h, carry, carry);
        const float above = now.of[kMamba3Entering][row + lane / 4], below = now.of[kMamba3Entering][row + lane / 4 + 8];
        wgmma_wait_group<0>();
        warpgroup_fence_operand(y);
        scale_rows(y, above, below);
        begin_product_of_rows(y, M, x);                    // M x
        begin_product_of_rows(state.h, weighted, k_rows);  // H' = carry H + x^T k
        wgmma_wait_group<1>();
        warpgroup_fence_operands(y, M);
        cp_async_wait_group<0>();
        __syncwarp();
        const T* const own_x = x_tile + own_rows();
        if (p.norm_weight != nullptr) {
            finish_normed_rows(p, finisher, y, own_x, shared.rows.norm_weight, lane);
        } else if (finisher.has_z) {
            finish_plain_rows<true>(finisher, y, own_x, lane);
        } else {
            finish_plain_rows<false>(finisher, y, own_x, lane);
        }
        __syncwarp();
        finisher.store_pieces(finisher.out, finisher.out_stride, finisher.left);
        finisher.next_chunk();
        wgmma_wait_group<0>();
        warpgroup_fence_operands(state.h, weighted);
        warpgroup_barrier_sync();  // all have read the state before the chunk
        state.show(shared.state + own_rows());
    }
    if (p.final_ssm != nullptr && block.segment == launch.segments - 1) {
        state.template store<true>(p.final_ssm + block.state_index(p), p, block, row, lane);
    }
}

// dy = dout silu(z) of a walk from the end, SISO, and in dz what is multiplied by y there later. The warpgroup that multiplies
// finds it, as the other one is busier: a chunk's rows are on their way to registers while the one before is multiplied.
template <typename T>
struct Mamba3GatedRows {
    static constexpr int kTogether = kMamba3Threads / 8, kPieces = kMamba3ChunkRows / kTogether;
    const T *dout, *z;  // the thread's first piece in the chunk to load
    T *dy, *dz;         // and in the one to store
    int64_t dout_stride, z_stride, dy_stride, dz_stride;
    int row, column;
    int left;  // steps of the chunk from the thread's first one on, or more; negative if its columns do not exist
    uint4 given[kPieces], gates[kPieces];

    __device__ __forceinline__ Mamba3GatedRows(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                               const Mamba3Block& block, int thread)
        : dout_stride(launch.backward.dout_len_stride),
          z_stride(p.z_len_stride),
          dy_stride(launch.backward.dy_stride),
          dz_stride(launch.backward.dz_step_stride),
          row(thread / 8),
          column(thread % 8 * 8) {
        const Mamba3WarpgroupBackward& from = launch.backward;
        const int64_t first = block.first_step(launch.chunks) + row, at = block.row0 + column;
        dout = static_cast<const T*>(from.dout) + block.range.row * from.dout_batch_stride + first * dout_stride +
               block.head * from.dout_head_stride + at;
        z = static_cast<const T*>(p.z) + block.range.row * p.z_batch_stride + first * z_stride + block.head * p.z_head_stride +
            at;
        const int64_t step = block.range.row * p.seqlen + first;
        dy = static_cast<T*>(from.dy) + step * dy_stride + block.launch_head * p.headdim + at;
        dz = static_cast<T*>(from.dz) + step * dz_stride + block.head * p.headdim + at;
        left = column < block.columns ? static_cast<int>(block.range.begin + block.range.seqlen - first) : INT32_MIN / 2;
    }
    // Begins to load a chunk's, which the next one is before.
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            given[i] = gates[i] = make_uint4(0u, 0u, 0u, 0u);
            if (i * kTogether < left) {
                given[i] = *reinterpret_cast<const uint4*>(dout + i * kTogether * dout_stride);
                gates[i] = *reinterpret_cast<const uint4*>(z + i * kTogether * z_stride);
            }
        }
        dout -= kMamba3ChunkRows * dout_stride;
        z -= kMamba3ChunkRows * z_stride;
        left += kMamba3ChunkRows;
    }
    __device__ __forceinline__ void finish(T* tile) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            gate_piece_backward<T>(given[i], gates[i]);
            *reinterpret_cast<uint4*>(tile + Mamba3XTile::at(row, column) + i * kTogether * 64) = given[i];
            if (i * kTogether < left - kMamba3ChunkRows) {  // begin() has gone on
                *reinterpret_cast<uint4*>(dy + i * kTogether * dy_stride) = given[i];
                *reinterpret_cast<uint4*>(dz + i * kTogether * dz_stride) = gates[i];
            }
        }
        dy -= kMamba3ChunkRows * dy_stride;
        dz -= kMamba3ChunkRows * dz_stride;
    }
};

// A walk of the state alone (kMamba3States). All of a block's chunks.
template <typename T, int kStates, int kRanks>
__device__ __forceinline__ void multiply_mamba3_states(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                       const Mamba3Block& block,
                                                       Mamba3WalkShared<T, kStates, kRanks, false>& shared) {
    constexpr bool kPairwise = kRanks == 1;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0) & 3;
    const int row = 16 * warp;
    const bool from_end = launch.direction < 0, keeps = launch.backward.states != nullptr;
    const auto own_rows = [&] {
        const int own = opaque(lane) & 31;
        return Mamba3XTile::at(row + own % 16, own / 16 * 8);
    };
    Mamba3WalkState<kStates> state;
    state.template load<kPairwise>(p, launch, block, false, row, lane);
    T* kept = static_cast<T*>(launch.backward.states) + (block.slot * block.tiles + block.tile) * (kMamba3StateRows * kStates);
    if (keeps) {
        state.show(shared.state + own_rows());
    }
    Mamba3GatedRows<T> dy(p, launch, block, static_cast<int>(threadIdx.x));
    const auto make_dy = [&](int i) {  // of a chunk, and begins to load the next one's
        if (kRanks == 1 && from_end && i < block.chunks) {
            dy.finish(shared.x[i % 2]);
            if (i + 1 < block.chunks) {
                dy.begin();
            }
        }
    };
    if (kRanks == 1 && from_end && block.chunks > 0) {
        dy.begin();
    }
    make_dy(0);
    float carried = 1.0f;
    for (int i = 0; i < block.chunks; ++i) {
        __syncthreads();  // the chunk's tiles are there
        if (keeps && threadIdx.x == 0) {
            cp_async_bulk_store(kept, shared.state, kMamba3StateRows * kStates * static_cast<int>(sizeof(T)));
        }
        kept += launch.direction * block.tiles * (kMamba3StateRows * kStates);
        const Mamba3ChunkValues& now = shared.values[i % 2];
        const float carry = now.of[kMamba3Entering][kMamba3ChunkRows - 1];
        carried *= carry;
        Operand<T> weighted[kMamba3ChunkRows / 16];
        weigh_x(weighted, shared.x[i % 2], now.of[kMamba3Adding], row, lane);
        scale_rows(state.h, carry, carry);
        begin_product_of_rows(state.h, weighted, tile_descriptor(shared.stage[i % 2].k, kBlock * 16));
        make_dy(i + 1);
        wgmma_wait_group<0>();
        warpgroup_fence_operands(state.h, weighted);
        if (keeps) {
            if (threadIdx.x == 0) {
                cp_async_bulk_wait_group_read();
            }
            warpgroup_barrier_sync();  // the state has been copied
            state.show(shared.state + own_rows());
        }
    }
    if (keeps) {
        if (launch.backward.dinitial != nullptr) {
            state.template store<kPairwise>(launch.backward.dinitial + block.state_index(p), p, block, row, lane);
        }
    } else {
        state.template store<kPairwise>(block.end_of(p, launch, block.segment), p, block, row, lane);
        block.store_decay(p, launch, carried);
    }
}

#endif

}  // namespace mamba
