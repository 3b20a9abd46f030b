// A linear layer of few rows whose weight is int8: read as it lies in memory, dequantised in registers. int8_row.cuh: of one.
#pragma once

#include "common/cuda_int8.cuh"
#include "linear/cuda/sums.cuh"

namespace mamba {

constexpr int kInt8Step = 32 * kInt8Vector;  // features in a warp

// Four of a lane's 16 elements of x.
template <typename T>
__device__ __forceinline__ void unpack_quarter(const Packed<T, kInt8Vector>& packed, int quarter, float (&values)[4]) {
    constexpr int kWords = 4 * sizeof(T) / 4;
    Packed<T, 4> part;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        part.word[i] = packed.word[quarter * kWords + i];
    }
    unpack<T, 4>(part, values);
}

// A warp takes kOutputs rows of the weight and kRows rows of x.
template <typename T, int kRows, int kOutputs>
__global__ void __launch_bounds__(kLinearThreads, 2) linear_int8_kernel(const MambaLinear p, bool vectors) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int64_t first_output = (static_cast<int64_t>(blockIdx.x) * kLinearWarps + threadIdx.x / 32) * kOutputs;
    const int64_t first_row = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * kRows;
    const int64_t features = p.in_features, blocks = scales_of_row(features);
    const int outputs = p.out_features - first_output < kOutputs ? static_cast<int>(p.out_features - first_output) : kOutputs;
    const int rows = p.rows - first_row < kRows ? static_cast<int>(p.rows - first_row) : kRows;
    const int8_t* const weight = static_cast<const int8_t*>(p.weight) + first_output * features;
    const __half* const scales = static_cast<const __half*>(p.scales) + first_output * blocks;
    const T* const x = static_cast<const T*>(p.x) + first_row * p.x_row_stride;

    // The kernel before may still run: the weight comes closer, but is not read, since that kernel may write it.
    if (outputs > 0) {
        for (int64_t i = lane * kCacheLine; i < outputs * features; i += 32 * kCacheLine) {
            prefetch_to_L2(weight + i);
        }
        for (int64_t i = lane * kCacheLine / 2; i < outputs * blocks; i += 32 * kCacheLine / 2) {
            prefetch_to_L2(scales + i);
        }
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (outputs <= 0 || rows <= 0) {
        return;
    }
    float sums[kOutputs][kRows] = {};
    for (int64_t feature = lane * kInt8Vector; feature < features; feature += kInt8Step) {
        Int8Bits w_bits[kOutputs];
        float scale[kOutputs];
        Packed<T, kInt8Vector> x_bits[kRows];
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
            if (o < outputs) {
                w_bits[o] = load_int8(weight + o * features + feature, features - feature, vectors);
                scale[o] = __half2float(scales[o * blocks + feature / MAMBA_INT8_BLOCK]);
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (r < rows) {
                x_bits[r] = packed_load_padded<T, kInt8Vector>(x + r * p.x_row_stride + feature, features - feature, vectors);
            }
        }
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
            if (o < outputs) {
                float partial[kRows] = {};
#pragma unroll
                for (int quarter = 0; quarter < 4; ++quarter) {
                    float w[4];
                    unpack_int8(w_bits[o].word[quarter], w);
#pragma unroll
                    for (int r = 0; r < kRows; ++r) {
                        if (r < rows) {
                            float values[4];
                            unpack_quarter<T>(x_bits[r], quarter, values);
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                partial[r] = fmaf(w[i], values[i], partial[r]);
                            }
                        }
                    }
                }
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    sums[o][r] = fmaf(scale[o], partial[r], sums[o][r]);
                }
            }
        }
    }
    store_linear_sums<T>(p, sums, first_row, rows, first_output, outputs);
}

}  // namespace mamba
