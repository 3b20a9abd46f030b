// The inputs of the norm's backward: rows where they are, and their copies in shared memory, which a block makes some rows
// ahead so that memory is busy while it computes.
#pragma once

#include "common/cuda_utils.cuh"
#include "norm/cuda/common.cuh"

namespace mamba {

// A row's inputs from its first column on: where the tensors are, or their copies. The pointer of an absent one is not used.
struct NormRow {
    const void* dout;    // T
    const void* x;       // T; Other where it is residual_out
    const void* beside;  // Other: z or dresidual_out
};

// Whether s, which is normalised, is not x but the sum that forward stored.
__device__ __forceinline__ bool x_is_sum(const MambaNormBackward& q, bool gated) {
    return !gated && q.forward.residual_out != nullptr;
}

template <typename T>
__device__ __forceinline__ const T* row_of(const void* data, int64_t row, int64_t stride, int64_t column) {
    return static_cast<const T*>(data) + row * stride + column;
}
template <typename T>
__device__ __forceinline__ T* row_of(void* data, int64_t row, int64_t stride, int64_t column) {
    return static_cast<T*>(data) + row * stride + column;
}

// Moves `at`, in global memory, by so many rows and columns.
template <typename T, typename Other>
__device__ __forceinline__ void advance(const MambaNormBackward& q, bool gated, int64_t rows, int64_t columns, NormRow& at) {
    const MambaNorm& p = q.forward;
    at.dout = row_of<T>(at.dout, rows, q.dout_row_stride, columns);
    if (x_is_sum(q, gated)) {
        at.x = row_of<Other>(at.x, rows, p.residual_out_row_stride, columns);
    } else {
        at.x = row_of<T>(at.x, rows, p.x_row_stride, columns);
    }
    at.beside = row_of<Other>(at.beside, rows, gated ? p.z_row_stride : q.dresidual_out_row_stride, columns);
}

template <typename T, int kVector>
__device__ __forceinline__ void load_vector(const void* row, int i, float* values) {
    unpack<T, kVector>(packed_load<T, kVector>(static_cast<const T*>(row) + i), values);
}

// ---- copies in shared memory -----------------------------------------------------------------------------------------

// The wider elements lie first, so that all parts are aligned.
template <typename T, typename Other>
__device__ __forceinline__ NormRow row_in_shared(const unsigned char* copy, int size, bool gated) {
    const unsigned char* x = copy + size * static_cast<int>(sizeof(Other));
    return {x + size * static_cast<int>(gated ? sizeof(T) : sizeof(Other)), x, copy};
}

// Starts to copy this thread's vectors of a tile. No other thread reads the copies, so that a block need not meet for them.
template <typename T, int kVector>
__device__ __forceinline__ void copy_vectors(const void* to, const void* from, int tile, int size) {
    T* const to_row = const_cast<T*>(static_cast<const T*>(to));
    const T* const from_row = static_cast<const T*>(from);
#pragma unroll
    for (int v = 0; v < NormTile<kVector>::kVectors; ++v) {
        const int i = vector_index<kVector>(tile, v);
        if (i < size) {
            cp_async<kVector * sizeof(T)>(to_row + i, from_row + i, true);
        }
    }
}
template <typename T, typename Other, int kVector>
__device__ __forceinline__ void copy_row(const MambaNormBackward& q, bool gated, const NormRow& from, int size, int step,
                                         unsigned char* copy) {
    const NormRow to = row_in_shared<T, Other>(copy, size, gated);
    for (int tile = 0; tile < size; tile += step) {
        copy_vectors<T, kVector>(to.dout, from.dout, tile, size);
        if (x_is_sum(q, gated)) {
            copy_vectors<Other, kVector>(to.x, from.x, tile, size);
        } else {
            copy_vectors<T, kVector>(to.x, from.x, tile, size);
        }
        if (gated || q.dresidual_out != nullptr) {
            copy_vectors<Other, kVector>(to.beside, from.beside, tile, size);
        }
    }
}

// Waits for all but the last `pending` of the rows that this thread copies.
__device__ __forceinline__ void wait_for_row(int pending) {
    static_assert(kNormRowsAhead == 3, "a case for each number of rows below it");
    if (pending >= 2) {
        cp_async_wait_group<2>();
    } else if (pending == 1) {
        cp_async_wait_group<1>();
    } else {
        cp_async_wait_group<0>();
    }
}

}  // namespace mamba
