// Weights of int8 with a float16 scale for each MAMBA_INT8_BLOCK of a row, 16 neighbours in a lane.
#pragma once

#include "common/cuda_vector.cuh"
#include "mamba_kernels.h"

namespace mamba {

constexpr int kInt8Vector = 16;  // neighbours in a lane
static_assert(MAMBA_INT8_BLOCK % kInt8Vector == 0, "a lane's weights have one scale");
using Int8Bits = Packed<int8_t, kInt8Vector>;

// 16 weights as they lie in memory; zeros beyond the first `left`.
__device__ __forceinline__ Int8Bits load_int8(const int8_t* address, int64_t left, bool vectors) {
    if (vectors && left >= kInt8Vector) {
        return packed_load<int8_t, kInt8Vector>(address);
    }
    Int8Bits bits = {};
#pragma unroll
    for (int i = 0; i < kInt8Vector; ++i) {
        if (i < left) {
            bits.word[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(address[i])) << (i % 4 * 8);
        }
    }
    return bits;
}

// Four weights of a word. The bytes, moved to 0..255, become the last bits of 2^23: an I2F of each would take four times as
// long.
__device__ __forceinline__ void unpack_int8(uint32_t word, float (&values)[4]) {
    constexpr uint32_t kTwo23 = 0x4b000000u;
    const uint32_t moved = word ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[i] = __uint_as_float(__byte_perm(moved, kTwo23, 0x7440 + i)) - 8388736.0f;  // 2^23 + 128
    }
}

__device__ __forceinline__ int64_t scales_of_row(int64_t features) {
    return ceil_div(features, static_cast<int64_t>(MAMBA_INT8_BLOCK));
}

}  // namespace mamba
