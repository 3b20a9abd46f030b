// The cross entropy on the GPU: a block reads a row for its sums, and once more, from the L2 cache, for the gradient that takes
// its place.
#pragma once

#include "common/cuda_vector.cuh"
#include "common/kernel_launch.cuh"
#include "cross_entropy/kernels.h"
#include "cross_entropy/launch.h"
#include "cross_entropy/row.h"

namespace mamba {

constexpr int kCrossEntropyUnroll = 4;  // vectors of 16 bytes that a thread loads at a time

// A row: aligned vectors, and up to a vector of elements before and after them, one a thread.
template <typename T>
struct LogitRow {
    static constexpr int kVector = 16 / static_cast<int>(sizeof(T));

    T* data;
    int size, head, vectors;

    __device__ __forceinline__ LogitRow(const MambaCrossEntropy& p, int64_t row)
        : data(static_cast<T*>(p.logits) + row * p.logits_row_stride), size(static_cast<int>(p.vocabulary)) {
        const int beyond = static_cast<int>(reinterpret_cast<uintptr_t>(data) % 16 / sizeof(T));
        head = beyond == 0 ? 0 : kVector - beyond;
        head = head < size ? head : size;
        vectors = (size - head) / kVector;
    }
    // The thread's element outside the vectors; -1: none.
    __device__ __forceinline__ int single() const {
        const int thread = static_cast<int>(threadIdx.x), i = thread < head ? thread : thread + vectors * kVector;
        return i < size ? i : -1;
    }
    // visit(values) for each of the thread's vectors. kStore: stores them, and begins at the end, which the cache still has.
    template <bool kStore, class Visit>
    __device__ __forceinline__ void for_each_vector(const Visit& visit) const {
        constexpr int kUnroll = kCrossEntropyUnroll;
        const int step = static_cast<int>(blockDim.x), tiles = ceil_div(vectors, step * kUnroll);
        for (int tile = 0; tile < tiles; ++tile) {
            const int first = static_cast<int>(threadIdx.x) + (kStore ? tiles - 1 - tile : tile) * step * kUnroll;
            Packed<T, kVector> bits[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (first + u * step < vectors) {
                    bits[u] = packed_load<T, kVector>(data + head + (first + u * step) * kVector);
                }
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (first + u * step < vectors) {
                    float x[kVector];
                    unpack<T, kVector>(bits[u], x);
                    visit(x);
                    if constexpr (kStore) {
                        packed_store_once<T, kVector>(data + head + (first + u * step) * kVector, pack<T, kVector>(x));
                    }
                }
            }
        }
    }
    __device__ __forceinline__ void fill(float value) const {
        const int i = single();
        if (i >= 0) {
            data[i] = from_float<T>(value);
        }
        float values[kVector];
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
            values[k] = value;
        }
        for (int v = static_cast<int>(threadIdx.x); v < vectors; v += static_cast<int>(blockDim.x)) {
            packed_store_once<T, kVector>(data + head + v * kVector, pack<T, kVector>(values));
        }
    }
};

// Of the logits that a thread, a warp or a block has seen.
struct LogitSums {
    float max;    // the largest; finite before any, so that -inf is no difference from it
    float sum;    // of exp(l - max)
    float above;  // of l - shift, where labels are smoothed

    // shift: near the logits, so that their sum is not rounded to their size times their number.
    template <int N>
    __device__ __forceinline__ void add(const float* x, bool smooth, float shift) {
        float largest = max;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            largest = fmaxf(largest, x[i]);
        }
        sum *= exp2_fast((max - largest) * kLog2e);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            sum += exp2_fast((x[i] - largest) * kLog2e);
        }
        if (smooth) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                above += x[i] - shift;
            }
        }
        max = largest;
    }
    // Every lane gets the sums of all.
    __device__ __forceinline__ void over_warp() {
        float largest = max;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
        }
        sum = sum_over_warp(sum * exp2_fast((max - largest) * kLog2e));
        above = sum_over_warp(above);
        max = largest;
    }
};

template <typename T>
__global__ void __launch_bounds__(kCrossEntropyThreads) cross_entropy_kernel(const MambaCrossEntropy p) {
    static constexpr int kVector = LogitRow<T>::kVector;
    constexpr float kLowest = -3.402823466e38f;
    __shared__ LogitSums of_warp[kCrossEntropyThreads / 32];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const LogitRow<T> row(p, blockIdx.x);
    const int64_t label = p.labels[blockIdx.x];
    if (label == p.ignore_index || label < 0 || label >= p.vocabulary) {
        const float value = label == p.ignore_index ? 0.0f : __int_as_float(0x7fffffff);
        if (thread == 0) {
            p.losses[blockIdx.x] = value;
        }
        if (p.gradient) {
            row.fill(value);
        }
        return;
    }
    const float logit = to_float(row.data[label]);
    const bool smooth = p.label_smoothing != 0.0f;
    const float shift = fabsf(logit) <= -kLowest ? logit : 0.0f;  // finite

    LogitSums sums = {kLowest, 0.0f, 0.0f};
    const int single = row.single();
    if (single >= 0) {
        const float x = to_float(row.data[single]);
        sums.add<1>(&x, smooth, shift);
    }
    row.template for_each_vector<false>([&](const float* x) { sums.add<kVector>(x, smooth, shift); });
    sums.over_warp();
    if (lane == 0) {
        of_warp[thread / 32] = sums;
    }
    __syncthreads();
    sums = {kLowest, 0.0f, 0.0f};
    if (lane < static_cast<int>(blockDim.x) / 32) {
        sums = of_warp[lane];
    }
    sums.over_warp();

    const float mean = sums.above / static_cast<float>(row.size) + (shift - sums.max);
    const CrossEntropyRow result = cross_entropy_row(p, sums.max, sums.sum, logit, mean);
    if (thread == 0) {
        p.losses[blockIdx.x] = result.loss;
    }
    if (!p.gradient) {
        return;
    }
    const auto gradient = [&](float x) { return fmaf(exp2_fast((x - sums.max) * kLog2e), result.scale, -result.offset); };
    if (single >= 0) {
        row.data[single] = from_float<T>(gradient(to_float(row.data[single])));
    }
    row.template for_each_vector<true>([&](float* x) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            x[i] = gradient(x[i]);
        }
    });
    __syncthreads();
    if (thread == 0) {
        row.data[label] = from_float<T>(result.label);
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <typename T>
cudaError_t launch_cross_entropy(const MambaCrossEntropy& p, int kernel) {
    return launch_row<T, kCrossEntropyKernels>(cross_entropy_table, kernel, [&](auto) {
        return launch_kernel(cross_entropy_kernel<T>, p.rows, static_cast<unsigned>(cross_entropy_threads(p)), 0, p.run.stream,
                             p);
    });
}

template <typename T>
CrossEntropyLaunchers CrossEntropyLaunchers::of() {
    CrossEntropyLaunchers launchers;
    launchers.cross_entropy = launch_cross_entropy<T>;
    return launchers;
}

}  // namespace mamba
