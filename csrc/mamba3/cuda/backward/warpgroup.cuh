// The gradients of a chunk (chunk_gradients.cuh) on Hopper, for SISO and for MIMO of rank 4: a block of four warpgroups walks
// heads, or 64 rows of their headdim (items). Products are on tensor cores that read tiles from shared memory themselves. An
// item's phases:
//
//  warps 0-7: dq                            warps 8-15: dk, dx
//  G = q k^T, R = dy x^T          wgmma     dk = x dH', dx = k dH'^T                        wgmma
//  W G, W R as tiles, their sums            H . dH', sums with k, D dy
//    warp 5: the next item's bulk copies
//  dq = dy H; SISO: y = q H^T     wgmma
//  ---- 1: the tiles of pairs are complete ----
//  dq += W R k; SISO: y += W G x  wgmma     dk += (W R)^T q, dx += (W G)^T dy               wgmma
//    the next item's rows begin to come
//  SISO: dz from y
//  ---- 2: all tiles have been read but those of q and k ----
//  SISO: dz to where dy was                 dx to shared memory
//  what angles get of q, dq back            what angles get of k, dk back
//    warps 4-7, 12-15, whose columns angles turn less often: the next item's step weights
//  ---- 3: dx and the angles' parts are there; the next item's copies have come ----
//  all: the next item's x; biases; dv, dz, mimo_v; the angles' parts to memory; q and k of the next item rotated
//  ---- 4: q and k of the next item are complete ----
//
// Every warp passes each of the four barriers (__syncthreads) once an item, the last item without the fourth; a block passes
// four more before its first item, and one behind the last. The states, the values of steps and the biases come as bulk copies:
// each of the two places of an item has an mbarrier, whose parity every thread waits for once an item. Warps 4 and 5, whose
// pairs are all of later steps, write the sums of the item before instead.
//
// Registers: 128 a thread, all that 512 threads can have. A thread holds 32 sums over heads, 32 of the item's dq or dk, and 32
// of pairs, or 16 of dx or y.
#pragma once

#include "mamba3/cuda/backward/warpgroup_products.cuh"
#include "mamba3/cuda/backward/warpgroup_store.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The gradient of the final k, which is the last step's.
template <typename T, int kRank>
__device__ __forceinline__ void add_final(float (&dk)[8][4], const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item) {
    const MambaMamba3& p = walk.p();
    const Mamba3Part<T> part(walk.stand());
    const float* const from = walk.shared.places.dfinal_k + item.slot * p.dstate;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = part.t[i / 2] - (walk.shared.places.rows - kRank);
            const int column = 64 * part.half + 8 * j + part.lane % 4 * 2 + i % 2;
            if (r >= 0 && r < kRank && column < walk.dstate()) {
                dk[j][i] += from[r * p.nheads * p.dstate + walk.element_of(column)];
            }
        }
    }
}

// dk of an item, before it is rotated back; dx goes to shared memory.
template <typename T, int kRank>
__device__ __forceinline__ void find_dk_and_dx(float (&dk)[8][4], const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    Shared& shared = walk.shared;
    const Mamba3Part<T> part(walk.stand());
    float dx[4][4];
    find_dk<T>(dk, dx, shared, item, part, walk.D_of(item));
    if (shared.places.dfinal_k != nullptr && item.tile == 0) {
        add_final<T>(dk, walk, item);
    }
    __syncthreads();  // all tiles have been read but those of q and k
    float* const at = shared.dx() + part.t[0] * Shared::kDxPitch + 32 * part.half + part.lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        *reinterpret_cast<float2*>(at + 8 * j) = make_float2(dx[j][0], dx[j][1]);
        *reinterpret_cast<float2*>(at + 8 * Shared::kDxPitch + 8 * j) = make_float2(dx[j][2], dx[j][3]);
    }
}

