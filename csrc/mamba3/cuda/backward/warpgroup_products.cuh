// The products of an item in warpgroup.cuh, whose drawing says when they run: dq, dk and dx before they are turned back, and
// SISO's y.
#pragma once

#include "mamba3/cuda/backward/warpgroup_pairs.cuh"
#include "mamba3/cuda/backward/warpgroup_rotate.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a step's row has of the state and of itself: sums times scale, plus D times the row of a tile, of half of its columns.
template <typename T>
__device__ __forceinline__ void scale_and_add_rows(float (&sums)[4][4], const float (&scale)[2], float D, const T* tile,
                                                   const Mamba3Part<T>& part) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        Operand<T> own;
        ldmatrix_x4(own.r[0], columns_on(tile + part.of_lane, 2 * part.half + k));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 value = unpack2<T>(own.r[0][i]);
            float(&sum)[4] = sums[2 * k + i / 2];
            sum[i % 2 * 2] = fmaf(scale[i % 2], sum[i % 2 * 2], D * value.x);
            sum[i % 2 * 2 + 1] = fmaf(scale[i % 2], sum[i % 2 * 2 + 1], D * value.y);
        }
    }
}

// Starts to copy what times y is dz of an item: a warp what it reads itself.
template <typename T, int kRank>
__device__ __forceinline__ void begin_dz_copies(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item) {
    const Mamba3Part<T> part(walk.stand());
    const Mamba3ChunkPlaces<T>& places = walk.shared.places;
    const int column = 32 * part.half + part.lane % 4 * 8;
    const T* const from = places.dz + (item.slot * static_cast<int>(walk.p().headdim) + item.row0() + column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const bool exists = part.t[i] < places.steps && column < walk.columns(item);
        cp_async<16>(walk.shared.dz + Mamba3Part<T>::Tile::at(part.t[i], column),
                     exists ? from + part.t[i] * walk.q.dz_step_stride : places.dz, exists);
    }
    cp_async_commit_group();
}

// dq of an item, before it is turned back, and SISO's dz, for which y is found again. What the state gives comes behind the
// pairs, which need the registers. begin_copies: while the last products run; begin_dz: then, when the warp has read its part
// of shared.dz. meanwhile: what the two warps without pairs do.
template <typename T, int kRank, typename Copies, typename DzCopies, typename Meanwhile>
__device__ __forceinline__ void find_dq(float (&dq)[8][4], Operand<T> (&dz)[2], const Mamba3Walk<T, kRank>& walk,
                                        const Mamba3Item& item, const Copies& begin_copies, const DzCopies& begin_dz,
                                        const Meanwhile& meanwhile) {
    Mamba3WarpgroupShared<T>& shared = walk.shared;
    const Mamba3Part<T> part(walk.stand());
    constexpr int kTileBlock = Mamba3WarpgroupShared<T>::kBlock;
    const auto& tiles = shared.items[item.number % 2];
    constexpr int kHalf = 32 * 64;  // rows of a tile
    const uint64_t dy = block_descriptor(tiles.dy);
    {
        const uint64_t q = block_descriptor(shared.q), k_tile = block_descriptor(shared.k + part.half * kHalf);
        const uint64_t x = block_descriptor(tiles.x + part.half * kHalf);
        float G[4][4], R[4][4];
        set_to_zero(G);
        set_to_zero(R);
        warpgroup_fence_operands(G, R);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int at = k / 4 * kBlock + k % 4 * kColumns16;
            wgmma<T, 0>(G, q + at, k_tile + at);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            wgmma<T, 0>(R, dy + k * kColumns16, x + k * kColumns16);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        warpgroup_fence_operands(G, R);
        const int s0 = 32 * part.half;
        if (s0 >= part.row + 16) {  // a step's rows lie within 16
            mix_nothing<T>(shared, item, part);
            meanwhile();
        } else {
            mix_rows<T>(shared, item, part, G, R, kRank);
        }
    }
    fence_proxy_async();
    const uint64_t state = block_descriptor(tiles.state + part.half * kTileBlock);
    set_to_zero(dq);
    warpgroup_fence_operand(dq);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<T, 1>(dq, dy + k * kColumns16, state + k * kRows16);
    }
    wgmma_commit_group();
    const float D = kRank == 1 ? walk.D_of(item) : 0.0f;
    float y[4][4];
    if constexpr (kRank == 1) {
        const uint64_t q = block_descriptor(shared.q), H = block_descriptor(tiles.state + part.half * kHalf);
        set_to_zero(y);
        warpgroup_fence_operand(y);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int at = k / 4 * kBlock + k % 4 * kColumns16;
            wgmma<T, 0>(y, q + at, H + at);
        }
        wgmma_commit_group();
    }
    wgmma_wait_group<kRank == 1 ? 1 : 0>();
    warpgroup_fence_operand(dq);
    float dot[2] = {0.0f, 0.0f};
    add_dots<T>(dot, dq, static_cast<const T*>(shared.q) + part.half * kTileBlock + part.of_lane);
    const ChunkSteps<kWarpgroupSteps>& steps = shared.steps[item.number % 2];
    const float entering[2] = {steps.entering[part.t[0]], steps.entering[part.t[1]]};
    if (part.lane % 4 == 0) {
        shared.sums[item.number % 2].from_state[part.half][part.t[0]] = entering[0] * dot[0];
        shared.sums[item.number % 2].from_state[part.half][part.t[1]] = entering[1] * dot[1];
    }
    scale_rows(dq, entering[0], entering[1]);
    if constexpr (kRank == 1) {
        wgmma_wait_group<0>();
        warpgroup_fence_operand(y);
        scale_and_add_rows<T>(y, entering, D, tiles.x, part);
    }
    __syncthreads();  // what is of pairs is complete
    const uint64_t slopes = block_descriptor(shared.slopes);
    const uint64_t k_block = block_descriptor(shared.k + part.half * kTileBlock);
    if constexpr (kRank == 1) {
        warpgroup_fence_operand(y);
    }
    warpgroup_fence_operand(dq);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<T, 1>(dq, slopes + k * kColumns16, k_block + k * kRows16);
    }
    if constexpr (kRank == 1) {
        const uint64_t weights = block_descriptor(shared.weights_transposed);
        const uint64_t x = block_descriptor(tiles.x + part.half * 32);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            wgmma_transposed<T, 1>(y, weights + k * kRows16, x + k * kRows16);
        }
    }
    wgmma_commit_group();
    begin_copies();
    if constexpr (kRank == 1) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            ldmatrix_x4(dz[k].r[0], columns_on(shared.dz + part.of_lane, 2 * part.half + k));
        }
        __syncwarp();
        begin_dz();
    }
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dq);
    if constexpr (kRank == 1) {
        warpgroup_fence_operand(y);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 slope = unpack2<T>(dz[k].r[0][i]);
                const float(&own)[4] = y[2 * k + i / 2];
                set_pair<T>(dz[k], i, slope.x * own[i % 2 * 2], slope.y * own[i % 2 * 2 + 1]);
            }
        }
    }
}

