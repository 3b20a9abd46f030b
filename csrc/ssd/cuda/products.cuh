// What the blocks of the forward kernels share, computed once for all of them: for the heads of a group and the row tiles of a
// head, C_t . B_s within each chunk; for forward_warpgroup.cuh also B and C as its tiles lie in shared memory, and for the row
// tiles and both passes of a head, the decays.
#pragma once

#include "ssd/cuda/states.cuh"
#include "ssd/cuda/warpgroup.cuh"
#include "ssd/plan.h"

namespace mamba {

// The 16 x 16 tiles of a chunk that lie on and below the diagonal, row by row, each as a warp's accumulators, by groups of 8
// x 8.
template <int kSteps>
struct ProductTiles {
    static constexpr int kTiles = kSteps / 16;
    static constexpr int kCount = kTiles * (kTiles + 1) / 2;
    static constexpr int kSize = kCount * 256;  // float32 elements of a chunk and group

    static __device__ __forceinline__ int row(int tile) {
        int i = 0;
#pragma unroll
        for (int row = 1; row < kTiles; ++row) {
            i += tile >= row * (row + 1) / 2 ? 1 : 0;
        }
        return i;
    }
    static __device__ __forceinline__ int column(int tile, int row) { return tile - row * (row + 1) / 2; }
};

struct ProductsLaunch {
    float* products;  // (slots, G, tile, half of its columns, half of its rows, lane, 2)
    void* tiles;      // (slots, G, 2, kSteps * kStates) of T: B as SwizzledTile, C as PairedTile; or NULL
    void* decays;     // (slots, H) ChunkDecays, a warp each in decay_blocks() more; or NULL
    int64_t slots;    // of chunks: chunk_slot() of the last one is below
    int32_t B_vectors, C_vectors;
};

// Where a chunk's products lie. Packed sequences begin anywhere: an entry's chunks never reach the next entry's slots, since
// ceil(seqlen / kSteps) <= end / kSteps - begin / kSteps + 1.
template <int kSteps>
__device__ __forceinline__ int64_t chunk_slot(const MambaSsd& p, int64_t batch, int64_t begin, int64_t chunk) {
    return (p.cu_seqlens == nullptr ? batch * ceil_div(p.seqlen, kSteps) : begin / kSteps + batch) + chunk;
}

constexpr int kProductsThreads = 256;
static_assert(sizeof(ChunkDecays<64>) == kChunkDecaysBytes, "what the plan reserves");

inline int64_t decay_blocks(const MambaSsd& p, int64_t slots) {
    constexpr int kWarps = kProductsThreads / 32;
    return ceil_div(slots * p.nheads, kWarps);
}

template <typename T, class Layout>
constexpr int products_shared_bytes() {
    return 2 * Layout::kSteps * (Layout::kStates + kTilePad) * static_cast<int>(sizeof(T));
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
    found.batch = 0;
    if (p.cu_seqlens == nullptr) {
        found.batch = slot / ceil_div(p.seqlen, kSteps);
    } else {  // the last entry whose slots begin here or earlier
        int64_t end = p.batch;
        while (end - found.batch > 1) {
            const int64_t middle = (found.batch + end) / 2;
            (chunk_slot<kSteps>(p, middle, sequence_range(p, middle).begin, 0) <= slot ? found.batch : end) = middle;
        }
    }
    found.range = sequence_range(p, found.batch);
    found.chunk = slot - chunk_slot<kSteps>(p, found.batch, found.range.begin, 0);
    found.exists = found.chunk >= 0 && found.chunk * kSteps < found.range.seqlen;
    return found;
}

// Copies a tile of rows (PaddedTile) to memory in the order of Tile.
template <typename T, int kRows, int kColumns, class Tile>
__device__ __forceinline__ void copy_tile(T* to, const T* tile) {
    constexpr int kVector = 16 / sizeof(T);
    for (int i = threadIdx.x; i < kRows * kColumns / kVector; i += kProductsThreads) {
        const int row = i / (kColumns / kVector);
        const int column = i % (kColumns / kVector) * kVector;
        *reinterpret_cast<uint4*>(to + Tile::at(row, column)) =
            *reinterpret_cast<const uint4*>(tile + PaddedTile<kColumns>::at(row, column));
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
        chunk_decays<kSteps>(static_cast<ChunkDecays<kSteps>*>(launch.decays)[index], inputs, size, head_A(p, head), lane);
    }
}

template <typename T, class Layout>
__global__ void __launch_bounds__(kProductsThreads) ssd_products_kernel(const MambaSsd p, const ProductsLaunch launch) {
    constexpr int kSteps = Layout::kSteps;
    constexpr int kStates = Layout::kStates;
    constexpr int kStride = kStates + kTilePad;
    using Tiles = ProductTiles<kSteps>;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, shared);
    T* const B_tile = reinterpret_cast<T*>(shared);
    T* const C_tile = B_tile + kSteps * kStride;

    const int lane = threadIdx.x % 32;
    constexpr bool kForWarpgroups = sizeof(T) == 2 && kSteps == 8 * kStepGroups;
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
    const SequenceRange& range = found.range;
    const int valid = steps_in<kSteps>(range.seqlen, found.chunk);
    const int dstate = static_cast<int>(p.dstate);
    const int64_t step = range.begin + found.chunk * kSteps;
    load_tile<T, kSteps, kStates, kProductsThreads>(
        B_tile, static_cast<const T*>(p.B) + range.row * p.B_batch_stride + step * p.B_len_stride + group * p.B_group_stride,
        p.B_len_stride, valid, dstate, launch.B_vectors);
    load_tile<T, kSteps, kStates, kProductsThreads>(
        C_tile, static_cast<const T*>(p.C) + range.row * p.C_batch_stride + step * p.C_len_stride + group * p.C_group_stride,
        p.C_len_stride, valid, dstate, launch.C_vectors);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();

    if constexpr (kForWarpgroups) {
        if (launch.tiles != nullptr) {
            T* const tiles = static_cast<T*>(launch.tiles) + (slot * p.ngroups + group) * 2 * kSteps * kStates;
            copy_tile<T, kSteps, kStates, SwizzledTile<kSteps>>(tiles, B_tile);
            copy_tile<T, kSteps, kStates, PairedTile>(tiles + kSteps * kStates, C_tile);
        }
    }
    float* const products = launch.products + (slot * p.ngroups + group) * Tiles::kSize;
    for (int tile = threadIdx.x / 32; tile < Tiles::kCount; tile += kProductsThreads / 32) {
        const int i = Tiles::row(tile);
        const int j = Tiles::column(tile, i);
        float sum[4][4];  // two sums of each half, so that products need not wait for each other
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            sum[k][0] = sum[k][1] = sum[k][2] = sum[k][3] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < kStates / 16; ++k) {
            Operand<T> a;
            Operand<T> b;
            load_a<T>(a, C_tile + 16 * i * kStride + 16 * k, kStride, lane);
            load_b<T>(b, B_tile + 16 * j * kStride + 16 * k, kStride, lane);
            multiply_add<T>(sum[k % 2], a, b, 0);
            multiply_add<T>(sum[2 + k % 2], a, b, 1);
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
