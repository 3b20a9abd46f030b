// Before the warpgroup kernels of backward (states_warpgroup.cuh, backward_warpgroup.cuh): B and C as their tiles lie in shared
// memory, and the decays of all chunks, each computed once for all blocks.
#pragma once

#include "ssd/cuda/states.cuh"
#include "ssd/cuda/warpgroup.cuh"
#include "ssd/plan.h"

namespace mamba {

constexpr int kPrepareThreads = 256;
static_assert(kWarpgroupSteps == 8 * kStepGroups, "PairedTile has a chunk's steps");

struct PrepareLaunch {
    void* tiles;         // (B, chunks, G, 3, steps * states) of T: B and C as SwizzledTile, and B as PairedTile
    void* chunk_decays;  // (B, chunks, H) of WarpgroupDecays, a warp each
    int64_t chunks;
    int32_t B_vectors, C_vectors;
};
using WarpgroupDecays = BackwardDecays<kWarpgroupSteps>;
static_assert(sizeof(WarpgroupDecays) == kBackwardDecaysBytes, "what the plan reserves");

// Eight neighbours of 16 bits, of which `count` exist; the others are zero. vectors: all or none exist, at a multiple of 16
// bytes.
__device__ __forceinline__ uint4 load_piece(const void* from, int count, bool vectors) {
    uint32_t words[4] = {0, 0, 0, 0};
    if (vectors) {
        return count > 0 ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    }
    const uint16_t* const elements = static_cast<const uint16_t*>(from);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        words[i / 2] |= (i < count ? static_cast<uint32_t>(elements[i]) : 0) << 16 * (i % 2);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

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

template <typename T, int kStates>
__global__ void __launch_bounds__(kPrepareThreads) ssd_prepare_kernel(const MambaSsd p, const PrepareLaunch launch) {
    constexpr int kSteps = kWarpgroupSteps;
    constexpr int kTile = kSteps * kStates;
    const int64_t tile_blocks = p.batch * launch.chunks * p.ngroups;
    if (blockIdx.x < tile_blocks) {
        const int64_t group = blockIdx.x % p.ngroups;
        const int64_t chunk = blockIdx.x / p.ngroups % launch.chunks;
        const int64_t batch = blockIdx.x / p.ngroups / launch.chunks;
        const int valid = steps_in<kSteps>(p.seqlen, chunk);
        const T* const B =
            static_cast<const T*>(p.B) + batch * p.B_batch_stride + chunk * kSteps * p.B_len_stride + group * p.B_group_stride;
        const T* const C =
            static_cast<const T*>(p.C) + batch * p.C_batch_stride + chunk * kSteps * p.C_len_stride + group * p.C_group_stride;
        T* const tiles = static_cast<T*>(launch.tiles) + static_cast<int64_t>(blockIdx.x) * 3 * kTile;
#pragma unroll 2
        for (int i = threadIdx.x; i < kTile / 8; i += kPrepareThreads) {
            const int row = i / (kStates / 8);
            const int column = i % (kStates / 8) * 8;
            const int count = row < valid ? static_cast<int>(p.dstate) - column : 0;
            const uint4 b = load_piece(B + row * p.B_len_stride + column, count, launch.B_vectors);
            const uint4 c = load_piece(C + row * p.C_len_stride + column, count, launch.C_vectors);
            *reinterpret_cast<uint4*>(tiles + SwizzledTile<kSteps>::at(row, column)) = b;
            *reinterpret_cast<uint4*>(tiles + kTile + SwizzledTile<kSteps>::at(row, column)) = c;
            *reinterpret_cast<uint4*>(tiles + 2 * kTile + PairedTile::at(row, column)) = b;
        }
        return;
    }
    const int lane = threadIdx.x % 32;
    const int64_t index = (blockIdx.x - tile_blocks) * (kPrepareThreads / 32) + threadIdx.x / 32;
    const int64_t head = index % p.nheads;
    const int64_t chunk = index / p.nheads % launch.chunks;
    const int64_t batch = index / p.nheads / launch.chunks;
    if (batch < p.batch) {
        const StepSize size = step_size(p, batch, 0, head);
        StepInputs<kSteps> inputs;
        load_steps<kSteps>(inputs, size, p.seq_idx == nullptr ? nullptr : p.seq_idx + batch * p.seqlen, chunk * kSteps,
                           steps_in<kSteps>(p.seqlen, chunk), lane);
        chunk_decays<kSteps>(static_cast<WarpgroupDecays*>(launch.chunk_decays)[index], inputs, size, head_A(p, head), lane);
    }
}

}  // namespace mamba
