// What the linear layer's kernels share: how they cut the work, and the end of it.
#pragma once

#include "common/cuda_vector.cuh"
#include "mamba_kernels.h"

namespace mamba {

constexpr int kLinearThreads = 256;
constexpr int kLinearWarps = kLinearThreads / 32;

// Adds up the lanes' sums of kOutputs rows of the weight and kRows rows of x, of which there are `outputs` and `rows`, and
// writes them.
template <typename T, int kRows, int kOutputs>
__device__ __forceinline__ void store_linear_sums(const MambaLinear& p, float (&sums)[kOutputs][kRows], int64_t first_row,
                                                  int rows, int64_t first_output, int outputs) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            sums[o][r] = sum_over_warp(sums[o][r]);
        }
    }
    // Lane r writes row r.
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
        float value = 0.0f;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            value = lane == r ? sums[o][r] : value;
        }
        if (lane < rows && o < outputs) {
            if (p.bias != nullptr) {
                value += load_as_float(p.bias, first_output + o, p.bias_dtype);
            }
            static_cast<T*>(p.out)[(first_row + lane) * p.out_row_stride + first_output + o] = from_float<T>(value);
        }
    }
}

}  // namespace mamba
