// What the blocks of the forward kernels share, computed once for all of them: for the heads of a group and the row tiles of a
// head, C_t . B_s within each chunk; for forward_warpgroup.cuh also B and C as its tiles lie in shared memory, and for the row
// tiles and both passes of a head, the decays.
#pragma once

#include "ssd/cuda/states.cuh"
#include "ssd/cuda/warpgroup.cuh"
#include "ssd/launch.h"

namespace mamba {

// The 16 x 16 tiles of a chunk that lie on and below the diagonal, row by row, each as a warp's accumulators, by groups of 8
// x 8.
template <int kSteps>
struct ProductTiles {
    static constexpr int kTiles = kSteps / 16;
    static constexpr int kCount = kTiles * (kTiles + 1) / 2;
    static constexpr int kSize = kCount * 256;  // float32 elements of a chunk and group

    static __device__ __forceinline__ int row(int tile) { return row_of_triangle<kTiles>(tile); }
    static __device__ __forceinline__ int column(int tile, int row) { return tile - row * (row + 1) / 2; }
};

constexpr int kProductsThreads = 256;
static_assert(sizeof(ChunkDecays<64>) == kChunkDecaysBytes, "what the plan reserves");

inline int64_t decay_blocks(const MambaSsd& p, int64_t slots) {
    constexpr int kWarps = kProductsThreads / 32;
    return ceil_div(slots * p.nheads, kWarps);
}

template <typename T, int kSteps>
constexpr int products_shared_bytes(int states) {
    return 2 * kSteps * (states + kTilePad) * static_cast<int>(sizeof(T));
}

// Which chunk a slot holds, if any.
struct SlotChunk {
    int64_t batch, chunk;
    SequenceRange range;
    bool exists;
};
template <int kSteps>
__device__ __forceinline__ SlotChunk chunk_of_slot(const MambaSsd& p, int64_t slot) {
    SlotChunk found;
    found.batch = sequence_of_slot(p, kSteps, p.batch, slot);
    found.range = sequence_range(p, found.batch);
    found.chunk = slot - slot_of_sequence(p, kSteps, found.batch, found.range.begin);
    found.exists = found.chunk >= 0 && found.chunk * kSteps < found.range.seqlen;
    return found;
}

// Starts to copy the rows of a chunk's B or C into a tile of `pitch` elements a row, the rest of which becomes zero. vectors:
// as for load_tile.
template <typename T, int kSteps>
__device__ __forceinline__ void load_rows(T* tile, const T* from, int64_t row_stride, int valid, int dstate, int states,
                                          bool vectors) {
    constexpr int kVector = 16 / sizeof(T);
    const int pitch = states + kTilePad;
    const int width = vectors ? kVector : 1;
    const int pieces = states / width;  // of a row
    for (int i = threadIdx.x; i < kSteps * pieces; i += kProductsThreads) {
        const int row = i / pieces;
        const int column = (i - row * pieces) * width;
        const bool exists = row < valid && column < dstate;
        T* const to = tile + row * pitch + column;
        if (vectors) {
            cp_async<16>(to, exists ? from + row * row_stride + column : from, exists);
        } else {
            *to = exists ? from[row * row_stride + column] : from_float<T>(0.0f);
        }
    }
}

// Copies B and C to memory as forward_warpgroup.cuh wants them.
template <typename T>
__device__ __forceinline__ void store_tiles(T* tiles, const T* B_tile, const T* C_tile, int states) {
    const int pieces = states / 8;
    for (int i = threadIdx.x; i < kWarpgroupSteps * pieces; i += kProductsThreads) {
        const int row = i / pieces;
        const int column = (i - row * pieces) * 8;
        const int from = row * (states + kTilePad) + column;
        T* const C = tiles + kWarpgroupSteps * states;
        *reinterpret_cast<uint4*>(tiles + SwizzledTile<kWarpgroupSteps>::at(row, column)) =
            *reinterpret_cast<const uint4*>(B_tile + from);
        *reinterpret_cast<uint4*>(C + PairedTile::at(row, column)) = *reinterpret_cast<const uint4*>(C_tile + from);
    }
}

template <int kSteps>
__device__ __forceinline__ void store_decays(const MambaSsd& p, const ProductsLaunch& launch, int64_t index, int lane) {
    const int64_t slot = index / p.nheads;
    const int64_t head = index % p.nheads;
    if (slot >= launch.slots) {
        return;
    }
    const SlotChunk found = chunk_of_slot<kSteps>(p, slot);
    if (found.exists) {
        const StepSize size = step_size(p, found.range.row, found.range.begin, head);
        const int32_t* const seq_idx =
            p.seq_idx == nullptr ? nullptr : p.seq_idx + found.range.row * p.seqlen + found.range.begin;
        StepInputs<kSteps> inputs;
        load_steps<kSteps>(inputs, size, seq_idx, found.chunk * kSteps, steps_in<kSteps>(found.range.seqlen, found.chunk),
                           lane);
        chunk_decays<kSteps>(static_cast<ChunkDecays<kSteps>*>(launch.prepared.decays)[index], inputs, size, head_A(p, head),
                             lane);
    }
}

template <typename T, int kSteps>
__global__ void __launch_bounds__(kProductsThreads) ssd_products_kernel(const MambaSsd p, const ProductsLaunch launch) {
    using Tiles = ProductTiles<kSteps>;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, shared);
    const int states = launch.states;
    const int pitch = states + kTilePad;
    T* const B_tile = reinterpret_cast<T*>(shared);
    T* const C_tile = B_tile + kSteps * pitch;