// dq or dk (of_k) rotated back, added to the sums over heads and, by column, to the biases'.
template <typename T, int kRank>
__device__ __forceinline__ void rotate_item_back(float (&d)[8][4], float (&sum)[8][4], const Mamba3Walk<T, kRank>& walk,
                                                 const Mamba3Item& item, bool of_k) {
    using Shared = Mamba3WarpgroupShared<T>;
    Shared& shared = walk.shared;
    const Mamba3Part<T> part(walk.stand());
    const T* const tile = (of_k ? shared.k : shared.q) + part.half * Shared::kBlock;
    float* const dturns = shared.dturns(item.number, of_k);
    float pairs[16];
    if (32 * part.half < walk.angles()) {
        turn_back<true>(walk, d, sum, pairs, tile, dturns, part.half, part.row, part.lane);
    } else {
        turn_back<false>(walk, d, sum, pairs, tile, dturns, part.half, part.row, part.lane);
    }
    float* const to = shared.bias_parts(item.number) + ((of_k ? 4 : 0) + part.warp) * kRank * Shared::kStates;
    sum_rows(walk, pairs, to + 64 * part.half, part.lane);
}

// The sums over heads of dq or dk: whole, or a split's partial sum.
template <typename T, int kRank>
__device__ __forceinline__ void store_matrix(const float (&sum)[8][4], const Mamba3Walk<T, kRank>& walk, bool of_k) {
    const MambaMamba3& p = walk.p();
    const Mamba3BackwardLaunch& launch = walk.launch;
    const Mamba3Part<T> part(walk.stand());
    const int64_t split = blockIdx.x % launch.plan.splits, block = blockIdx.x / launch.plan.splits;
    const Mamba3Chunk chunk = find_chunk(p, launch.chunks, block / p.ngroups);
    const int64_t row_stride = p.ngroups * p.dstate;
    const int64_t row = (split * p.batch * p.seqlen + chunk.row * p.seqlen + chunk.first) * p.rank + part.row;
    const int64_t at = row * row_stride + block % p.ngroups * p.dstate;
    const int column0 = 64 * part.half, rows = walk.shared.places.rows - part.row;
    if (launch.plan.whole) {
        store_whole(walk, static_cast<T*>(of_k ? walk.q.dk : walk.q.dq) + at, row_stride, sum, rows, column0, part.lane);
    } else {
        const Mamba3BackwardWorkspace& w = launch.plan.workspace;
        store_sum<4>(launch.at<float>(of_k ? w.dk_parts : w.dq_parts) + at + column0, row_stride, sum, rows,
                     walk.dstate() - column0, launch.first_head > 0, part.lane);
    }
}

