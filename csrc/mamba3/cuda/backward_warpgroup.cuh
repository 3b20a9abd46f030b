// backward.cuh on Hopper, for 16-bit dtypes, 65 to 128 states, ranks 1, 2 and 4, angles that heads share, no seq_idx: four
// warpgroups with products on tensor cores that read tiles from shared memory themselves. Two have dq, half of the columns
// each, and take pairs of rows; two have dk and dx. Between products all threads turn, and go to and from memory. The tiles of
// the item after, a head or 64 rows of its headdim, are on their way meanwhile.
#pragma once

#include "mamba3/cuda/backward_warpgroup_store.cuh"
#include "mamba3/cuda/backward_warpgroup_turns.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where a warp of one of four warpgroups stands: 16 rows, and half of the columns.
template <typename T>
struct Mamba3Part {
    using Tile = SwizzledTile<kWarpgroupSteps>;
    int lane, warp, row, half;
    int t[2];     // rows of the lane's accumulators
    int of_lane;  // place of its row for load_matrices
    __device__ __forceinline__ explicit Mamba3Part(const Mamba3Walk<T>& walk)
        : lane(walk.lane), warp(walk.warp % 4), row(16 * (walk.warp % 4)), half(walk.warp / 4 % 2) {
        t[0] = row + lane / 4;
        t[1] = t[0] + 8;
        of_lane = Tile::at(row + lane % 16, lane / 16 * 8);
    }
};
__device__ __forceinline__ uint64_t block_descriptor(const void* tile) {
    return tile_descriptor(tile, kBlock * 16);
}

// W R and W G of 16 columns s as tiles.
template <typename T>
__device__ __forceinline__ void store_mixed(Mamba3WarpgroupShared<T>& shared, const Mamba3Part<T>& part, int k,
                                            const Operand<T>& slope, const Operand<T>& weight) {
    const int row = 32 * part.half + 16 * k + part.lane / 16 * 8 + part.lane % 8;
    const int transposed = SwizzledTile<kWarpgroupSteps>::at(row, part.row + part.lane / 8 % 2 * 8);
    store_matrices(columns_on(shared.slopes + part.of_lane, 2 * part.half + k), slope.r[0]);
    store_matrices_transposed(shared.slopes_transposed + transposed, slope.r[0]);
    store_matrices_transposed(shared.weights_transposed + transposed, weight.r[0]);
}

// Of pairs of rows (t, s), whose columns s are half of the chunk's: W R and W G as tiles, and the sums of steps.
// kAllEarlier: every s is of an earlier step than every t.
template <bool kAllEarlier, typename T>
__device__ __forceinline__ void mix_rows(Mamba3WarpgroupShared<T>& shared, const Mamba3Item& item, const Mamba3Part<T>& part,
                                         const float (&G)[4][4], const float (&R)[4][4], int rank) {
    const ChunkSteps<kWarpgroupSteps>& steps = shared.steps[item.number % 2];
    auto& sums = shared.sums[item.number % 2];
    const int lane = part.lane, s0 = 32 * part.half;
    PairRow row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int t = part.t[half];
        row[half] = {steps.high[t], steps.low[t], steps.gamma[t], t & -rank, -1};
    }
    float columns[8];  // sums over t
    float weights[4][4], slopes[4][4];
    float row_sum[2] = {0.0f, 0.0f}, own_sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int s = s0 + 8 * j + lane % 4 * 2;
        const float2 high = *reinterpret_cast<const float2*>(&steps.high[s]);
        const float2 low = *reinterpret_cast<const float2*>(&steps.low[s]);
        const float2 scale = *reinterpret_cast<const float2*>(&steps.scale[s]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float s_high = i == 0 ? high.x : high.y, s_low = i == 0 ? low.x : low.y;
            const float s_scale = i == 0 ? scale.x : scale.y;
            columns[2 * j + i] = 0.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                PairWeight pair;
                if (kAllEarlier) {
                    pair.decay = exp2_fast((row[half].high - s_high) + (row[half].low - s_low));
                    pair.weight = pair.decay * s_scale;
                } else {
                    pair = pair_weight(row[half], s + i, rank, s_high, s_low, s_scale);
                    own_sum[half] = pair.own ? fmaf(G[j][2 * half + i], R[j][2 * half + i], own_sum[half]) : own_sum[half];
                }
                const int at = 2 * half + i;
                const float earlier = pair.decay * G[j][at] * R[j][at];
                weights[j][at] = pair.weight * G[j][at];
                slopes[j][at] = pair.weight * R[j][at];
                row_sum[half] = fmaf(earlier, s_scale, row_sum[half]);
                columns[2 * j + i] += earlier;
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        row_sum[half] = add_over_row(row_sum[half]);
        own_sum[half] = kAllEarlier ? 0.0f : add_over_row(own_sum[half]);
        if (lane % 4 == 0) {
            sums.row_pairs[part.half][part.t[half]] = row_sum[half];
            sums.own_pairs[part.half][part.t[half]] = own_sum[half];
        }
    }
    fold<4, 16>(columns, lane);
    fold<2, 8>(columns, lane);
    fold<1, 4>(columns, lane);
    const int column = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
    sums.column_pairs[part.warp][s0 + 8 * (column / 2) + lane % 4 * 2 + column % 2] = columns[0];