    const int lane = threadIdx.x % 32;
    constexpr bool kForWarpgroups = sizeof(T) == 2 && kSteps == kWarpgroupSteps;
    if constexpr (kForWarpgroups) {
        const int64_t product_blocks = launch.slots * p.ngroups;
        if (blockIdx.x >= product_blocks) {
            store_decays<kSteps>(p, launch, (blockIdx.x - product_blocks) * (kProductsThreads / 32) + threadIdx.x / 32, lane);
            return;
        }
    }
    const int64_t group = blockIdx.x % p.ngroups;
    const int64_t slot = blockIdx.x / p.ngroups;
    const SlotChunk found = chunk_of_slot<kSteps>(p, slot);
    if (!found.exists) {
        return;
    }
    const int64_t row = found.range.row;
    const int valid = steps_in<kSteps>(found.range.seqlen, found.chunk);
    const int dstate = static_cast<int>(p.dstate);
    const int64_t step = found.range.begin + found.chunk * kSteps;
    const T* const B = static_cast<const T*>(p.B) + row * p.B_batch_stride + step * p.B_len_stride + group * p.B_group_stride;
    const T* const C = static_cast<const T*>(p.C) + row * p.C_batch_stride + step * p.C_len_stride + group * p.C_group_stride;
    load_rows<T, kSteps>(B_tile, B, p.B_len_stride, valid, dstate, states, launch.B_vectors != 0);
    load_rows<T, kSteps>(C_tile, C, p.C_len_stride, valid, dstate, states, launch.C_vectors != 0);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
    griddepcontrol_launch_dependents();  // sooner, blocks that wait would take the place of this kernel's

    if constexpr (kForWarpgroups) {
        if (launch.prepared.tiles != nullptr) {
            store_tiles<T>(static_cast<T*>(launch.prepared.tiles) + (slot * p.ngroups + group) * 2 * kSteps * states, B_tile,
                           C_tile, states);
        }
    }
    float* const products = launch.products + (slot * p.ngroups + group) * Tiles::kSize;
    for (int tile = threadIdx.x / 32; tile < Tiles::kCount; tile += kProductsThreads / 32) {
        const int i = Tiles::row(tile);
        const int j = Tiles::column(tile, i);
        float sum[4][4];  // two sums of each half, so that products need not wait for each other
        set_to_zero(sum);
#pragma unroll 2
        for (int column = 0; column < states; column += 32) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                Operand<T> a;
                Operand<T> b;
                load_a<T>(a, C_tile + 16 * i * pitch + column + 16 * k, pitch, lane);
                load_b<T>(b, B_tile + 16 * j * pitch + column + 16 * k, pitch, lane);
                multiply_add<T>(sum[k], a, b, 0);
                multiply_add<T>(sum[2 + k], a, b, 1);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float(&one)[4] = sum[2 * half];
            const float(&other)[4] = sum[2 * half + 1];
            float2* const to = reinterpret_cast<float2*>(products + tile * 256 + half * 128) + lane;
            to[0] = make_float2(one[0] + other[0], one[1] + other[1]);
            to[32] = make_float2(one[2] + other[2], one[3] + other[3]);
        }
    }
}

}  // namespace mamba
