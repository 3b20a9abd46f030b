// Greedy decoding's choice: a cluster of blocks reads a row of logits, or one block where there are no clusters.
//
//     all threads    the largest of their logits --> the block's, as a key
//     thread 0       cluster_wait: the first block's barrier is there --> the key to the first block's inbox
//     first block    mbarrier_wait_cluster: all keys have come --> the token
#pragma once

#include "common/alignment.h"
#include "common/cuda_cluster.cuh"
#include "common/cuda_vector.cuh"
#include "linear/greedy.h"
#include "linear/kernels.h"

namespace mamba {

constexpr int kGreedyUnroll = 2;  // loads of 16 bytes that a thread has under way

// Keys are in the order of the logits, and among equal ones the first index is the largest.
__device__ __forceinline__ uint64_t greedy_key(float logit, int64_t index) {
    return static_cast<uint64_t>(ordered_logit(__float_as_uint(logit))) << 32 | ~static_cast<uint32_t>(index);
}
__device__ __forceinline__ uint64_t larger_key(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}
__device__ __forceinline__ uint64_t largest_of_warp(uint64_t key) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        key = larger_key(key, __shfl_xor_sync(0xffffffffu, key, distance));
    }
    return key;
}

// Of the logits that thread `first` of `threads` has: the vectors `threads` apart, and what is left behind them.
template <typename T>
__device__ __forceinline__ uint64_t largest_of_thread(const T* row, int64_t size, bool vectors, int first, int threads) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(T));
    const int64_t whole = vectors ? size / kVector : 0;
    uint64_t best = 0;
    for (int64_t tile = first; tile < whole; tile += threads * kGreedyUnroll) {
        Packed<T, kVector> bits[kGreedyUnroll];
#pragma unroll
        for (int u = 0; u < kGreedyUnroll; ++u) {
            if (tile + u * threads < whole) {
                bits[u] = packed_load<T, kVector>(row + (tile + u * threads) * kVector);
            }
        }
#pragma unroll
        for (int u = 0; u < kGreedyUnroll; ++u) {
            if (tile + u * threads < whole) {
                float logits[kVector];
                unpack<T, kVector>(bits[u], logits);
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    best = larger_key(best, greedy_key(logits[i], (tile + u * threads) * kVector + i));
                }
            }
        }
    }
    for (int64_t i = whole * kVector + first; i < size; i += threads) {
        best = larger_key(best, greedy_key(to_float(row[i]), i));
    }
    return best;
}

__global__ void __launch_bounds__(kGreedyThreads) greedy_token_kernel(const MambaGreedyToken p, bool vectors) {
    __shared__ uint64_t of_warp[32];
    __shared__ float2 inbox[kGreedyBlocks];  // keys as they are sent
    __shared__ uint64_t all_sent;
    const int thread = static_cast<int>(threadIdx.x), blocks = static_cast<int>(gridDim.x);
    const int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    if (row >= p.rows) {  // for the whole cluster
        return;
    }
    if (blocks > 1) {
        if (blockIdx.x == 0 && thread == 0) {
            mbarrier_init_cluster(&all_sent);
            mbarrier_arrive_expect_tx_cluster(&all_sent, static_cast<uint32_t>(blocks * sizeof(float2)));
        }
        cluster_arrive_relaxed();  // the barrier is there
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    uint64_t best = with_dtype(p.dtype, [&](auto of) {
        using T = typename decltype(of)::Type;
        const T* const logits = static_cast<const T*>(p.logits) + row * p.logits_row_stride;
        const int first = static_cast<int>(blockIdx.x * blockDim.x) + thread, threads = blocks * static_cast<int>(blockDim.x);
        return largest_of_thread(logits, p.vocabulary, vectors, first, threads);
    });
    best = largest_of_warp(best);
    if (thread % 32 == 0) {
        of_warp[thread / 32] = best;
    }
    __syncthreads();
    if (blocks > 1) {
        cluster_wait();
    }
    if (thread >= 32) {
        return;
    }
    best = largest_of_warp(thread < static_cast<int>(blockDim.x) / 32 ? of_warp[thread] : 0);
    if (blocks > 1) {
        if (thread == 0) {
            float* const place = reinterpret_cast<float*>(inbox + blockIdx.x);
            st_async_cluster(place, &all_sent, 0, __uint_as_float(static_cast<uint32_t>(best)));
            st_async_cluster(place + 1, &all_sent, 0, __uint_as_float(static_cast<uint32_t>(best >> 32)));
        }
        if (blockIdx.x != 0) {
            return;
        }
        mbarrier_wait_cluster(&all_sent);
        best = 0;
        if (thread < blocks) {
            const float2 sent = inbox[thread];
            best = static_cast<uint64_t>(__float_as_uint(sent.y)) << 32 | __float_as_uint(sent.x);
        }
        best = largest_of_warp(best);
    }
    if (thread == 0) {
        take_token(p, row, ~static_cast<uint32_t>(best));
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

inline cudaError_t launch_greedy_token(const MambaGreedyToken& p) {
    bool clusters = false;
    const cudaError_t error = has_clusters(greedy_token_kernel, p.run.device, &clusters);
    if (error != cudaSuccess) {
        return error;
    }
    const bool vectors = rows_aligned(p.logits, dtype_size(p.dtype), 16, used_stride(p.rows, p.logits_row_stride));
    const unsigned blocks = clusters ? kGreedyBlocks : 1;
    return launch_clusters(greedy_token_kernel, blocks, batch_grid(blocks, p.rows), kGreedyThreads, 0, p.run.stream, p,
                           vectors);
}

}  // namespace mamba