#pragma unroll
    for (int k = 0; k < 2; ++k) {
        Operand<T> slope, weight;
        a_from_accumulators<T>(slope, slopes[2 * k], slopes[2 * k + 1]);
        a_from_accumulators<T>(weight, weights[2 * k], weights[2 * k + 1]);
        store_mixed<T>(shared, part, k, slope, weight);
    }
}

// The same where every s is of a later step.
template <typename T>
__device__ __forceinline__ void mix_nothing(Mamba3WarpgroupShared<T>& shared, const Mamba3Item& item,
                                            const Mamba3Part<T>& part) {
    auto& sums = shared.sums[item.number % 2];
    if (part.lane % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sums.row_pairs[part.half][part.t[half]] = sums.own_pairs[part.half][part.t[half]] = 0.0f;
        }
    }
    sums.column_pairs[part.warp][32 * part.half + part.lane] = 0.0f;
    const Operand<T> zero = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        store_mixed<T>(shared, part, k, zero, zero);
    }
}

// dq of an item, before it is turned back.
template <typename T>
__device__ __forceinline__ void find_dq(float (&dq)[8][4], Mamba3WarpgroupShared<T>& shared, const Mamba3Item& item,
                                        const Mamba3Part<T>& part, int rank) {
    constexpr int kTileBlock = Mamba3WarpgroupShared<T>::kBlock;
    const auto& tiles = shared.items[item.number % 2];
    const ChunkSteps<kWarpgroupSteps>& steps = shared.steps[item.number % 2];
    const uint64_t dy = block_descriptor(tiles.dy), x = block_descriptor(tiles.x);
    const uint64_t state = block_descriptor(tiles.state + part.half * kTileBlock);
    const uint64_t q = block_descriptor(shared.q), k_tile = block_descriptor(shared.k);
    const int columns = part.half * 2 * kRows16;  // of pairs
    set_to_zero(dq);
    hold(dq);
    fence_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        begin_product<T, 1>(dq, dy + k * kColumns16, state + k * kRows16);
    }
    commit_products();
    float G[4][4], R[4][4];
    set_to_zero(G);
    set_to_zero(R);
    hold(G);
    hold(R);
    fence_products();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const int at = k / 4 * kBlock + k % 4 * kColumns16;
        begin_product<T, 0>(G, q + at, k_tile + columns + at);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        begin_product<T, 0>(R, dy + k * kColumns16, x + columns + k * kColumns16);
    }
    commit_products();
    wait_for_products<1>();
    hold(dq);
    float dot[2] = {0.0f, 0.0f};
    add_dots<T>(dot, dq, static_cast<const T*>(shared.q) + part.half * kTileBlock + part.of_lane);
    const float entering[2] = {steps.entering[part.t[0]], steps.entering[part.t[1]]};
    if (part.lane % 4 == 0) {
        shared.sums[item.number % 2].from_state[part.half][part.t[0]] = entering[0] * dot[0];
        shared.sums[item.number % 2].from_state[part.half][part.t[1]] = entering[1] * dot[1];
    }
    scale_rows(dq, entering[0], entering[1]);
    wait_for_products<0>();
    hold(G);
    hold(R);
    const int s0 = 32 * part.half;
    if (s0 >= part.row + 16) {  // a step's rows lie within 16
        mix_nothing<T>(shared, item, part);
    } else if (s0 + 32 <= part.row) {
        mix_rows<true, T>(shared, item, part, G, R, rank);
    } else {
        mix_rows<false, T>(shared, item, part, G, R, rank);
    }
    show_to_warpgroup();
    __syncthreads();  // what is of pairs is complete
    const uint64_t slopes = block_descriptor(shared.slopes);
    const uint64_t k_block = block_descriptor(shared.k + part.half * kTileBlock);
    hold(dq);
    fence_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        begin_product<T, 1>(dq, slopes + k * kColumns16, k_block + k * kRows16);
    }
    commit_products();
    wait_for_products<0>();
    hold(dq);
}

