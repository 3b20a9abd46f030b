// The pairs of rows of a chunk in backward_warpgroup.cuh: what of q . k and x . dy goes on, by rows and by columns.
#pragma once

#include "mamba3/cuda/backward/warpgroup_rotate.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where a warp of one of four warpgroups stands: 16 rows, and half of the columns.
template <typename T>
struct Mamba3Part {
    using Tile = SwizzledTile<kWarpgroupSteps>;
    int lane, warp, row, half;
    int t[2];     // rows of the lane's accumulators
    int of_lane;  // place of its row for ldmatrix_x4
    __device__ __forceinline__ explicit Mamba3Part(const Mamba3Stand& own)
        : lane(own.lane), warp(own.warp % 4), row(16 * (own.warp % 4)), half(own.warp / 4 % 2) {
        t[0] = row + lane / 4;
        t[1] = t[0] + 8;
        of_lane = Tile::at(row + lane % 16, lane / 16 * 8);
    }
};
// In a uniform register from the start: what products add to it stays in these, and needs no move for each.
__device__ __forceinline__ uint64_t block_descriptor(const void* tile) {
    const uint64_t own = tile_descriptor(tile, kBlock * 16);
    return (own & ~uint64_t{0xffffffff}) | uniform(static_cast<uint32_t>(own));
}

// W R and W G of 16 columns s as tiles.
template <typename T>
__device__ __forceinline__ void store_mixed(Mamba3WarpgroupShared<T>& shared, const Mamba3Part<T>& part, int k,
                                            const Operand<T>& slope, const Operand<T>& weight) {
    const int row = 32 * part.half + 16 * k + part.lane / 16 * 8 + part.lane % 8;
    const int transposed = SwizzledTile<kWarpgroupSteps>::at(row, part.row + part.lane / 8 % 2 * 8);
    stmatrix_x4(columns_on(shared.slopes + part.of_lane, 2 * part.half + k), slope.r[0]);
    stmatrix_x4_trans(shared.weights_transposed + transposed, weight.r[0]);
}