// All items of a block, whose chunk has steps.
template <typename T, int kRank>
__device__ __forceinline__ void find_chunk_gradients(const Mamba3Walk<T, kRank>& walk) {
    using Shared = Mamba3WarpgroupShared<T>;
    const MambaMamba3& p = walk.p();
    Shared& shared = walk.shared;
    const bool of_k = walk.stand().warp >= Shared::kWarps / 2;
    const auto store_terms = [&](const Mamba3Item& of) {
        const int64_t at = of.tile * p.batch * p.seqlen * p.nheads + of.slot;
        constexpr int kEach = kRank > 1 ? 1 : 2;  // of 64 steps, or 16
        store_step_terms<Mamba3WarpgroupSums, kEach>(shared.places.terms + at, p.nheads, shared.sums[of.number % 2],
                                                     shared.steps[of.number % 2], shared.places.steps, kRank,
                                                     walk.stand().lane);
    };
    const auto store_sums = [&](const Mamba3Item& of) {
        if (walk.stand().warp % 2 == 0) {
            store_terms(of);
        } else {
            store_angle_totals(walk, of);
            if (kRank == 1) {
                const float* const own = shared.D[of.number % 2] + walk.stand().lane;
                const float sum = add_over_warp(own[0] + own[32]);
                if (walk.stand().lane == 0) {
                    shared.places.D[of.tile * p.nheads + of.slot] = sum;
                }
            }
        }
    };
    const auto begin_bulk_copies = [&](const Mamba3Item& of) {
        if (walk.stand().thread == 5 * 32) {
            walk.begin_bulk_copies(of);
        }
    };
    const auto prepare = [&](const Mamba3Item& of) {
        const Mamba3Stand own = walk.stand();
        if (own.warp / 4 % 2 != 0) {
            walk.wait_for_copies(of);
            walk.prepare(of, own.warp / 8 * 2 + own.warp % 4 / 2, own.thread % Shared::kRows);
        }
    };
    Mamba3Item item = walk.first;
    walk.load_group();
    begin_bulk_copies(item);
    if (!of_k) {
        if (kRank == 1) {
            begin_dz_copies(walk, item);
        }
        walk.begin_row_copies(item);
    }
    cp_async_wait_group<0>();
    prepare(item);
    __syncthreads();
    Mamba3WarpAngles<Shared::kWarpRows / kRank> angles;
    load_angles(angles, walk, item, 0);
    walk.wait_for_copies(item);
    walk.project_x(item);
    turn(walk, item, angles);
    fence_proxy_async();
    __syncthreads();
    Mamba3Item before = item;
    float sum[8][4];  // of dq or dk, over heads
    set_to_zero(sum);
    while (true) {  // the item's q and k are complete, and all of the item before is free
        const bool more = item.number + 1 < walk.count;
        const Mamba3Item next = item.next(walk.row_tiles());
        float d[8][4];
        if (!of_k) {
            const auto begin_row_copies = [&]() {
                if (more) {
                    walk.begin_row_copies(next);
                }
            };
            const auto begin_dz = [&]() {
                if (more) {
                    begin_dz_copies(walk, next);
                }
            };
            Operand<T> dz[2];
            find_dq(d, dz, walk, item, begin_row_copies, begin_dz, [&]() {
                if (more) {
                    begin_bulk_copies(next);
                }
                if (item.number > 0) {
                    store_sums({item.number - 1, before.slot, before.tile});  // or before.number takes a register
                }
            });
            __syncthreads();  // all tiles have been read but those of q and k
            if constexpr (kRank == 1) {
                const Mamba3Part<T> part(walk.stand());
                T* const to = shared.items[item.number % 2].dy + part.of_lane;
                stmatrix_x4(columns_on(to, 2 * part.half), dz[0].r[0]);
                stmatrix_x4(columns_on(to, 2 * part.half + 1), dz[1].r[0]);
            }
        } else {
            find_dk_and_dx(d, walk, item);
        }
        rotate_item_back(d, sum, walk, item, of_k);
        if (more) {
            prepare(next);
        }
        cp_async_wait_group<0>();  // of the next item
        __syncthreads();
        if (more) {
            load_angles(angles, walk, next, 0);
            walk.wait_for_copies(next);
            walk.project_x(next);
        }
        store_bias(walk, item);
        store_dv(walk, item);
        store_dz(walk, item);
        store_dturns(walk, item);
        if (!more) {
            break;
        }
        turn(walk, next, angles);
        fence_proxy_async();
        __syncthreads();
        before = item;
        item = next;
    }
    __syncthreads();
    if (walk.stand().warp < 2) {
        store_sums(item);
    }
    store_matrix(sum, walk, of_k);
}

#endif

template <typename T, int kRank>
__global__ void __launch_bounds__(kMamba3BackwardThreads, 1)
    mamba3_backward_warpgroup_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Shared = Mamba3WarpgroupShared<T>;
    MAMBA_DYNAMIC_SHARED(1024, unsigned char, mamba3_backward_warpgroup_shared);
    Shared& shared = *reinterpret_cast<Shared*>(mamba3_backward_warpgroup_shared);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const Mamba3Walk<T, kRank> walk(q, launch, shared);
    if (threadIdx.x == 0) {
        walk.find_places();
        mbarrier_init(&shared.barriers[0]);
        mbarrier_init(&shared.barriers[1]);
    }
    for (int i = threadIdx.x; i < 2 * kMamba3WarpgroupRank * Shared::kStates; i += kMamba3BackwardThreads) {
        reinterpret_cast<float*>(shared.bias)[i] = 0.0f;
    }
    fence_proxy_async();
    __syncthreads();
    if (shared.places.steps > 0) {
        find_chunk_gradients(walk);
        return;
    }
    for (Mamba3Item item = walk.first; item.number < walk.count; item = item.next(walk.row_tiles())) {
        store_nothing(walk, item);
    }
#else
    (void)q;
    (void)launch;
    __trap();
#endif
}

}  // namespace mamba
