// What a chunk's kernels of Mamba-3's backward scan are made of: weights between steps, sums over rows and columns.
#pragma once

#include "mamba3/cuda/backward/chunk.cuh"

namespace mamba {

__device__ __forceinline__ float add_over_warp(float value) {
    return add_over_column(add_over_row(value));
}

// The weight of row s's x in row t's y, without q . k.
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

// high, low, scale: of row s.
__device__ __forceinline__ PairWeight pair_weight(const PairRow& row, int s, int rank, float high, float low, float scale) {
    PairWeight pair = {0.0f, 0.0f, s >= row.begin && s < row.begin + rank};
    if (s < row.begin && s >= row.run) {
        pair.decay = exp2_fast((row.high - high) + (row.low - low));
        pair.weight = pair.decay * scale;
    } else if (pair.own) {
        pair.weight = row.gamma;
    }
    return pair;
}
template <int kRows>
__device__ __forceinline__ PairWeight pair_weight(const ChunkSteps<kRows>& steps, const PairRow& row, int s, int rank) {
    return pair_weight(row, s, rank, steps.high[s], steps.low[s], steps.scale[s]);
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
};

// A warp's 16 rows into a tile of floats.
template <int kWide>
__device__ __forceinline__ void store_rows(float* tile, int pitch, const float (&rows)[2 * kWide][4], int lane) {
    float* const at = tile + lane / 4 * pitch + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 2 * kWide; ++j) {
        *reinterpret_cast<float2*>(at + 8 * j) = make_float2(rows[j][0], rows[j][1]);
        *reinterpret_cast<float2*>(at + 8 * pitch + 8 * j) = make_float2(rows[j][2], rows[j][3]);
    }
}

// One warp: what a chunk's steps get, of which a lane has kEach. terms: the chunk's first step's, the next one `stride` behind.
template <class Tiles, int kEach = (Tiles::kRows + 31) / 32>
__device__ __forceinline__ void store_step_terms(float4* terms, int64_t stride, const Mamba3ChunkSums<Tiles>& sums,
                                                 const ChunkSteps<Tiles::kRows>& steps, int count, int rank, int lane) {
    using Pairs = WarpTile<Tiles, Tiles::kRows>;
    using Wide = WarpTile<Tiles, Tiles::kStates>;
    float carried = 0.0f;
    for (int i = 0; i < Tiles::kWarps; ++i) {
        carried += sums.state_product[i];
    }
    carried *= steps.carry;
    float ends[kEach];    // what ends at the step, less what begins there
    float passes[kEach];  // what goes from the step into the leaving state
    float dscale[kEach], dgamma[kEach];
    float later = 0.0f, earlier = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int t = lane * kEach + i;
        const bool exists = t < count;
        ends[i] = passes[i] = dscale[i] = dgamma[i] = 0.0f;
        for (int r = 0; r < rank; ++r) {  // all loads at once, where the compiler knows the rank
            const int row = (exists ? t : 0) * rank + r;
            float column = 0.0f, left = 0.0f;
#pragma unroll
            for (int above = 0; above < Pairs::kAbove; ++above) {
                column += sums.column_pairs[above][row];
            }
#pragma unroll
            for (int beside = 0; beside < Pairs::kBeside; ++beside) {
                if (16 * Pairs::kWide * beside < Tiles::kRows) {
                    ends[i] += sums.row_pairs[beside][row];
                    dgamma[i] += sums.own_pairs[beside][row];
                }
                if (16 * Wide::kWide * beside < Tiles::kStates) {
                    ends[i] += sums.from_state[beside][row];
                    left += sums.to_state[beside][row];
                }
            }
            ends[i] -= column * steps.scale[row];
            passes[i] += left * steps.scale[row];
            dscale[i] += column + left;
        }
        if (!exists) {
            ends[i] = passes[i] = 0.0f;
        }
        later += ends[i];
        earlier += passes[i];
    }
    sum_over_other_lanes(later, earlier, lane);
    float suffix[kEach];
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
        later += ends[i];
        suffix[i] = later;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int t = lane * kEach + i;
        if (t < count) {
            terms[t * stride] = make_float4(suffix[i] + earlier + carried, dscale[i], dgamma[i], 0.0f);
        }
        earlier += passes[i];
    }
}

}  // namespace mamba
