// The pairs of rows of a chunk in backward_warpgroup.cuh: what of q . k and x . dy goes on, by rows and by columns.
#pragma once

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
    __device__ __forceinline__ explicit Mamba3Part(const Mamba3Stand& own)
        : lane(own.lane), warp(own.warp % 4), row(16 * (own.warp % 4)), half(own.warp / 4 % 2) {
        t[0] = row + lane / 4;
        t[1] = t[0] + 8;
        of_lane = Tile::at(row + lane % 16, lane / 16 * 8);
    }
};
// Which of two places an item has; the shuffle tells the compiler that a warp's lanes agree, for addresses in uniform
// registers.
__device__ __forceinline__ int place_of(const Mamba3Item& item) {
    return __shfl_sync(0xffffffffu, item.number % 2, 0) & 1;
}
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
    float row_sum[2] = {0.0f, 0.0f}, own_sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        Operand<T> slope, weight;
#pragma unroll
        for (int part_of_k = 0; part_of_k < 2; ++part_of_k) {
            const int j = 2 * k + part_of_k, s = s0 + 8 * j + lane % 4 * 2;
            const float2 high = *reinterpret_cast<const float2*>(&steps.high[s]);
            const float2 low = *reinterpret_cast<const float2*>(&steps.low[s]);
            const float2 scale = *reinterpret_cast<const float2*>(&steps.scale[s]);
            columns[2 * j] = columns[2 * j + 1] = 0.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float weights[2], slopes[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float s_high = i == 0 ? high.x : high.y, s_low = i == 0 ? low.x : low.y;
                    const float s_scale = i == 0 ? scale.x : scale.y;
                    const int at = 2 * half + i;
                    PairWeight pair;
                    if (kAllEarlier) {
                        pair.decay = exp2_fast((row[half].high - s_high) + (row[half].low - s_low));
                        pair.weight = pair.decay * s_scale;
                    } else {
                        pair = pair_weight(row[half], s + i, rank, s_high, s_low, s_scale);
                        own_sum[half] = pair.own ? fmaf(G[j][at], R[j][at], own_sum[half]) : own_sum[half];
                    }
                    const float earlier = pair.decay * G[j][at] * R[j][at];
                    weights[i] = pair.weight * G[j][at];
                    slopes[i] = pair.weight * R[j][at];
                    row_sum[half] = fmaf(earlier, s_scale, row_sum[half]);
                    columns[2 * j + i] += earlier;
                }
                set_pair<T>(slope, 2 * part_of_k + half, slopes[0], slopes[1]);
                set_pair<T>(weight, 2 * part_of_k + half, weights[0], weights[1]);
            }
        }
        store_mixed<T>(shared, part, k, slope, weight);
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

#endif

}  // namespace mamba