// H . dH', a share of each of the warps that have dk: of 16 rows and half of the columns the diagonal of H dH'^T.
template <typename T>
__device__ __forceinline__ void add_state_products(Mamba3WarpgroupShared<T>& shared, const Mamba3Item& item,
                                                   const Mamba3Part<T>& part) {
    using Shared = Mamba3WarpgroupShared<T>;
    const auto& tiles = shared.items[item.number % 2];
    const int lane = part.lane;
    const T* const H = tiles.state + part.half * Shared::kBlock + part.of_lane;
    const T* const dH = tiles.dstate + part.half * Shared::kBlock +
                        SwizzledTile<kWarpgroupSteps>::at(part.row + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
    float left[4] = {0.0f, 0.0f, 0.0f, 0.0f}, right[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        Operand<T> a, b;
        ldmatrix_x4(a.r[0], columns_on(H, k));
        ldmatrix_x4(b.r[0], columns_on(dH, k));
        multiply_add<T>(left, a, b, 0);
        multiply_add<T>(right, a, b, 1);
    }
    const float2 both = diagonal(left, right, lane);
    const float sum = add_over_column(add_over_row(both.x + both.y));
    if (lane == 0) {
        shared.sums[item.number % 2].state_product[4 * part.half + part.warp] = sum;
    }
}

// dk of an item, before it is turned back, and dx.
template <typename T>
__device__ __forceinline__ void find_dk(float (&dk)[8][4], float (&dx)[4][4], Mamba3WarpgroupShared<T>& shared,
                                        const Mamba3Item& item, const Mamba3Part<T>& part, float D) {
    constexpr int kTileBlock = Mamba3WarpgroupShared<T>::kBlock;
    const auto& tiles = shared.items[item.number % 2];
    const ChunkSteps<kWarpgroupSteps>& steps = shared.steps[item.number % 2];
    const uint64_t x = block_descriptor(tiles.x);
    const uint64_t dstate = block_descriptor(tiles.dstate + part.half * (32 * 64)),
                   dstate_block = block_descriptor(tiles.dstate + part.half * kTileBlock);
    const uint64_t k_tile = block_descriptor(shared.k);
    set_to_zero(dk);
    warpgroup_fence_operand(dk);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<T, 1>(dk, x + k * kColumns16, dstate_block + k * kRows16);
    }
    wgmma_commit_group();
    set_to_zero(dx);
    warpgroup_fence_operand(dx);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const int at = k / 4 * kBlock + k % 4 * kColumns16;
        wgmma<T, 0>(dx, k_tile + at, dstate + at);
    }
    wgmma_commit_group();
    add_state_products(shared, item, part);
    wgmma_wait_group<1>();
    warpgroup_fence_operand(dk);
    float dot[2] = {0.0f, 0.0f};
    add_dots<T>(dot, dk, static_cast<const T*>(shared.k) + part.half * kTileBlock + part.of_lane);
    const float adding[2] = {steps.adding[part.t[0]], steps.adding[part.t[1]]};
    if (part.lane % 4 == 0) {
        shared.sums[item.number % 2].to_state[part.half][part.t[0]] = steps.leaving[part.t[0]] * dot[0];
        shared.sums[item.number % 2].to_state[part.half][part.t[1]] = steps.leaving[part.t[1]] * dot[1];
    }
    scale_rows(dk, adding[0], adding[1]);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dx);
    scale_and_add_rows<T>(dx, adding, D, tiles.dy, part);
    __syncthreads();  // what is of pairs is complete
    const uint64_t slopes = block_descriptor(shared.slopes), weights = block_descriptor(shared.weights_transposed);
    const uint64_t q_block = block_descriptor(shared.q + part.half * kTileBlock);
    const uint64_t dy = block_descriptor(tiles.dy + part.half * 32);
    warpgroup_fence_operands(dk, dx);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma_transposed<T, 1>(dk, slopes + k * kRows16, q_block + k * kRows16);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<T, 1>(dx, weights + k * kColumns16, dy + k * kRows16);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    warpgroup_fence_operands(dk, dx);
}

#endif

}  // namespace mamba
