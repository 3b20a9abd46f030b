// Backward on Hopper, for 16-bit dtypes: backward.cuh with four warpgroups, whose products run on tensor cores that read tiles
// from shared memory themselves. They walk the items of a chunk, heads or 64 rows of their headdim, and share one interval
// between two of the block's barriers; while item n's states are taken, the pairs of item n + 1 are:
//
//     0: walk_for_dC              | 1: walk_for_dB              | 2: walk_pairs           | 3: help_walks
//     ----------------------------+-----------------------------+-------------------------+---------------------------------
//     y = C H                     | du = B dH'                  | R = x dout^T (n + 1)    | cp.async: x, dout of n + 1 + kAhead
//     dC += (entering dout) H     | dB += (adding x) dH'        | dG, sums of pairs       | bulk copies: decays, states
//     from_state = y . dout       | to_state = du . x           | M of n + 1 -> shared    | D of n + 1
//     gradients of steps of n - 1 | du += M dout; dx -> memory  | dD of n + 1             | H . dH'
//     =========================== __syncthreads(): the block's, by all four ==========================================
//
// Each role passes count + 3 of them: one before the first item's interval, in which the first pairs are taken, one an item,
// and two at the end: behind the last item, and behind the sum of dG over heads, through which dC and dB then go. mbarriers:
// BC_arrived for B and C, once; decays_arrived and states_arrived, a phase each time their stage is filled.
#pragma once

#include "ssd/cuda/backward_warpgroup_help.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// dC, and with it each step's share of the state before the chunk; also the gradients of steps, an item behind.
template <typename T, int kStates, int kSlices>
__device__ __forceinline__ void walk_for_dC(const BackwardWalk<T, kStates, kSlices>& walk) {
    auto& shared = walk.shared;
    const int lane = walk.lane;
    const int warp = walk.thread / 32;
    const int row = 16 * warp;
    const int t[2] = {row + lane / 4, row + lane / 4 + 8};
    const uint64_t C = tile_descriptor(shared.C, kBlock * 16);
    BackwardItem finished = walk.first;  // whose gradients of steps come next
    const auto store_gradients = [&](int number) {
        if (warp == number % 4) {
            walk.store_gradients(number, finished);
        }
        finished.advance(walk.row_tiles);
    };
    float dC[kStates / 8][4];
    set_to_zero(dC);
    mbarrier_wait_parity(&shared.BC_arrived, 0);
    __syncthreads();
    for (int number = 0; number < walk.count; ++number) {
        __syncthreads();  // an interval begins
        const T* const dout_tile = shared.dout(number) + BlockTile::at(row + lane % 16, lane / 16 * 8);
        const WarpgroupDecays& now = shared.decays_of(number);
        WarpgroupSums& sums = shared.sums_of(number);
        const uint64_t H = tile_descriptor(shared.H(number), kBlock * 16);
        float y[8][4];  // H C_t
        set_to_zero(y);
        walk.wait_for_states(number);
        warpgroup_fence_operand(y);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kStates / 16; ++k) {
            const int at = k / 4 * kBlock + k % 4 * kColumns16;
            wgmma<T, 0>(y, C + at, H + at);
        }
        wgmma_commit_group();
        Operand<T> weighted[4];
        walk.wait_for_decays(number);
        const float entering[2] = {now.entering[t[0]], now.entering[t[1]]};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            ldmatrix_x4(weighted[k].r[0], columns_on(dout_tile, k));
            weight_rows<T>(weighted[k], entering[0], entering[1]);
        }
        warpgroup_fence_operands(dC, weighted);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // exp(cs_t) H^T dout_t
            wgmma<T, 1>(dC, weighted[k].r[0], H + k * kRows16);
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();
        warpgroup_fence_operand(y);
        float dot[2] = {0.0f, 0.0f};
        add_dots<T>(dot, y, dout_tile);
        if (lane % 4 == 0) {
            sums.from_state[t[0]] = entering[0] * dot[0];
            sums.from_state[t[1]] = entering[1] * dot[1];
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operands(dC, weighted);
        if (number > 0) {  // now that there are registers
            store_gradients(number - 1);
        }
    }
    __syncthreads();
    store_gradients(walk.count - 1);
    __syncthreads();  // dG is there
    Operand<T> dG[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // its rows are steps s as PairedTile has them, and so are B's
        ldmatrix_x4_trans(dG[k].r[0],
                          shared.M_tiles + BlockTile::at(16 * k + lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8));
    }
    const uint64_t B = tile_descriptor(shared.B + walk.slice * SliceTiles<T, kStates, kSlices>::kB, kBlock * 16);
    warpgroup_fence_operands(dC, dG);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<T, 1>(dC, dG[k].r[0], B + k * kRows16);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dC);
    walk.store_matrix(walk.launch.dC, dC, t);
}

