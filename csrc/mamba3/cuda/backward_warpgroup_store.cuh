// What leaves a block of backward_warpgroup.cuh for memory with each item: sums over the chunk for biases and mimo_v, and dv.
#pragma once

#include "mamba3/cuda/backward_warpgroup_walk.cuh"

namespace mamba {

// Parts of the biases' gradients, (R, N), and of mimo_v's, (R, P).
template <typename T>
__device__ __forceinline__ float* bias_sums(const Mamba3Walk<T>& walk, const Mamba3Item& item, int of_k) {
    const int64_t tile = item.tile + of_k * walk.row_tiles;
    return walk.launch.template at<float>(walk.launch.plan.workspace.bias) +
           ((tile * walk.launch.chunks.slots + walk.slot) * walk.q.forward.nheads + walk.head(item)) * walk.rank * walk.dstate;
}
template <typename T>
__device__ __forceinline__ float* mimo_v_sums(const Mamba3Walk<T>& walk, const Mamba3Item& item) {
    const MambaMamba3& p = walk.q.forward;
    return walk.launch.template at<float>(walk.launch.plan.workspace.mimo_v) +
           (walk.slot * p.nheads + walk.head(item)) * walk.rank * p.headdim + item.row0();
}

template <typename T>
__device__ __forceinline__ void store_bias(const Mamba3Walk<T>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    const int size = walk.rank * Shared::kStates;
#pragma unroll 1
    for (int i = walk.thread; i < 2 * size; i += kMamba3BackwardThreads) {
        const int m = i >= size ? 1 : 0, column = i % Shared::kStates, r = i / Shared::kStates - m * walk.rank;
        const float* const from = walk.shared.bias_parts(item.number) + m * 4 * size + r * Shared::kStates + column;
        if (column < walk.dstate) {
            bias_sums(walk, item, m)[r * walk.dstate + element_of_column(walk.q.forward, column)] =
                (from[0] + from[size]) + (from[2 * size] + from[3 * size]);
        }
    }
}

// From dx in shared memory. A thread has eight columns of a step.
template <typename T>
__device__ __forceinline__ void store_dv(const Mamba3Walk<T>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    const MambaMamba3& p = walk.q.forward;
    const Mamba3Chunk& chunk = walk.chunk;
    const int64_t head = walk.head(item);
    const float* const weights = p.mimo_v != nullptr ? p.mimo_v + head * walk.rank * p.headdim + item.row0() : nullptr;
    const int t = walk.thread / 8, column = walk.thread % 8 * 8, left = walk.columns(item) - column;
    if (t < chunk.steps && left > 0) {
        float sum[8];
#pragma unroll 1
        for (int r = 0; r < walk.rank; ++r) {
            const float4* const from =
                reinterpret_cast<const float4*>(walk.shared.dx() + (t * walk.rank + r) * Shared::kDxPitch + column);
            const float4 low = from[0], high = from[1];
            const float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float weight = weights != nullptr && i < left ? weights[r * p.headdim + column + i] : 1.0f;
                sum[i] = r > 0 ? fmaf(value[i], weight, sum[i]) : value[i] * weight;
            }
        }
        const int64_t at = ((chunk.row * p.seqlen + chunk.first + t) * p.nheads + head) * p.headdim + item.row0() + column;
        if (chunk.last && t == chunk.steps - 1 && walk.q.dfinal_v != nullptr) {
            const float* const dfinal = walk.q.dfinal_v + (chunk.sequence * p.nheads + head) * p.headdim + item.row0() + column;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum[i] += i < left ? dfinal[i] : 0.0f;
            }
        }
        T* const to = static_cast<T*>(walk.q.dv) + at;
        if (walk.launch.dv_vectors != 0) {
            *reinterpret_cast<uint4*>(to) = make_uint4(pack2<T>(sum[0], sum[1]), pack2<T>(sum[2], sum[3]),
                                                       pack2<T>(sum[4], sum[5]), pack2<T>(sum[6], sum[7]));
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i < left) {
                    to[i] = from_float<T>(sum[i]);
                }
            }
        }
    }
    const int own = walk.thread % Shared::kInner, r = walk.thread / Shared::kInner;
    if (weights != nullptr && r < walk.rank && own < walk.columns(item)) {
        const T* const v = walk.chunk_v(item) + own;
        float sum = 0.0f;
#pragma unroll 8
        for (int step = 0; step < chunk.steps; ++step) {
            sum = fmaf(walk.shared.dx()[(step * walk.rank + r) * Shared::kDxPitch + own], to_float(v[step * p.v_len_stride]),
                       sum);
        }
        mimo_v_sums(walk, item)[r * p.headdim + own] = sum;
    }
}

// An empty slot's, whose sums are read too.
template <typename T>
__device__ __forceinline__ void store_nothing(const Mamba3Walk<T>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    const MambaMamba3& p = walk.q.forward;
    for (int i = walk.thread; i < walk.rank * walk.dstate; i += kMamba3BackwardThreads) {
        bias_sums(walk, item, 0)[i] = bias_sums(walk, item, 1)[i] = 0.0f;
    }
    for (int i = walk.thread; i < walk.rank * Shared::kInner && p.mimo_v != nullptr; i += kMamba3BackwardThreads) {
        if (i % Shared::kInner < walk.columns(item)) {
            mimo_v_sums(walk, item)[i / Shared::kInner * p.headdim + i % Shared::kInner] = 0.0f;
        }
    }
}

}  // namespace mamba
