// C_t . B_s within each chunk: what the heads of a group and the row tiles of a head share, computed once for all of them.
#pragma once

#include "ssd/states.cuh"

namespace mamba {

// The 16 x 16 tiles of a chunk that lie on and below the diagonal, row by row, each as a warp's accumulators.
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
    float* products;  // (slots, G, tile, half of its columns, lane, 4)
    int64_t slots;    // of chunks: chunk_slot() of the last one is below
    int32_t B_vectors, C_vectors;
};

// Where a chunk's products lie. Packed sequences begin anywhere: an entry's chunks never reach the next entry's slots, since
// ceil(seqlen / kSteps) <= end / kSteps - begin / kSteps + 1.
template <int kSteps>
__device__ __forceinline__ int64_t chunk_slot(const MambaSsd& p, int64_t batch, int64_t begin, int64_t chunk) {
    return (p.cu_seqlens == nullptr ? batch * ((p.seqlen + kSteps - 1) / kSteps) : begin / kSteps + batch) + chunk;
}

constexpr int kProductsThreads = 128;

template <typename T, class Layout>
constexpr int products_shared_bytes() {
    return 2 * Layout::kSteps * (Layout::kStates + kTilePad) * static_cast<int>(sizeof(T));
}

template <typename T, class Layout>
__global__ void __launch_bounds__(kProductsThreads) ssd_products_kernel(const MambaSsd p, const ProductsLaunch launch) {
    constexpr int kSteps = Layout::kSteps;
    constexpr int kStates = Layout::kStates;
    constexpr int kStride = kStates + kTilePad;
    using Tiles = ProductTiles<kSteps>;
    extern __shared__ __align__(16) unsigned char shared[];
    T* const B_tile = reinterpret_cast<T*>(shared);
    T* const C_tile = B_tile + kSteps * kStride;

    const int lane = threadIdx.x % 32;
    const int64_t group = blockIdx.x % p.ngroups;
    const int64_t slot = blockIdx.x / p.ngroups;
    int64_t batch = 0;
    if (p.cu_seqlens == nullptr) {
        batch = slot / ((p.seqlen + kSteps - 1) / kSteps);
    } else {  // the last entry whose slots begin here or earlier
        int64_t end = p.batch;
        while (end - batch > 1) {
            const int64_t middle = (batch + end) / 2;
            (chunk_slot<kSteps>(p, middle, sequence_range(p, middle).begin, 0) <= slot ? batch : end) = middle;
        }
    }
    const SequenceRange range = sequence_range(p, batch);
    const int64_t chunk = slot - chunk_slot<kSteps>(p, batch, range.begin, 0);
    const int64_t first = chunk * kSteps;
    if (first < 0 || first >= range.seqlen) {
        return;
    }
    const int valid = steps_in<kSteps>(range.seqlen, chunk);
    const int dstate = static_cast<int>(p.dstate);
    const int64_t step = range.begin + first;
    load_tile<T, kSteps, kStates, kProductsThreads>(
        B_tile, static_cast<const T*>(p.B) + range.row * p.B_batch_stride + step * p.B_len_stride + group * p.B_group_stride,
        p.B_len_stride, valid, dstate, launch.B_vectors);
    load_tile<T, kSteps, kStates, kProductsThreads>(
        C_tile, static_cast<const T*>(p.C) + range.row * p.C_batch_stride + step * p.C_len_stride + group * p.C_group_stride,
        p.C_len_stride, valid, dstate, launch.C_vectors);
    end_copies();
    wait_for_copies<0>();
    __syncthreads();

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
            *reinterpret_cast<float4*>(products + tile * 256 + half * 128 + lane * 4) =
                make_float4(one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]);
        }
    }
}

}  // namespace mamba
