// The norm on the GPU, backward: a block walks rows of one group, so that it can add dweight and dbias up for all of them.
#pragma once

#include "common/kernel_launch.cuh"
#include "norm/cuda/backward_gradient.cuh"
#include "norm/kernels.h"

namespace mamba {

// A block's sums of dweight, then of dbias: a row each for every row of the block, in shared memory or in the workspace.
struct NormBlockSums {
    float* block;
    float* own;        // of this thread's row
    int64_t to_dbias;  // from a sum of dweight to that of dbias
    bool shared;
};

__device__ __forceinline__ NormBlockSums find_block_sums(const MambaNormBackward& q, const NormBackwardPlan& plan, bool shared,
                                                         float4* memory, int64_t slot, int64_t column) {
    const MambaNorm& p = q.forward;
    const int size = static_cast<int>(p.group_size);
    const int64_t width = p.ngroups * p.group_size;
    NormBlockSums sums;
    sums.shared = shared;
    sums.block = shared ? reinterpret_cast<float*>(memory) : static_cast<float*>(q.workspace) + slot * width + column;
    sums.to_dbias = shared ? static_cast<int64_t>(blockDim.y) * size : plan.slots * width;
    sums.own = sums.block + static_cast<int64_t>(threadIdx.y) * size;
    for (int i = static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) {
        sums.own[i] = 0.0f;
        if (p.bias != nullptr) {
            sums.own[sums.to_dbias + i] = 0.0f;
        }
    }
    __syncthreads();
    return sums;
}

// Adds the sums of the block's rows up: to its part of the workspace, or to the gradients where it is the only block.
__device__ __forceinline__ void store_block_sums(const MambaNormBackward& q, const NormBackwardPlan& plan,
                                                 const NormBlockSums& sums, int64_t slot, int64_t column) {
    const MambaNorm& p = q.forward;
    const int size = static_cast<int>(p.group_size);
    const int64_t width = p.ngroups * p.group_size;
    const int threads = static_cast<int>(blockDim.x * blockDim.y);
    const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
    __syncthreads();
    for (int i = thread; i < size; i += threads) {
        for (int64_t which = 0; which < (p.bias != nullptr ? 2 : 1); ++which) {
            float sum = 0.0f;
            for (int y = 0; y < static_cast<int>(blockDim.y); ++y) {
                sum += sums.block[which * sums.to_dbias + y * size + i];
            }
            if (q.workspace != nullptr) {
                static_cast<float*>(q.workspace)[(which * plan.slots + slot) * width + column + i] = sum;
            } else if (which == 0) {
                store_from_float(q.dweight, column + i, p.weight_dtype, sum);
            } else {
                store_from_float(q.dbias, column + i, p.bias_dtype, sum);
            }
        }
    }
}

// kGate: kAny where it is known only at run time. kLooped: a row may be longer than its threads hold, or than shared memory has
// room for; it goes through in tiles, and again for each step of the computation.
template <typename T, typename Other, int kVector, NormGate kGate, bool kLooped>
__global__ void __launch_bounds__(kNormBackwardThreads, 1)
    norm_backward_kernel(const MambaNormBackward q, const NormBackwardPlan plan) {
    MAMBA_DYNAMIC_SHARED(16, float4, norm_shared);
    __shared__ RowSums<2> shared;
    const MambaNorm& p = q.forward;
    const NormGate gate = kGate == NormGate::kAny ? norm_gate(p) : kGate;
    const bool gated = gate != NormGate::kNone;
    const int64_t slot = blockIdx.x / p.ngroups;
    const int64_t group = blockIdx.x - slot * p.ngroups;
    const int64_t column = group * p.group_size;
    const int size = static_cast<int>(p.group_size);
    const int step = kLooped ? static_cast<int>(blockDim.x) * NormTile<kVector>::kElements : size;  // one tile unless looped
    const int64_t stride = plan.slots * blockDim.y;                                                 // rows of a turn
    const float inverse_size = 1.0f / static_cast<float>(size);

    // Behind the sums: of each row of the block as many copies as it reads ahead. Single elements are not copied.
    const int rows_ahead = kVector > 1 ? plan.rows_ahead : 0;
    const bool copied = !kLooped || rows_ahead > 0;
    unsigned char* const copies =
        reinterpret_cast<unsigned char*>(norm_shared) + plan.sum_bytes + threadIdx.y * rows_ahead * plan.row_bytes;
    const int64_t row = slot * blockDim.y + threadIdx.y;
    const int turns = static_cast<int>(ceil_div(p.rows - slot * blockDim.y, stride));
    const int rows = row < p.rows ? static_cast<int>(ceil_div(p.rows - row, stride)) : 0;  // of this thread: turns or one less
    NormRow next = {q.dout, x_is_sum(q, gated) ? p.residual_out : p.x, gated ? p.z : q.dresidual_out};
    advance<T, Other>(q, gated, row, column, next);
    T* dx = row_of<T>(q.dx, row, q.dx_row_stride, column);
    const int64_t dbeside_stride = gated ? q.dz_row_stride : q.dresidual_row_stride;
    Other* dbeside = row_of<Other>(gated ? q.dz : q.dresidual, row, dbeside_stride, column);
    if constexpr (kVector > 1) {
        for (int i = 0; i < rows_ahead; ++i) {
            if (i < rows) {
                copy_row<T, Other, kVector>(q, gated, next, size, step, copies + i * plan.row_bytes);
            }
            cp_async_commit_group();
            advance<T, Other>(q, gated, stride, 0, next);
        }
    }
    int statistic = static_cast<int>(row * p.ngroups + group);  // of the next row; the host refuses more than an int holds
    const int statistics = static_cast<int>(stride * p.ngroups);
    float next_rstd = rows > 0 ? p.rstd[statistic] : 0.0f;
    float next_mean = rows > 0 && !p.is_rms_norm ? p.mean[statistic] : 0.0f;
    const NormBlockSums sums = find_block_sums(q, plan, !kLooped || plan.sum_bytes > 0, norm_shared, slot, column);
    float weights[NormTile<kVector>::kElements];
    if constexpr (!kLooped) {
        load_weights<kVector>(p, column, weights);
    }

    int copy = 0;
    for (int turn = 0; turn < turns; ++turn) {
        const int row_size = turn < rows ? size : 0;  // idle threads stay for the sums
        const float rstd = next_rstd;
        const float mean = next_mean;
        if (turn + 1 < rows) {
            statistic += statistics;
            next_rstd = p.rstd[statistic];
            next_mean = p.is_rms_norm ? 0.0f : p.mean[statistic];
        }
        NormRow at = next;
        if (copied) {
            wait_for_row(rows_ahead - 1);
            at = row_in_shared<T, Other>(copies + copy * plan.row_bytes, size, gated);
        }

        float kept[NormTile<kVector>::kElements];
        float wdy[NormTile<kVector>::kElements];
        float totals[2] = {0.0f, 0.0f};
        for (int tile = 0; tile < size; tile += step) {
            load_gradient<T, Other, kVector, kLooped>(q, gate, at, dbeside, column, mean, rstd, tile, row_size, true, weights,
                                                      sums.own, sums.to_dbias, kept, wdy, totals);
        }
        // ds = (wdy - x_hat mean(wdy x_hat) - mean(wdy)) rstd = (wdy - (s slope + offset)) rstd
        if (p.is_rms_norm) {
            sum_over_row<1>(totals, shared, turn);
            totals[1] = 0.0f;
        } else {
            sum_over_row<2>(totals, shared, turn);
        }
        const float slope = totals[0] * inverse_size * rstd;
        const float offset = fmaf(-slope, mean, totals[1] * inverse_size);
        for (int tile = 0; tile < size; tile += step) {
            if constexpr (kLooped) {
                load_gradient<T, Other, kVector, kLooped>(q, gate, at, dbeside, column, mean, rstd, tile, row_size, false,
                                                          weights, sums.own, sums.to_dbias, kept, wdy, totals);
            }
            store_gradient<T, Other, kVector>(q, gate, at, dx, dbeside, rstd, slope, offset, tile, row_size, kept, wdy);
        }
        if constexpr (kVector > 1) {
            if (copied) {  // the copy has been read: the next row takes its place
                if (turn + rows_ahead < rows) {
                    copy_row<T, Other, kVector>(q, gated, next, size, step, copies + copy * plan.row_bytes);
                }
                cp_async_commit_group();
                copy = copy + 1 < rows_ahead ? copy + 1 : 0;
            }
        }
        advance<T, Other>(q, gated, stride, 0, next);
        dx += stride * q.dx_row_stride;
        dbeside += stride * dbeside_stride;
    }
    if (sums.shared) {
        store_block_sums(q, plan, sums, slot, column);
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <typename T, typename Other, int kVector, NormGate kGate, bool kLooped>
cudaError_t launch_norm_backward_as(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    const auto kernel = norm_backward_kernel<T, Other, kVector, kGate, kLooped>;
    const int64_t copied_bytes = kVector == 1 ? 0 : plan.layout.block_rows * plan.rows_ahead * plan.row_bytes;
    const size_t shared_bytes = static_cast<size_t>(plan.sum_bytes + copied_bytes);
    if (shared_bytes + sizeof(RowSums<2>) > 48 * 1024) {
        const cudaError_t error = allow_shared(kernel, static_cast<int64_t>(shared_bytes));
        if (error != cudaSuccess) {
            return error;
        }
    }
    const dim3 threads(static_cast<unsigned>(plan.layout.lanes), static_cast<unsigned>(plan.layout.block_rows));
    return launch_kernel(kernel, plan.slots * q.forward.ngroups, threads, shared_bytes, q.forward.run.stream, q, plan);
}

template <typename T, bool kFloat32Beside, int kRow>
cudaError_t launch_norm_backward_row(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    constexpr NormBackwardKernel k = kNormBackwardKernels[kRow];
    using Other = typename OtherOf<T, kFloat32Beside>::Type;
    constexpr int kVector = k.vectors ? 16 / static_cast<int>(sizeof(Other)) : 1;
    return launch_norm_backward_as<T, Other, kVector, k.gate, k.tiles>(q, plan);
}

template <typename T>
cudaError_t launch_norm_backward(const MambaNormBackward& q, const NormBackwardPlan& plan, int kernel) {
    return launch_row<T, kNormBackwardKernels>(norm_backward_table, kernel, [&](auto row) {
        constexpr int kRow = decltype(row)::kRow;
        constexpr NormBeside kBeside = kNormBackwardKernels[kRow].beside;
        if constexpr (kBeside == NormBeside::kEither) {
            return has_float32_beside(q) ? launch_norm_backward_row<T, true, kRow>(q, plan)
                                         : launch_norm_backward_row<T, false, kRow>(q, plan);
        } else {
            return launch_norm_backward_row < T, kBeside == NormBeside::kFloat32, kRow > (q, plan);
        }
    });
}

}  // namespace mamba
