// A linear layer of few rows on the GPU, which takes as long as reading the weight does: x weight^T + bias.
#pragma once

#include "linear/cuda/sums.cuh"

namespace mamba {

constexpr int kLinearVector = 8;                 // features in a lane
constexpr int kLinearStep = 32 * kLinearVector;  // in a warp

// A warp takes kOutputs rows of the weight and kRows rows of x.
template <typename T, int kRows, int kOutputs>
__global__ void __launch_bounds__(kLinearThreads, 2) linear_kernel(const MambaLinear p, bool vectors) {
    constexpr int kAhead = kRows == 1 ? 3 : 1;  // steps whose loads are under way together
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int64_t first_output = (static_cast<int64_t>(blockIdx.x) * kLinearWarps + threadIdx.x / 32) * kOutputs;
    const int64_t first_row = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * kRows;
    const int64_t features = p.in_features;
    const int outputs = p.out_features - first_output < kOutputs ? static_cast<int>(p.out_features - first_output) : kOutputs;
    const int rows = p.rows - first_row < kRows ? static_cast<int>(p.rows - first_row) : kRows;
    const T* const weight = static_cast<const T*>(p.weight) + first_output * features;
    const T* const x = static_cast<const T*>(p.x) + first_row * p.x_row_stride;

    // The kernel before may still run: the weight comes closer, but is not read, since that kernel may write it.
    if (outputs > 0) {
        const char* const bytes = reinterpret_cast<const char*>(weight);
        const int64_t size = outputs * features * static_cast<int64_t>(sizeof(T));
        for (int64_t i = lane * kCacheLine; i < size; i += 32 * kCacheLine) {
            prefetch_to_L2(bytes + i);
        }
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (outputs <= 0 || rows <= 0) {
        return;
    }
    float sums[kOutputs][kRows] = {};
    for (int64_t begin = lane * kLinearVector; begin < features; begin += kAhead * kLinearStep) {
        Packed<T, kLinearVector> w_bits[kAhead][kOutputs], x_bits[kAhead][kRows];
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
            const int64_t feature = begin + step * kLinearStep;
            if (feature < features) {
#pragma unroll
                for (int o = 0; o < kOutputs; ++o) {
                    if (o < outputs) {
                        w_bits[step][o] =
                            packed_load_padded<T, kLinearVector>(weight + o * features + feature, features - feature, vectors);
                    }
                }
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    if (r < rows) {
                        x_bits[step][r] =
                            packed_load_padded<T, kLinearVector>(x + r * p.x_row_stride + feature, features - feature, vectors);
                    }
                }
            }
        }
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
            if (begin + step * kLinearStep < features) {
                float w[kOutputs][kLinearVector];
#pragma unroll
                for (int o = 0; o < kOutputs; ++o) {
                    if (o < outputs) {
                        unpack<T, kLinearVector>(w_bits[step][o], w[o]);
                    }
                }
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    if (r < rows) {
                        float values[kLinearVector];
                        unpack<T, kLinearVector>(x_bits[step][r], values);
#pragma unroll
                        for (int o = 0; o < kOutputs; ++o) {
                            if (o < outputs) {
#pragma unroll
                                for (int i = 0; i < kLinearVector; ++i) {
                                    sums[o][r] = fmaf(w[o][i], values[i], sums[o][r]);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    store_linear_sums<T>(p, sums, first_row, rows, first_output, outputs);
}

}  // namespace mamba
