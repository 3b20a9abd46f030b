// What comes behind the scan, step by step: D, norm, gate and output projection of a step's rows.
#pragma once

#include "common/cuda_vector.cuh"
#include "mamba3/cuda/forward/walk.cuh"

namespace mamba {

// Whether rows of 8 elements can be accessed in vectors of 16 bytes; weights: of mimo_v, mimo_z, mimo_out and norm_weight.
struct Mamba3FinishVectors {
    int32_t z, out, weights;
};

// Of a tile of y's rows, in floats.
constexpr int kMamba3YPitch = kMamba3StateRows + 8;
constexpr int kMamba3FinishColumns = 8;  // of a thread

template <typename T>
struct Mamba3FinishTile {
    const float* y;  // (steps * ranks, kMamba3YPitch)
    const T* v;      // (steps, v_pitch)
    int v_pitch;
    int64_t first;  // step of the row
    int steps, ranks, q_rank;
    bool with_D;
};

// Neighbours of a tensor that may end before them.
template <typename T>
__device__ __forceinline__ void load_columns(float (&values)[kMamba3FinishColumns], const T* from, int left, bool vectors) {
    unpack<T, kMamba3FinishColumns>(packed_load_padded<T, kMamba3FinishColumns>(from, left, vectors), values);
}
template <typename T>
__device__ __forceinline__ void store_columns(T* to, const float (&values)[kMamba3FinishColumns], int left, bool vectors) {
    if (vectors && left >= kMamba3FinishColumns) {
        packed_store<T, kMamba3FinishColumns>(to, pack<T, kMamba3FinishColumns>(values));
    } else {
#pragma unroll
        for (int i = 0; i < kMamba3FinishColumns; ++i) {
            if (i < left) {
                to[i] = from_float<T>(values[i]);
            }
        }
    }
}

// A row of y with D x, x = mimo_v v. weight: the weights' element of the thread's first column.
template <typename T>
__device__ __forceinline__ void load_scan_row(float (&y)[kMamba3FinishColumns], const MambaMamba3& p,
                                              const Mamba3FinishTile<T>& tile, int row, int column,
                                              const float (&v)[kMamba3FinishColumns], float D, int64_t weight, int left,
                                              bool vectors) {
    unpack<float, kMamba3FinishColumns>(packed_load<float, kMamba3FinishColumns>(tile.y + row * kMamba3YPitch + column), y);
    if (tile.with_D && p.D != nullptr) {
        if (p.mimo_v != nullptr) {
            float weights[kMamba3FinishColumns];
            load_columns<float>(weights, p.mimo_v + weight, left, vectors);
#pragma unroll
            for (int i = 0; i < kMamba3FinishColumns; ++i) {
                y[i] = fmaf(D, v[i] * weights[i], y[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kMamba3FinishColumns; ++i) {
                y[i] = fmaf(D, v[i], y[i]);
            }
        }
    }
}

// out of the tile's steps; eight neighbouring threads take a step.
template <typename T>
__device__ __forceinline__ void finish_chunk(const MambaMamba3& p, const Mamba3Block& block, const Mamba3FinishTile<T>& tile,
                                             const Mamba3FinishVectors& vectors) {
    constexpr int kColumns = kMamba3FinishColumns;
    constexpr int kStepThreads = kMamba3StateRows / kColumns;
    const int column = threadIdx.x % kStepThreads * kColumns;
    const int left = block.columns - column;
    const float D = p.D != nullptr ? p.D[block.head] : 0.0f;
    const int64_t weights = block.head * p.rank * p.headdim + block.row0 + column;
    const float per_column = 1.0f / static_cast<float>(p.headdim);
    for (int first = 0; first < tile.steps; first += static_cast<int>(blockDim.x) / kStepThreads) {
        const int step = first + static_cast<int>(threadIdx.x) / kStepThreads;
        const bool exists = step < tile.steps && left > 0;
        const int own = exists ? step : 0;
        const int64_t at = tile.first + own;
        float v[kColumns], z[kColumns], out[kColumns];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            z[i] = out[i] = 0.0f;
        }
        if (p.z != nullptr && exists) {
            const T* const from = static_cast<const T*>(p.z) + block.range.row * p.z_batch_stride + at * p.z_len_stride +
                                  block.head * p.z_head_stride + block.row0 + column;
            load_columns<T>(z, from, left, vectors.z != 0);
        }
        unpack<T, kColumns>(packed_load<T, kColumns>(tile.v + own * tile.v_pitch + column), v);
        T* const to = static_cast<T*>(p.out) + block.range.row * p.out_batch_stride + at * p.out_len_stride +
                      block.head * p.out_head_stride + block.row0 + column;
#pragma unroll 1
        for (int rank = 0; rank < p.rank; ++rank) {
            const int64_t weight = weights + rank * p.headdim;
            const bool weight_vectors = vectors.weights != 0;
            float y[kColumns];
            load_scan_row<T>(y, p, tile, own * tile.ranks + rank, column, v, D, weight, left, weight_vectors);
            if (p.norm_weight != nullptr) {
                float squares = 0.0f;
#pragma unroll
                for (int i = 0; i < kColumns; ++i) {
                    squares = fmaf(y[i], y[i], squares);
                }
#pragma unroll
                for (int distance = 1; distance < kStepThreads; distance *= 2) {
                    squares += __shfl_xor_sync(0xffffffffu, squares, distance);
                }
                const float rstd = rsqrtf(fmaf(squares, per_column, p.norm_eps));
                float scale[kColumns];
                load_columns<float>(scale, p.norm_weight + block.head * p.headdim + block.row0 + column, left, weight_vectors);
#pragma unroll
                for (int i = 0; i < kColumns; ++i) {
                    y[i] *= rstd * scale[i];
                }
            }
            if (p.z != nullptr) {
                float scale[kColumns];
                if (p.mimo_z != nullptr) {
                    load_columns<float>(scale, p.mimo_z + weight, left, weight_vectors);
                }
#pragma unroll
                for (int i = 0; i < kColumns; ++i) {
                    y[i] *= silu(p.mimo_z != nullptr ? z[i] * scale[i] : z[i]);
                }
            }
            if (p.mimo_out == nullptr) {
                if (exists) {
                    store_columns<T>(to + rank * p.out_rank_stride, y, left, vectors.out != 0);
                }
            } else {
                float scale[kColumns];
                load_columns<float>(scale, p.mimo_out + weight, left, weight_vectors);
#pragma unroll
                for (int i = 0; i < kColumns; ++i) {
                    out[i] = fmaf(y[i], scale[i], out[i]);
                }
            }
        }
        if (p.mimo_out != nullptr && exists) {
            store_columns<T>(to, out, left, vectors.out != 0);
        }
    }
}

// The tile's rows of y with D to rows (B, L, R, H, P), for mamba3_finish_kernel.
template <typename T>
__device__ __forceinline__ void store_scan_rows(const MambaMamba3& p, const Mamba3Block& block, const Mamba3FinishTile<T>& tile,
                                                float* rows, bool adds) {
    constexpr int kColumns = kMamba3FinishColumns;
    constexpr int kRowThreads = kMamba3StateRows / kColumns;
    const int column = threadIdx.x % kRowThreads * kColumns;
    const int left = block.columns - column;
    const float D = p.D != nullptr ? p.D[block.head] : 0.0f;
    for (int row = threadIdx.x / kRowThreads; row < tile.steps * tile.ranks; row += blockDim.x / kRowThreads) {
        const int step = row / tile.ranks;
        const int64_t rank = tile.q_rank + row % tile.ranks;
        if (rank < p.rank && left > 0) {
            float v[kColumns], y[kColumns];
            unpack<T, kColumns>(packed_load<T, kColumns>(tile.v + step * tile.v_pitch + column), v);
            load_scan_row<T>(y, p, tile, row, column, v, D, (block.head * p.rank + rank) * p.headdim + block.row0 + column,
                             left, false);
            float* const to =
                rows +
                (((block.range.row * p.seqlen + tile.first + step) * p.rank + rank) * p.nheads + block.head) * p.headdim +
                block.row0 + column;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                if (i < left) {
                    to[i] = adds ? to[i] + y[i] : y[i];
                }
            }
        }
    }
}

}  // namespace mamba