// Pairs of a warp's rows t with 16 rows s of earlier steps (kEarlier), or with themselves.
template <bool kEarlier, typename T>
__device__ __forceinline__ void mix_block(Mamba3WarpgroupShared<T>& shared, const Mamba3Item& item, const Mamba3Part<T>& part,
                                          int k, const float (&G)[4][4], const float (&R)[4][4], int rank, float (&columns)[8],
                                          float (&row_sum)[2], float (&own_sum)[2], Operand<T>& slope, Operand<T>& weight) {
    const ChunkSteps<kWarpgroupSteps>& steps = shared.steps[item.number % 2];
    const auto two = [](const float* from) { return *reinterpret_cast<const float2*>(from); };
    const int first = 32 * part.half + 16 * k, s0 = first + part.lane % 4 * 2;
    if constexpr (kEarlier) {
        // The decay is a product: from s to its block's last row, on to the row before t's block, and from there to t.
        const int end = first + 15, begin = part.row - 1;
        const float between = exp2_fast((steps.high[begin] - steps.high[end]) + (steps.low[begin] - steps.low[end]));
        const float head[2] = {between * shared.pairs.head[part.t[0]], between * shared.pairs.head[part.t[1]]};
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float2 tails = two(&shared.pairs.tail[s0 + 8 * j]), scaled_tails = two(&shared.pairs.scaled_tail[s0 + 8 * j]);
            const float tail[2] = {tails.x, tails.y}, scaled[2] = {scaled_tails.x, scaled_tails.y};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float above = G[2 * k + j][i] * R[2 * k + j][i], below = G[2 * k + j][2 + i] * R[2 * k + j][2 + i];
                sum[0] = fmaf(above, scaled[i], sum[0]);
                sum[1] = fmaf(below, scaled[i], sum[1]);
                columns[4 * k + 2 * j + i] = fmaf(head[0], above, head[1] * below) * tail[i];
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float x = head[half] * scaled[0], y = head[half] * scaled[1];
                set_pair<T>(slope, 2 * j + half, x * R[2 * k + j][2 * half], y * R[2 * k + j][2 * half + 1]);
                set_pair<T>(weight, 2 * j + half, x * G[2 * k + j][2 * half], y * G[2 * k + j][2 * half + 1]);
            }
        }
        row_sum[0] = fmaf(head[0], sum[0], row_sum[0]);
        row_sum[1] = fmaf(head[1], sum[1], row_sum[1]);
    } else {
        PairRow row[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = part.t[half];
            row[half] = {steps.high[t], steps.low[t], steps.gamma[t], t & -rank, -1};
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int s = s0 + 8 * j;
            const float2 high = two(&steps.high[s]), low = two(&steps.low[s]), scale = two(&steps.scale[s]);

#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float weights[2], slopes[2];
                PairWeight pair = pair_weight(row[half], s, rank, high.x, low.x, scale.x);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float s_scale = i == 0 ? scale.x : scale.y;
                    const int at = 2 * half + i;
                    if (i > 0 && rank == 1) {  // else both rows are of one step
                        pair = pair_weight(row[half], s + 1, rank, high.y, low.y, s_scale);
                    }
                    own_sum[half] = pair.own ? fmaf(G[2 * k + j][at], R[2 * k + j][at], own_sum[half]) : own_sum[half];
                    const float earlier = pair.decay * G[2 * k + j][at] * R[2 * k + j][at];
                    weights[i] = pair.weight * G[2 * k + j][at];
                    slopes[i] = pair.weight * R[2 * k + j][at];
                    row_sum[half] = fmaf(earlier, s_scale, row_sum[half]);
                    columns[4 * k + 2 * j + i] += earlier;
                }
                set_pair<T>(slope, 2 * j + half, slopes[0], slopes[1]);
                set_pair<T>(weight, 2 * j + half, weights[0], weights[1]);
            }
        }
    }
}

// Of pairs of rows (t, s), whose columns s are half of the chunk's: W R and W G as tiles, and the sums of steps. A step's rows
// lie within 16, so a block of 16 rows s is of earlier steps, of t's own rows, or of later ones.
template <typename T>
__device__ __forceinline__ void mix_rows(Mamba3WarpgroupShared<T>& shared, const Mamba3Item& item, const Mamba3Part<T>& part,
                                         const float (&G)[4][4], const float (&R)[4][4], int rank) {
    auto& sums = shared.sums[item.number % 2];
    const int lane = part.lane, s0 = 32 * part.half;
    float columns[8] = {};  // sums over t
    float row_sum[2] = {0.0f, 0.0f}, own_sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const int first = s0 + 16 * k;
        Operand<T> slope = {}, weight = {};
        if (first < part.row) {
            mix_block<true, T>(shared, item, part, k, G, R, rank, columns, row_sum, own_sum, slope, weight);
        } else if (first == part.row) {
            mix_block<false, T>(shared, item, part, k, G, R, rank, columns, row_sum, own_sum, slope, weight);
            if (rank == 1) {
                const float2 both = diagonal(R[2 * k], R[2 * k + 1], lane);
                if (lane % 4 == lane / 8) {
                    shared.D[item.number % 2][part.t[0]] = both.x;
                    shared.D[item.number % 2][part.t[1]] = both.y;
                }
            }
        }
        store_mixed<T>(shared, part, k, slope, weight);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        row_sum[half] = add_over_row(row_sum[half]);
        own_sum[half] = add_over_row(own_sum[half]);
        if (lane % 4 == 0) {
            sums.row_pairs[part.half][part.t[half]] = row_sum[half];
            sums.own_pairs[part.half][part.t[half]] = own_sum[half];
        }
    }
    transpose_sum<8, 16, 4>(columns, lane);
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
