// What a chunk's kernels of Mamba-3's backward scan are made of: weights between steps, and sums over rows and columns.
#pragma once

#include "mamba3/cuda/backward_chunk.cuh"
#include "ssd/cuda/backward_tile.cuh"

namespace mamba {

// What of row s's x is in row t's y, without q . k.
struct PairWeight {
    float decay;   // of an earlier step, else 0
    float weight;  // decay scale, or gamma of the row's own step
    bool own;
};

// A row t of pairs.
struct PairRow {
    float high, low, gamma;
    int begin, run;  // first row of t's step, and of its run
};

template <int kRows>
__device__ __forceinline__ PairRow pair_row(const ChunkSteps<kRows>& steps, int t, int rank) {
    return {steps.high[t], steps.low[t], steps.gamma[t], t / rank * rank, steps.run[t]};
}

template <int kRows>
__device__ __forceinline__ PairWeight pair_weight(const ChunkSteps<kRows>& steps, const PairRow& row, int s, int rank) {
    PairWeight pair = {0.0f, 0.0f, s >= row.begin && s < row.begin + rank};
    if (s < row.begin && s >= row.run) {
        pair.decay = exp2_fast((row.high - steps.high[s]) + (row.low - steps.low[s]));
        pair.weight = pair.decay * steps.scale[s];
    } else if (pair.own) {
        pair.weight = row.gamma;
    }
    return pair;
}

// weights (row t, row s) = q_t . k_s times its weight, for the y of rows.
template <typename T, class Tiles>
__device__ __forceinline__ void find_weights(const T* q, const T* k, const ChunkSteps<Tiles::kRows>& steps, int rank,
                                             T* weights, int warp, int lane) {
    using Pairs = WarpTile<Tiles, Tiles::kRows>;
    constexpr int kPitch = Tiles::kStates + kTilePad;
    constexpr int kRowsPitch = Tiles::kRows + kTilePad;
    const int step0 = 16 * (warp % Pairs::kAbove), pair0 = 16 * Pairs::kWide * (warp / Pairs::kAbove);
    if (pair0 >= Tiles::kRows) {
        return;
    }
    float products[2 * Pairs::kWide][4];
    set_to_zero(products);
    multiply<T, Pairs::kWide, Tiles::kStates / 16, false, true>(products, q + step0 * kPitch, kPitch, k + pair0 * kPitch,
                                                                kPitch, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int t = step0 + lane / 4 + 8 * half;
        const PairRow row = pair_row(steps, t, rank);
#pragma unroll
        for (int j = 0; j < 2 * Pairs::kWide; ++j) {
            const int s = pair0 + 8 * j + lane % 4 * 2;
            store_pair<T>(weights + t * kRowsPitch + s, products[j][2 * half] * pair_weight(steps, row, s, rank).weight,
                          products[j][2 * half + 1] * pair_weight(steps, row, s + 1, rank).weight);
        }
    }
}

// The dot product of a warp's 16 rows with a tile's, and the rows times a factor each.
template <typename T, int kWide>
__device__ __forceinline__ float2 dot_and_scale(float (&rows)[2 * kWide][4], float above, float below, const T* tile,
                                                int stride, int lane) {
    float2 dot = make_float2(0.0f, 0.0f);
    const T* const at = tile + lane / 4 * stride + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 2 * kWide; ++j) {
        const float2 top = load_pair<T>(at + 8 * j);
        const float2 bottom = load_pair<T>(at + 8 * stride + 8 * j);
        dot.x = fmaf(rows[j][0], top.x, fmaf(rows[j][1], top.y, dot.x));
        dot.y = fmaf(rows[j][2], bottom.x, fmaf(rows[j][3], bottom.y, dot.y));
        rows[j][0] *= above;
        rows[j][1] *= above;
        rows[j][2] *= below;
        rows[j][3] *= below;
    }
    return make_float2(add_over_row(dot.x), add_over_row(dot.y));
}

template <class Tiles>
struct Mamba3ChunkSums {
    static constexpr int kAbove = WarpTile<Tiles, Tiles::kRows>::kAbove;
    static constexpr int kBeside = WarpTile<Tiles, Tiles::kRows>::kBeside;
    float row_pairs[kBeside]
                   [Tiles::kRows];  // by row t: of earlier steps s, f_ts scale_s, f_ts = decay (q_t . k_s) (x_s . dy_t)
    float own_pairs[kBeside][Tiles::kRows];    // by row t: of its own step, (q_t . k_s) (x_s . dy_t)
    float column_pairs[kAbove][Tiles::kRows];  // by row s: of later steps, f_ts
    float from_state[kBeside][Tiles::kRows];   // what the entering state has in y_t . dy_t
    float to_state[kBeside][Tiles::kRows];     // what x_s k_s^T has in the leaving one, times its gradient, without scale
    float state_product[Tiles::kWarps];        // entering state times the leaving one's gradient
    float angles[Tiles::kRows];                // by step: gradient of dt through the angles
};

}  // namespace mamba
