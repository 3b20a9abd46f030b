// What the norm's two directions share: sums over a row, a thread's part of a row.
#pragma once

#include "common/cuda_vector.cuh"
#include "norm/plan.h"

namespace mamba {

template <typename T, bool kFloat32Beside>
struct OtherOf {
    using Type = T;
};
template <typename T>
struct OtherOf<T, true> {
    using Type = float;
};

// ---- sums over a row -------------------------------------------------------------------------------------------------

// Partial sums of the warps, twice: a call uses one half while slow threads still read the other.
template <int kCount>
struct RowSums {
    float of_warp[2][kNormMaxThreads / 32][kCount];
};

template <int kCount>
__device__ __forceinline__ void sum_over_warp(float* values) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] += __shfl_xor_sync(0xffffffffu, values[i], distance);
        }
    }
}

// The sum of each value over a row's threads, the same bits in all of them. `turn` must alternate between calls.
template <int kCount, int kMost>
__device__ __forceinline__ void sum_over_row(float* values, RowSums<kMost>& shared, int turn) {
    static_assert(kCount <= kMost, "a place for each");
    const int lanes = static_cast<int>(blockDim.x);
    if (lanes < 32) {
        for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                values[i] += __shfl_xor_sync(0xffffffffu, values[i], distance);
            }
        }
        return;
    }
    sum_over_warp<kCount>(values);
    if (lanes == 32) {
        return;
    }
    const int warps = lanes / 32;
    const int first = static_cast<int>(threadIdx.y) * warps;
    const int lane = static_cast<int>(threadIdx.x) & 31;
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            shared.of_warp[turn & 1][first + static_cast<int>(threadIdx.x) / 32][i] = values[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        values[i] = lane < warps ? shared.of_warp[turn & 1][first + lane][i] : 0.0f;
    }
    sum_over_warp<kCount>(values);
}

// ---- a thread's part of a row ----------------------------------------------------------------------------------------

// A tile is what a row's threads hold at a time: so many elements each, in vectors that lie side by side.
template <int kVector>
struct NormTile {
    static constexpr int kElements = kVector == 1 ? kNormScalars : kNormElements;
    static constexpr int kVectors = kElements / kVector;
};

// The index of vector v of this thread in the tile that begins at `tile`.
template <int kVector>
__device__ __forceinline__ int vector_index(int tile, int v) {
    return tile + (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVector;
}

// Vectors beyond the row are zero.
template <typename T, int kVector>
__device__ __forceinline__ void load_bits(const T* row, int tile, int size, Packed<T, kVector>* bits) {
#pragma unroll
    for (int v = 0; v < NormTile<kVector>::kVectors; ++v) {
        const int i = vector_index<kVector>(tile, v);
        bits[v] = packed_zero<T, kVector>();
        if (i < size) {
            bits[v] = packed_load<T, kVector>(row + i);
        }
    }
}

template <typename T, int kVector>
__device__ __forceinline__ void unpack_bits(const Packed<T, kVector>* bits, float* values) {
#pragma unroll
    for (int v = 0; v < NormTile<kVector>::kVectors; ++v) {
        unpack<T, kVector>(bits[v], values + v * kVector);
    }
}

template <typename T, int kVector>
__device__ __forceinline__ void store_row(T* row, int tile, int size, const float* values) {
#pragma unroll
    for (int v = 0; v < NormTile<kVector>::kVectors; ++v) {
        const int i = vector_index<kVector>(tile, v);
        if (i < size) {
            packed_store<T, kVector>(row + i, pack<T, kVector>(values + v * kVector));
        }
    }
}

// weight or bias, of a dtype known only at run time, for one vector.
template <int kVector>
__device__ __forceinline__ void load_parameter(const void* data, int64_t index, int32_t dtype, float* values) {
    if constexpr (kVector == 1) {
        values[0] = load_as_float(data, index, dtype);
    } else {
        load_vector_as_float<kVector>(data, index, dtype, values);
    }
}

// The weights of a row's first tile.
template <int kVector>
__device__ __forceinline__ void load_weights(const MambaNorm& p, int64_t column, float* weights) {
#pragma unroll
    for (int v = 0; v < NormTile<kVector>::kVectors; ++v) {
        const int i = vector_index<kVector>(0, v);
        if (i < static_cast<int>(p.group_size)) {
            load_parameter<kVector>(p.weight, column + i, p.weight_dtype, weights + v * kVector);
        }
    }
}

}  // namespace mamba
