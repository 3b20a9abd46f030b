// What leaves a block of backward_warpgroup.cuh for memory with each item: sums over the chunk for biases and mimo_v, and dv.
#pragma once

#include "mamba3/cuda/backward/warpgroup_block.cuh"

namespace mamba {

// Parts of the biases' gradients, (R, N), and of mimo_v's, (R, P).
template <typename T, int kRank>
__device__ __forceinline__ float* bias_sums(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item, int of_k) {
    const Mamba3ChunkPlaces<T>& places = walk.shared.places;
    return places.bias + (item.tile + of_k * walk.row_tiles()) * places.bias_stride + item.slot * kRank * walk.dstate();
}
template <typename T, int kRank>
__device__ __forceinline__ float* mimo_v_sums(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item) {
    return walk.shared.places.mimo_v + item.slot * walk.p().rank * walk.p().headdim + item.row0();
}

template <typename T, int kRank>
__device__ __forceinline__ void store_bias(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    constexpr int kSize = kRank * Shared::kStates;
    // By the warps from the last one down: the first ones have more to do in store_dv.
    const int first = 4 * (kMamba3BackwardThreads - 1 - walk.stand().thread);
    const int m = first >= kSize ? 1 : 0, column = first & (Shared::kStates - 1);
    if (first >= 2 * kSize || column >= walk.dstate()) {
        return;
    }
    const int r = static_cast<int>(static_cast<unsigned>(first) / Shared::kStates) - m * kRank;
    const float* const from = walk.shared.bias_parts(item.number) + first + m * 3 * kSize;
    float sum[4], part[4];
    unpack<float, 4>(packed_load<float, 4>(from), sum);
#pragma unroll
    for (int i = 1; i < 4; ++i) {
        unpack<float, 4>(packed_load<float, 4>(from + i * kSize), part);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            sum[j] += part[j];
        }
    }
    float* const to = bias_sums(walk, item, m) + r * walk.dstate();
    static_assert(kMamba3BackwardThreads * 4 >= 2 * kMamba3WarpgroupRank * Shared::kStates, "four columns a thread");
    if constexpr (kRank == 1) {  // dstate is a multiple of 4
        packed_store<float, 4>(to + column, pack<float, 4>(sum));
    } else {
        float* const other = to + walk.dstate() / 2;
        *reinterpret_cast<float2*>(to + column / 2) = make_float2(sum[0], sum[2]);
        *reinterpret_cast<float2*>(other + column / 2) = make_float2(sum[1], sum[3]);
    }
}

// From dx in shared memory: dv, and parts of mimo_v's gradient.
template <typename T, int kRank>
__device__ __forceinline__ void store_dv(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    constexpr int kEach = 8 / kRank, kPieces = Shared::kInner / kEach;  // columns of a step in a thread
    constexpr int kWidth = kEach < 4 ? kEach : 4;
    const Mamba3ChunkPlaces<T>& places = walk.shared.places;
    const int thread = walk.stand().thread, t = thread / kPieces, column = thread % kPieces * kEach;
    const int headdim = static_cast<int>(walk.p().headdim);
    if (t < places.steps && column < walk.columns(item)) {
        const float* const from = walk.shared.dx() + t * kRank * Shared::kDxPitch + column;
        float sum[kEach] = {};
#pragma unroll
        for (int r = 0; r < kRank; ++r) {
#pragma unroll
            for (int i = 0; i < kEach; i += kWidth) {
                float value[kWidth], weight[kWidth];
                unpack<float, kWidth>(packed_load<float, kWidth>(from + r * Shared::kDxPitch + i), value);
                if constexpr (kRank > 1) {
                    const float* const weights = walk.copied_projection(item) + column;
                    unpack<float, kWidth>(packed_load<float, kWidth>(weights + r * Shared::kInner + i), weight);
                }
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    sum[i + j] = kRank > 1 ? fmaf(value[j], weight[j], sum[i + j]) : value[j];
                }
            }
        }
        const int at = item.slot * headdim + item.row0() + column;
        if (places.dfinal_v != nullptr && t == places.steps - 1) {
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                sum[i] += places.dfinal_v[at + i];
            }
        }
        T* const to = places.dv + t * walk.q.dv_step_stride + at;
        if (walk.launch.dv_vectors != 0) {
            packed_store<T, kEach>(to, pack<T, kEach>(sum));
        } else {
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                to[i] = from_float<T>(sum[i]);
            }
        }
    }
    const int own = thread % Shared::kInner, r = thread / Shared::kInner;
    if (kRank > 1 && r < kRank && own < walk.columns(item)) {
        const T* const v = walk.copied_v(item);
        const float* const dx = walk.shared.dx() + r * Shared::kDxPitch + own;
        const int steps = places.steps;
        float sum = 0.0f;
#pragma unroll 8
        for (int step = 0; step < steps; ++step) {
            sum = fmaf(dx[step * kRank * Shared::kDxPitch], to_float(v[Mamba3Walk<T, kRank>::Tile::at(step, own)]), sum);
        }
        mimo_v_sums(walk, item)[r * headdim + own] = sum;
    }
}

// SISO's dz, from where dy was.
template <typename T, int kRank>
__device__ __forceinline__ void store_dz(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item) {
    const int thread = walk.stand().thread, step = thread / 8, column = thread % 8 * 8;
    if (kRank == 1 && step < walk.shared.places.steps && column < walk.columns(item)) {
        const int at = item.slot * static_cast<int>(walk.p().headdim) + item.row0() + column;
        *reinterpret_cast<uint4*>(walk.shared.places.dz + step * walk.q.dz_step_stride + at) = *reinterpret_cast<const uint4*>(
            walk.shared.items[item.number % 2].dy + Mamba3Walk<T, kRank>::Tile::at(step, column));
    }
}

// A warp's 16 rows and 64 columns of dq or dk, whose sums are complete. to: the group's first element of the first row.
template <typename T, int kRank>
__device__ __forceinline__ void store_whole(const Mamba3Walk<T, kRank>& walk, T* to, int64_t row_stride,
                                            const float (&sum)[8][4], int rows, int column0, int lane) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, column = column0 + 8 * j + lane % 4 * 2 + i % 2;
            if (row < rows && column < walk.dstate()) {
                to[row * row_stride + walk.element_of(column)] = from_float<T>(sum[j][i]);
            }
        }
    }
}

// An empty slot's, whose sums are read too.
template <typename T, int kRank>
__device__ __forceinline__ void store_nothing(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    const MambaMamba3& p = walk.p();
    const int thread = walk.stand().thread;
    if (kRank == 1 && thread == 0) {
        walk.shared.places.D[item.tile * p.nheads + item.slot] = 0.0f;
    }
    for (int i = thread; i < kRank * walk.dstate(); i += kMamba3BackwardThreads) {
        bias_sums(walk, item, 0)[i] = bias_sums(walk, item, 1)[i] = 0.0f;
    }
    for (int i = thread; kRank > 1 && i < kRank * Shared::kInner; i += kMamba3BackwardThreads) {
        if (i % Shared::kInner < walk.columns(item)) {
            mimo_v_sums(walk, item)[i / Shared::kInner * p.headdim + i % Shared::kInner] = 0.0f;
        }
    }
}

}  // namespace mamba
