// The last step of the norm's backward: dweight and dbias from the blocks' sums. It knows no dtype; cuda.cu compiles it.
#pragma once

#include "common/cuda_vector.cuh"
#include "norm/plan.h"

namespace mamba {
namespace {

// gradient[i] = the sum of the slots' parts, always in the same order. blockIdx.y: 0 for dweight, 1 for dbias.
constexpr int kSumColumns = 32;
constexpr int kSumRows = 32;
__global__ void __launch_bounds__(kSumColumns* kSumRows) norm_sum_kernel(const MambaNormBackward q, int64_t slots) {
    __shared__ float sums[kSumRows][kSumColumns + 1];
    const int64_t width = q.forward.ngroups * q.forward.group_size;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kSumColumns + threadIdx.x;
    const float* parts = static_cast<const float*>(q.workspace) + blockIdx.y * slots * width;
    float sum = 0.0f;
    if (column < width) {
#pragma unroll 8
        for (int64_t slot = threadIdx.y; slot < slots; slot += kSumRows) {
            sum += parts[slot * width + column];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // each warp adds one column up: lanes are the rows of `sums`
    sum = sums[threadIdx.x][threadIdx.y];
    for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    const int64_t written = static_cast<int64_t>(blockIdx.x) * kSumColumns + threadIdx.y;
    if (threadIdx.x == 0 && written < width) {
        if (blockIdx.y == 0) {
            store_from_float(q.dweight, written, q.forward.weight_dtype, sum);
        } else {
            store_from_float(q.dbias, written, q.forward.bias_dtype, sum);
        }
    }
}

cudaError_t launch_norm_sums(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    const int64_t width = q.forward.ngroups * q.forward.group_size;
    const dim3 blocks(static_cast<unsigned>(ceil_div(width, kSumColumns)), static_cast<unsigned>(plan.sums));
    return launch_kernel(norm_sum_kernel, blocks, dim3(kSumColumns, kSumRows), 0, q.forward.run.stream, q, plan.slots);
}

}  // namespace
}  // namespace mamba
