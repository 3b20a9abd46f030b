// What leaves a block of backward_warpgroup.cuh for memory with each item: sums over the chunk for biases and mimo_v, and dv.
#pragma once

#include "mamba3/cuda/backward_warpgroup_walk.cuh"

namespace mamba {

// Parts of the biases' gradients, (R, N), and of mimo_v's, (R, P).
template <typename T>
__device__ __forceinline__ float* bias_sums(const Mamba3Walk<T>& walk, const Mamba3Item& item, int of_k) {
    const Mamba3ChunkPlaces<T>& places = walk.shared.places;
    return places.bias + (item.tile + of_k * walk.row_tiles()) * places.bias_stride + item.slot * walk.rank() * walk.dstate();
}
template <typename T>
__device__ __forceinline__ float* mimo_v_sums(const Mamba3Walk<T>& walk, const Mamba3Item& item) {
    return walk.shared.places.mimo_v + item.slot * walk.p().rank * walk.p().headdim + item.row0();
}

template <typename T>
__device__ __forceinline__ void store_bias(const Mamba3Walk<T>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    const int rank = walk.rank(), size = rank * Shared::kStates;
    const float* const parts = walk.shared.bias_parts(item.number);
#pragma unroll 1
    for (int i = walk.stand().thread; i < 2 * size; i += kMamba3BackwardThreads) {
        const int m = i >= size ? 1 : 0, column = i & (Shared::kStates - 1);
        const int r = static_cast<int>(static_cast<unsigned>(i) / Shared::kStates) - m * rank;
        const float* const from = parts + i + m * 3 * size;
        if (column < walk.dstate()) {
            bias_sums(walk, item, m)[r * walk.dstate() + element_of_column(walk.p(), column)] =
                (from[0] + from[size]) + (from[2 * size] + from[3 * size]);
        }
    }
}

// From dx in shared memory. A thread has eight columns of a step.
template <typename T>
__device__ __forceinline__ void store_dv(const Mamba3Walk<T>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    const MambaMamba3& p = walk.p();
    const Mamba3ChunkPlaces<T>& places = walk.shared.places;
    const int thread = walk.stand().thread, rank = walk.rank();
    const int headdim = static_cast<int>(p.headdim), head = places.group_head + item.slot;
    const float* const weights =
        p.mimo_v != nullptr ? p.mimo_v + static_cast<int64_t>(head) * rank * headdim + item.row0() : nullptr;
    const int t = thread / 8, column = thread % 8 * 8;
    if (t < places.steps && column < walk.columns(item)) {
        const float* const from = walk.shared.dx() + column;
        float sum[8];
#pragma unroll 1
        for (int r = 0; r < rank; ++r) {
            float value[8];
            load_eight(value, from + (t * rank + r) * Shared::kDxPitch);
            if (weights != nullptr) {
                float weight[8];
                load_eight(weight, weights + r * headdim + column);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    value[i] *= weight[i];
                }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum[i] = r > 0 ? sum[i] + value[i] : value[i];
            }
        }
        const int at = item.slot * headdim + item.row0() + column;
        if (places.dfinal_v != nullptr && t == places.steps - 1) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum[i] += places.dfinal_v[at + i];
            }
        }
        T* const to = places.dv + t * walk.q.dv_step_stride + at;
        if (walk.launch.dv_vectors != 0) {
            store_eight(to, sum);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                to[i] = from_float<T>(sum[i]);
            }
        }
    }
    const int own = thread % Shared::kInner, r = thread / Shared::kInner;
    if (weights != nullptr && r < rank && own < walk.columns(item)) {
        const T* const v = places.v + item.slot * p.v_head_stride + item.row0() + own;
        float sum = 0.0f;
#pragma unroll 4
        for (int step = 0; step < places.steps; ++step) {
            sum = fmaf(walk.shared.dx()[(step * rank + r) * Shared::kDxPitch + own], to_float(v[step * p.v_len_stride]), sum);
        }
        mimo_v_sums(walk, item)[r * headdim + own] = sum;
    }
}

// A warp's 16 rows and 64 columns of dq or dk, whose sums are complete. to: the group's first element of the first row.
template <typename T>
__device__ __forceinline__ void store_whole(const MambaMamba3& p, T* to, int64_t row_stride, const float (&sum)[8][4], int rows,
                                            int column0, int lane) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, column = column0 + 8 * j + lane % 4 * 2 + i % 2;
            if (row < rows && column < p.dstate) {
                to[row * row_stride + element_of_column(p, column)] = from_float<T>(sum[j][i]);
            }
        }
    }
}

// An empty slot's, whose sums are read too.
template <typename T>
__device__ __forceinline__ void store_nothing(const Mamba3Walk<T>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    const MambaMamba3& p = walk.p();
    const int thread = walk.stand().thread;
    for (int i = thread; i < walk.rank() * walk.dstate(); i += kMamba3BackwardThreads) {
        bias_sums(walk, item, 0)[i] = bias_sums(walk, item, 1)[i] = 0.0f;
    }
    for (int i = thread; i < walk.rank() * Shared::kInner && p.mimo_v != nullptr; i += kMamba3BackwardThreads) {
        if (i % Shared::kInner < walk.columns(item)) {
            mimo_v_sums(walk, item)[i / Shared::kInner * p.headdim + i % Shared::kInner] = 0.0f;
        }
    }
}

}  // namespace mamba