// H . dH', a share of each of the warps that have dk.
template <typename T>
__device__ __forceinline__ void add_state_products(Mamba3WarpgroupShared<T>& shared, const Mamba3Item& item, int thread,
                                                   int lane) {
    const auto& tiles = shared.items[item.number % 2];
    constexpr int kTaking = kMamba3BackwardThreads / 2;
    const int own = thread % kTaking;
    float product = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * Mamba3WarpgroupShared<T>::kBlock / 8; i += kTaking) {  // both lie alike
        const uint4 a = reinterpret_cast<const uint4*>(tiles.state)[i + own];
        const uint4 b = reinterpret_cast<const uint4*>(tiles.dstate)[i + own];
        const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 one = unpack2<T>(left[j]), other = unpack2<T>(right[j]);
            product = fmaf(one.x, other.x, fmaf(one.y, other.y, product));
        }
    }
    product = add_over_column(add_over_row(product));
    if (lane == 0) {
        shared.sums[item.number % 2].state_product[own / 32] = product;
    }
}

// dk of an item, before it is turned back, and dx. meanwhile: what else the warps may do.
template <typename T, typename Meanwhile>
__device__ __forceinline__ void find_dk(float (&dk)[8][4], float (&dx)[4][4], Mamba3WarpgroupShared<T>& shared,
                                        const Mamba3Item& item, const Mamba3Part<T>& part, float D,
                                        const Meanwhile& meanwhile) {
    constexpr int kTileBlock = Mamba3WarpgroupShared<T>::kBlock;
    const auto& tiles = shared.items[item.number % 2];
    const ChunkSteps<kWarpgroupSteps>& steps = shared.steps[item.number % 2];
    const uint64_t dy = block_descriptor(tiles.dy), x = block_descriptor(tiles.x);
    const uint64_t dstate = block_descriptor(tiles.dstate),
                   dstate_block = block_descriptor(tiles.dstate + part.half * kTileBlock);
    const uint64_t k_tile = block_descriptor(shared.k);
    set_to_zero(dk);
    hold(dk);
    fence_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        begin_product<T, 1>(dk, x + k * kColumns16, dstate_block + k * kRows16);
    }
    commit_products();
    set_to_zero(dx);
    hold(dx);
    fence_products();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const int at = k / 4 * kBlock + k % 4 * kColumns16;
        begin_product<T, 0>(dx, k_tile + at, dstate + part.half * 2 * kRows16 + at);
    }
    commit_products();
    meanwhile();
    wait_for_products<1>();
    hold(dk);
    float dot[2] = {0.0f, 0.0f};
    add_dots<T>(dot, dk, static_cast<const T*>(shared.k) + part.half * kTileBlock + part.of_lane);
    const float adding[2] = {steps.adding[part.t[0]], steps.adding[part.t[1]]};
    if (part.lane % 4 == 0) {
        shared.sums[item.number % 2].to_state[part.half][part.t[0]] = steps.leaving[part.t[0]] * dot[0];
        shared.sums[item.number % 2].to_state[part.half][part.t[1]] = steps.leaving[part.t[1]] * dot[1];
    }
    scale_rows(dk, adding[0], adding[1]);
    wait_for_products<0>();
    hold(dx);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        Operand<T> own;
        load_matrices(own.r[0], columns_on(static_cast<const T*>(tiles.dy) + part.of_lane, 2 * part.half + k));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 value = unpack2<T>(own.r[0][i]);
            float(&sum)[4] = dx[2 * k + i / 2];
            sum[i % 2 * 2] = fmaf(adding[i % 2], sum[i % 2 * 2], D * value.x);
            sum[i % 2 * 2 + 1] = fmaf(adding[i % 2], sum[i % 2 * 2 + 1], D * value.y);
        }
    }
    __syncthreads();  // what is of pairs is complete
    const uint64_t slopes = block_descriptor(shared.slopes_transposed), weights = block_descriptor(shared.weights_transposed);
    const uint64_t q_block = block_descriptor(shared.q + part.half * kTileBlock);
    hold(dk);
    hold(dx);
    fence_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        begin_product<T, 1>(dk, slopes + k * kColumns16, q_block + k * kRows16);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        begin_product<T, 1>(dx, weights + k * kColumns16, dy + part.half * 2 * kColumns16 + k * kRows16);
    }
    commit_products();
    wait_for_products<0>();
    hold(dk);
    hold(dx);
}