// The two other warpgroups: rows are steps s, of each warp two groups of eight in PairedTile's order.
struct PairedRows {
    int warp;
    int group[2];
    int s[2];                // of the lane's accumulators
    int s_of_lane, of_lane;  // step for ldmatrix_x4, and its place in a tile
    __device__ __forceinline__ PairedRows(int thread, int lane) : warp(thread / 32 % 4) {
        group[0] = warp;
        group[1] = kStepGroups - 1 - warp;
        s[0] = 8 * group[0] + lane / 4;
        s[1] = 8 * group[1] + lane / 4;
        s_of_lane = 8 * (lane % 16 < 8 ? group[0] : group[1]) + lane % 8;
        of_lane = BlockTile::at(s_of_lane, lane / 16 * 8);
    }
};

// dB and dx, and with them each step's share of the state after the chunk.
template <typename T, int kStates, int kSlices>
__device__ __forceinline__ void walk_for_dB(const BackwardWalk<T, kStates, kSlices>& walk) {
    using Tiles = SliceTiles<T, kStates, kSlices>;
    auto& shared = walk.shared;
    const int lane = walk.lane;
    const PairedRows rows(walk.thread, lane);
    const int(&s)[2] = rows.s;
    const uint64_t B = tile_descriptor(shared.B, kBlock * 16);
    // Of the block's slice, as descriptors count:
    const int slice_columns = walk.slice * (kStates / 64) * kBlock;
    const int dx_rows = walk.slice * kRows16 * (Tiles::kColumns / 16);
    const int dx_columns = walk.slice * kColumns16 * (Tiles::kColumns / 16);
    float dB[kStates / 8][4];
    set_to_zero(dB);
    mbarrier_wait_parity(&shared.BC_arrived, 0);
    BackwardItem item = walk.first;
    ItemPointer<T*> dx = walk.item_pointer(
        static_cast<T*>(walk.q.dx) + walk.batch * walk.q.dx_batch_stride + walk.chunk * kWarpgroupSteps * walk.q.dx_len_stride,
        walk.q.dx_head_stride);
    __syncthreads();
    for (int number = 0; number < walk.count; ++number) {
        __syncthreads();
        const WarpgroupDecays& now = shared.decays_of(number);
        WarpgroupSums& sums = shared.sums_of(number);
        const uint64_t M = tile_descriptor(shared.M(number), kBlock * 16);
        const uint64_t dout = tile_descriptor(shared.dout(number), kBlock * 16);
        const uint64_t dH = tile_descriptor(shared.dH(number), kBlock * 16);
        float du[Tiles::kColumns / 8][4];  // gradient of dt_s x_s
        set_to_zero(du);
        walk.wait_for_states(number);
        warpgroup_fence_operand(du);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSlices * kStates / 16; ++k) {  // dH' B_s
            const int at = k / 4 * kBlock + k % 4 * kColumns16;
            wgmma<T, 0>(du, B + at, dH + dx_rows + at);
        }
        wgmma_commit_group();
        walk.wait_for_decays(number);
        const float leaving[2] = {now.leaving[s[0]], now.leaving[s[1]]};
        const float adding[2] = {now.adding[s[0]], now.adding[s[1]]};
        const float dt[2] = {now.dt[s[0]], now.dt[s[1]]};
        Operand<T> weighted[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            ldmatrix_x4(weighted[k].r[0], columns_on(shared.x(number) + rows.of_lane, k));
            weight_rows<T>(weighted[k], adding[0], adding[1]);
        }
        warpgroup_fence_operands(dB, weighted);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // exp(cs_last - cs_s) dt_s dH'^T x_s
            wgmma<T, 1>(dB, weighted[k].r[0], dH + slice_columns + k * kRows16);
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();
        warpgroup_fence_operand(du);
        float dot[2] = {0.0f, 0.0f};
        add_dots<T>(dot, du, columns_on(shared.x(number) + rows.of_lane, walk.slice * (Tiles::kColumns / 16)));
        if (lane % 4 == 0) {
            sums.to_state[s[0]] = leaving[0] * dot[0];
            sums.to_state[s[1]] = leaving[1] * dot[1];
        }
        scale_rows(du, leaving[0], leaving[1]);
        warpgroup_fence_operand(du);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // sum_t L_ts G_ts dout_t
            wgmma<T, 1>(du, M + k * kColumns16, dout + dx_columns + k * kRows16);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        warpgroup_fence_operands(du, dB, weighted);
        scale_rows(du, dt[0], dt[1]);
        walk.store_dx(number, dx.at, walk.rows_of(item), du, rows.group, rows.s_of_lane);
        dx.advance(item.advance(walk.row_tiles));
    }
    __syncthreads();
    __syncthreads();  // dG is there
    Operand<T> dG[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        ldmatrix_x4(dG[k].r[0], shared.M_tiles + BlockTile::at(16 * rows.warp + lane % 16, 16 * k + lane / 16 * 8));
    }
    const uint64_t C = tile_descriptor(shared.C, kBlock * 16);
    warpgroup_fence_operands(dB, dG);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<T, 1>(dB, dG[k].r[0], C + k * kRows16);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dB);
    walk.store_matrix(walk.launch.dB, dB, s);
}

