// The sums of part_sums.h on CUDA: one launch for all gradients of an op, parts in a fixed order.
#include "common/cuda_sums.h"

#include "common/cuda_vector.cuh"

namespace mamba {
namespace {

constexpr int kSumThreads = 256;
constexpr int kSumUnroll = 4;  // elements a thread, so that finding its row costs little

// Threads that share an element, each with some of its parts: a power of two.
MAMBA_HOST_DEVICE inline int sum_lanes(int64_t count) {
    return count <= 2 ? 1 : count <= 16 ? 8 : 32;
}

__global__ void __launch_bounds__(kSumThreads) add_parts_kernel(const __grid_constant__ PartSums sums) {
    __shared__ float shared[kSumThreads];
    int index = 0;
    while (blockIdx.x >= sums.end[index]) {
        ++index;
    }
    const PartSum& p = sums.of[index];
    const int lanes = sum_lanes(p.count);
    const int columns = kSumThreads / lanes;
    const int column = static_cast<int>(threadIdx.x) % columns, lane = static_cast<int>(threadIdx.x) / columns;
    const unsigned block = blockIdx.x - (index > 0 ? sums.end[index - 1] : 0);
    const unsigned tiles = static_cast<unsigned>(ceil_div(p.row, columns * kSumUnroll));
    const unsigned row = block / tiles;
    const int64_t begin = static_cast<int64_t>(block - row * tiles) * (columns * kSumUnroll) + column;
    const float* parts = p.parts + row * p.row;
    griddepcontrol_wait();
    float sum[kSumUnroll] = {};
    for (int64_t part = lane; part < p.count; part += lanes) {
#pragma unroll
        for (int i = 0; i < kSumUnroll; ++i) {
            if (begin + i * columns < p.row) {
                sum[i] += parts[part * p.rows * p.row + begin + i * columns];
            }
        }
    }
    if (lanes > 1) {
#pragma unroll
        for (int i = 0; i < kSumUnroll; ++i) {
            __syncthreads();
            shared[threadIdx.x] = sum[i];
            __syncthreads();
            sum[i] = 0.0f;
            for (int k = 0; k < lanes && lane == i; ++k) {  // lane i adds up element i
                sum[i] += shared[k * columns + column];
            }
        }
    }
    const unsigned inner = row % static_cast<unsigned>(p.inner), outer = row / static_cast<unsigned>(p.inner);
    const unsigned middle = outer % static_cast<unsigned>(p.middle);
    const int64_t first =
        outer / static_cast<unsigned>(p.middle) * p.outer_stride + middle * p.middle_stride + inner * p.inner_stride + begin;
#pragma unroll
    for (int i = 0; i < kSumUnroll; ++i) {
        if (begin + i * columns < p.row && (lanes == 1 || lane == i)) {
            store_from_float(p.sum, first + i * columns, p.dtype, sum[i]);
        }
    }
}

}  // namespace

cudaError_t launch_part_sums(PartSums sums, void* stream) {
    int64_t blocks = 0;
    for (int i = 0; i < sums.count; ++i) {
        const PartSum& p = sums.of[i];
        blocks += p.rows * ceil_div(p.row, kSumThreads / sum_lanes(p.count) * kSumUnroll);
        sums.end[i] = static_cast<unsigned>(blocks);
    }
    return blocks == 0 ? cudaSuccess : launch_programmatic_dependent(add_parts_kernel, blocks, kSumThreads, 0, stream, sums);
}

}  // namespace mamba