// The gradient of the final k, which is the last step's.
template <typename T>
__device__ __forceinline__ void add_final(float (&dk)[8][4], const Mamba3Walk<T>& walk, const Mamba3Part<T>& part,
                                          int64_t head) {
    const MambaMamba3& p = walk.q.forward;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = part.t[i / 2] - (walk.rows - walk.rank), column = 64 * part.half + 8 * j + part.lane % 4 * 2 + i % 2;
            if (r >= 0 && r < walk.rank && column < walk.dstate) {
                dk[j][i] += walk.q.dfinal_k[((walk.chunk.sequence * walk.rank + r) * p.nheads + head) * walk.dstate +
                                            element_of_column(p, column)];
            }
        }
    }
}

#endif

template <typename T>
__global__ void __launch_bounds__(kMamba3BackwardThreads, 1)
    mamba3_backward_warpgroup_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Shared = Mamba3WarpgroupShared<T>;
    using Tiles = Mamba3BackwardLayouts<__half>::Middle;
    MAMBA_DYNAMIC_SHARED(1024, unsigned char, mamba3_backward_warpgroup_shared);
    Shared& shared = *reinterpret_cast<Shared*>(mamba3_backward_warpgroup_shared);
    const Mamba3Walk<T> walk(q, launch, shared);
    const MambaMamba3& p = q.forward;
    Mamba3Item item = walk.first;
    if (walk.chunk.steps == 0) {
        for (; item.number < walk.count; item = item.next(walk.row_tiles)) {
            store_nothing(walk, item);
        }
        return;
    }
    const Mamba3Part<T> part(walk);
    const bool of_k = walk.warp >= Shared::kWarps / 2;
    const int64_t all_steps = p.batch * p.seqlen, first_step = walk.chunk.row * p.seqlen + walk.chunk.first;
    const auto store_terms = [&](const Mamba3Item& of) {
        store_step_terms<Tiles>(
            launch.at<float4>(launch.plan.workspace.step_terms) + (of.tile * all_steps + first_step) * p.nheads + walk.head(of),
            p.nheads, shared.sums[of.number % 2], shared.steps[of.number % 2], walk.chunk.steps, walk.rank, walk.lane);
    };

    if (walk.thread == 0) {
        make_barrier(&shared.barriers[0]);
        make_barrier(&shared.barriers[1]);
        show_to_warpgroup();
    }
    walk.load_group();
    walk.begin_values(item);
    walk.begin_copies(item);
    end_copies();
    if (walk.count > 1) {
        walk.begin_values(item.next(walk.row_tiles));
        walk.begin_copies(item.next(walk.row_tiles));
    }
    end_copies();
    wait_for_copies<1>();
    __syncthreads();
    walk.prepare(item);
    Mamba3Item before = item;
    float sum[8][4];  // of dq or dk, over heads
    set_to_zero(sum);
    __syncthreads();
    while (item.number < walk.count) {
        turn(walk, item);
        wait_for_copies<1>();
        walk.wait_for_states(item);
        show_to_warpgroup();
        __syncthreads();  // the item's tiles are complete
        float d[8][4];
        if (!of_k) {
            find_dq<T>(d, shared, item, part, walk.rank);
            __syncthreads();  // tiles have been read, but those of q and k
        } else {
            float dx[4][4];
            find_dk<T>(d, dx, shared, item, part, p.D != nullptr ? p.D[walk.head(item)] : 0.0f, [&]() {
                add_state_products(shared, item, walk.thread, walk.lane);
                if (walk.warp == Shared::kWarps - 1 && item.number > 0) {
                    store_terms(before);
                }
            });
            if (walk.chunk.last && item.tile == 0 && q.dfinal_k != nullptr) {
                add_final<T>(d, walk, part, walk.head(item));
            }
            __syncthreads();
            float* const at = shared.dx() + part.t[0] * Shared::kDxPitch + 32 * part.half + part.lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                *reinterpret_cast<float2*>(at + 8 * j) = make_float2(dx[j][0], dx[j][1]);
                *reinterpret_cast<float2*>(at + 8 * Shared::kDxPitch + 8 * j) = make_float2(dx[j][2], dx[j][3]);
            }
        }
        if (32 * part.half < walk.angles) {
            turn_back<T>(walk, d, (of_k ? shared.k : shared.q) + part.half * Shared::kBlock, shared.dturns(item.number, of_k),
                         part.half, part.row);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[j][i] += d[j][i];
            }
        }
        sum_rows(walk, d,
                 shared.bias_parts(item.number) + ((of_k ? 4 : 0) + part.warp) * walk.rank * Shared::kStates + 64 * part.half);
        __syncthreads();
        sum_later(walk, item);
        store_bias(walk, item);
        store_dv(walk, item);
        wait_for_copies<0>();  // of the next item, begun an item ago
        __syncthreads();
        finish_angles(walk, item);
        const Mamba3Item next = item.next(walk.row_tiles);
        if (next.number < walk.count) {
            walk.prepare(next);
        }
        show_to_warpgroup();
        __syncthreads();  // the item's tiles are free
        if (next.number + 1 < walk.count) {
            walk.begin_values(next.next(walk.row_tiles));
            walk.begin_copies(next.next(walk.row_tiles));
        }
        end_copies();
        before = item;
        item = next;
    }
    if (walk.warp == 0) {
        store_terms(before);
    }
    const int64_t row_stride = p.ngroups * walk.dstate, column0 = 64 * part.half;
    const int64_t at = (walk.split * all_steps * walk.rank + first_step * walk.rank + part.row) * row_stride +
                       walk.group * walk.dstate + column0;
    store_sum<4>(launch.at<float>(of_k ? launch.plan.workspace.dk : launch.plan.workspace.dq) + at, row_stride, sum,
                 walk.rows - part.row, walk.dstate - static_cast<int>(column0), launch.first_head > 0, walk.lane);
#else
    (void)q;
    (void)launch;
    __trap();
#endif
}

}  // namespace mamba