// M and what else pairs of steps give, an item ahead of the others; columns are steps t. Also dD.
template <typename T, int kStates, int kSlices>
__device__ __forceinline__ void walk_pairs(const BackwardWalk<T, kStates, kSlices>& walk) {
    auto& shared = walk.shared;
    const int lane = walk.lane;
    const PairedRows rows(walk.thread, lane);
    float G[8][4];  // B_s . C_t
    set_to_zero(G);
    mbarrier_wait_parity(&shared.BC_arrived, 0);
    warpgroup_fence_operand(G);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
        const uint64_t B = tile_descriptor(shared.B + slice * SliceTiles<T, kStates, kSlices>::kB, kBlock * 16);
        const uint64_t C = tile_descriptor(slice == walk.slice ? shared.C : shared.M_tiles, kBlock * 16);
#pragma unroll
        for (int k = 0; k < kStates / 16; ++k) {
            const int at = k / 4 * kBlock + k % 4 * kColumns16;
            wgmma<T, 0>(G, B + at, C + at);
        }
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    warpgroup_fence_operand(G);
    float dG[8][4];
    set_to_zero(dG);
    BackwardItem item = walk.first;
    ItemPointer<float*> dD = walk.item_pointer(
        walk.launch.dD + (walk.batch * walk.launch.chunks + walk.chunk) * walk.q.forward.nheads * walk.q.forward.headdim,
        walk.q.forward.headdim);
    __syncthreads();
    for (int number = 0; number < walk.count; ++number) {
        const uint64_t dout = tile_descriptor(shared.dout(number), kBlock * 16);
        Operand<T> x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            ldmatrix_x4(x[k].r[0], columns_on(shared.x(number) + rows.of_lane, k));
        }
        float R[8][4];  // x_s . dout_t
        set_to_zero(R);
        warpgroup_fence_operands(R, x);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            wgmma<T, 0>(R, x[k].r[0], dout + k * kColumns16);
        }
        wgmma_commit_group();
        walk.wait_for_decays(number);
        wgmma_wait_group<0>();
        warpgroup_fence_operands(R, x);
        Operand<T> M[4];
        mix_pairs<T>(M, dG, R, G, shared.decays_of(number), shared.sums_of(number), walk.slice == 0, rows.s, rows.warp, lane);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            stmatrix_x4(columns_on(shared.M(number) + BlockTile::at(16 * rows.warp + lane % 16, lane / 16 * 8), k), M[k].r[0]);
        }
        fence_proxy_async();
        if (walk.launch.dD != nullptr && walk.slice == 0) {
            store_dD<T>(dD.at, shared.dout(number), shared.x(number), walk.rows_of(item), rows.warp, lane);
        }
        dD.advance(item.advance(walk.row_tiles));
        __syncthreads();
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        Operand<T> sum;
        a_from_accumulators<T>(sum, dG[2 * k], dG[2 * k + 1]);
        stmatrix_x4(shared.M_tiles + BlockTile::at(16 * rows.warp + lane % 16, 16 * k + lane / 16 * 8), sum.r[0]);
    }
    __syncthreads();
}

#endif

template <typename T, int kStates, int kSlices>
__global__ void __launch_bounds__(kWarpgroupBackwardThreads, 1)
    ssd_backward_warpgroup_kernel(const MambaSsdBackward q, const BackwardLaunch launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    MAMBA_DYNAMIC_SHARED(1024, unsigned char, warpgroup_shared);
    const BackwardWalk<T, kStates, kSlices> walk(q, launch, warpgroup_shared);
    if (walk.thread >= 384) {
        setmaxnreg_dec<kHelperRegisters>();
        help_walks(walk);
    } else {
        setmaxnreg_inc<kWalkRegisters>();
        if (walk.thread < 128) {
            walk_for_dC(walk);
        } else if (walk.thread < 256) {
            walk_for_dB(walk);
        } else {
            walk_pairs(walk);
        }
    }
#else
    (void)q;
    (void)launch;
    __trap();
#endif
}

}  // namespace mamba
