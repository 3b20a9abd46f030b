// Products of a warpgroup (four warps, 128 threads) on Hopper's tensor cores: C (64 x N, float32) += A (64 x 16) B (16 x N). A
// and C are in registers, 16 rows a warp, laid out as in tensor_core.cuh; B stays in shared memory, from where the tensor cores
// read it once for all four warps. PTX calls this wgmma. It exists in machine code for 9.0a, which is what GPUs of 9.0 run.
#pragma once

#include "ssd/cuda/tensor_core.cuh"
#include "ssd/layouts.h"

namespace mamba {

// A tile of 16-bit elements as the warpgroup reads it: blocks of kRows x 64, in each of whose rows the eight pieces of 16 bytes
// change places by the row ("128-byte swizzle"). It starts at a multiple of 1024 bytes.
template <int kRows>
struct SwizzledTile {
    static constexpr int kRowBytes = 128;
    static __device__ __forceinline__ int at(int row, int column) {
        return column / 64 * (kRows * 64) + row / 8 * 512 + row % 8 * 64 + (column / 8 ^ row) % 8 * 8 + column % 8;
    }
};

// The element 16 k columns beyond `at`, whose column is a multiple of 64 and less than 16 more. From the address: the compiler
// would keep an offset for each k in a register, and has none left.
template <typename T>
__device__ __forceinline__ T* columns_on(T* at, int k) {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(at) ^ static_cast<uintptr_t>(k % 4 * 32)) + k / 4 * (64 * 64);
}

// The steps of C and M lie in another order in their tiles: the eight groups of eight as 0, 7, 1, 6, 2, 5, 3, 4. Of the rows of
// M, which end at the diagonal, each warp so has a short and a long group, together as many columns as any other warp.
constexpr int kStepGroups = 8;
__host__ __device__ constexpr int place_of_group(int group) {
    return group < kStepGroups / 2 ? 2 * group : 2 * kStepGroups - 1 - 2 * group;
}
__host__ __device__ constexpr int group_at_place(int place) {
    return place % 2 == 0 ? place / 2 : kStepGroups - 1 - place / 2;
}

// A SwizzledTile whose rows are steps in that order.
struct PairedTile {
    static constexpr int kRowBytes = SwizzledTile<8 * kStepGroups>::kRowBytes;
    static __device__ __forceinline__ int at(int row, int column) {
        return SwizzledTile<8 * kStepGroups>::at(8 * place_of_group(row / 8) + row % 8, column);
    }
};

static_assert(kWarpgroupSteps == 8 * kStepGroups, "PairedTile has a chunk's steps");

// Where a thread's first piece of a chunk's rows lies, for load_swizzled.
template <typename T>
__device__ __forceinline__ const T* first_piece(const T* rows, int64_t row_stride, int thread) {
    return rows + thread / 8 * row_stride + thread % 8 * 8;
}

// Starts to copy a chunk's `valid` steps of 64 columns, of which `columns` exist, into a SwizzledTile; the rest becomes zero.
// at: first_piece of them.
template <typename T, int kThreads>
__device__ __forceinline__ void load_swizzled(T* tile, const T* at, int64_t row_stride, int valid, int columns, bool vectors,
                                              int thread) {
    constexpr int kTogether = kThreads / 8;  // rows
    static_assert(kTogether % 8 == 0, "then rows of a thread lie equally far from each other");
    const int row = thread / 8;
    const int column = thread % 8 * 8;
    T* const to = tile + SwizzledTile<kWarpgroupSteps>::at(row, column);
    if (vectors && valid == kWarpgroupSteps && columns >= 64) {  // most tiles: without a branch or a choice
#pragma unroll
        for (int i = 0; i < kWarpgroupSteps; i += kTogether) {
            cp_async<16>(to + i * 64, at, true);
            at += kTogether * row_stride;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < kWarpgroupSteps; i += kTogether) {
        const int count = row + i < valid ? columns - column : 0;
        if (vectors) {
            cp_async<16>(to + i * 64, at, count > 0);
        } else {
#pragma unroll 1
            for (int j = 0; j < 8; ++j) {
                to[i * 64 + j] = j < count ? at[j] : from_float<T>(0.0f);
            }
        }
        at += kTogether * row_stride;
    }
}

// to = weight * from for the pieces of a tile that load_swizzled and ForwardCopies have the thread copy.
template <typename T, int kThreads>
__device__ __forceinline__ void weight_swizzled(T* to, const T* from, const float* weight, int thread) {
    constexpr int kTogether = kThreads / 8;  // rows
    const int row = thread / 8;
    const int at = SwizzledTile<kWarpgroupSteps>::at(row, thread % 8 * 8);
#pragma unroll
    for (int i = 0; i < kWarpgroupSteps; i += kTogether) {
        const uint4 piece = *reinterpret_cast<const uint4*>(from + at + i * 64);
        const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
        uint32_t weighted[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 pair = unpack2<T>(pairs[k]);
            weighted[k] = pack2<T>(pair.x * weight[row + i], pair.y * weight[row + i]);
        }
        *reinterpret_cast<uint4*>(to + at + i * 64) = make_uint4(weighted[0], weighted[1], weighted[2], weighted[3]);
    }
}

// Descriptors count in 16 bytes: a block of 64 columns of a tile of 64 rows, and 16 rows or 16 columns of it.
constexpr int kBlock = 64 * 8;
constexpr int kRows16 = 16 * 8;
constexpr int kColumns16 = 2;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// How the tensor cores are told of a SwizzledTile, from the element at `tile` on.
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile, int bytes_between_blocks) {
    const uint64_t swizzle = 1;                         // 128 bytes
    const uint64_t eight_rows = 1024 / 16;              // units of 16 bytes, as all of these
    const uint64_t blocks = bytes_between_blocks / 16;  // counts for a B that lies as rows of k
    return swizzle << 62 | eight_rows << 32 | blocks << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

// Products run by themselves after they are begun: the compiler must neither compute their registers later nor use them sooner.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&values)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        fence_registers(values[i]);
    }
}
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&values)[kCount][4], float above, float below) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
        values[j][0] *= above;
        values[j][1] *= above;
        values[j][2] *= below;
        values[j][3] *= below;
    }
}
template <typename T, int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(Operand<T> (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        fence_registers(values[i].r[0]);
    }
}
template <typename... Operands>
__device__ __forceinline__ void warpgroup_fence_operands(Operands&... operands) {
    (warpgroup_fence_operand(operands), ...);
}

#endif

}  // namespace mamba
