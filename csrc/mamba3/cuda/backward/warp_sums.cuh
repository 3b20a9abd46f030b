// Sums over the lanes of a warp of several values at once.
#pragma once

#include "mamba3/cuda/backward/chunk.cuh"

namespace mamba {

// Each of 2 kLeft values is added up over the lanes that differ by kDistance, of which each keeps half of the sums: the upper
// lane the second half.
template <int kLeft, int kDistance, int kCount>
__device__ __forceinline__ void fold(float (&values)[kCount], int lane) {
    const bool upper = (lane & kDistance) != 0;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
        const float kept = upper ? values[i + kLeft] : values[i];
        const float given = upper ? values[i] : values[i + kLeft];
        values[i] = kept + __shfl_xor_sync(0xffffffffu, given, kDistance);
    }
}
// Of 32 values, to each lane the sum of its own.
__device__ __forceinline__ float fold_warp(float (&values)[32], int lane) {
    fold<16, 16>(values, lane);
    fold<8, 8>(values, lane);
    fold<4, 4>(values, lane);
    fold<2, 2>(values, lane);
    fold<1, 1>(values, lane);
    return *values;
}

}  // namespace mamba
