// The C ABI of norm and SwiGLU in mamba_cuda: checks, how a problem is cut into blocks, then the launcher for the dtype.
#include "common/cuda_vector.cuh"
#include "norm/check.h"
#include "norm/launch.h"

namespace mamba {
namespace {

constexpr int64_t kMaxBlocks = 2147483647;

// max_threads: of a row; block_threads: that short rows share.
NormLayout norm_layout(const MambaNorm& p, int max_threads, int block_threads) {
    // Whether vectors of four are possible; tensors that are not aligned for them take the layout as it is.
    const int64_t elements = p.group_size % 4 == 0 ? kNormElements : kNormScalars;
    const int64_t wanted = ceil_div(p.group_size, elements);
    NormLayout layout;
    if (wanted <= 32) {
        layout.lanes = 1 << ceil_log2(wanted, 0, 5);
    } else {
        layout.lanes = static_cast<int>(ceil_div(wanted < max_threads ? wanted : max_threads, 32) * 32);
    }
    layout.block_rows = layout.lanes < block_threads ? block_threads / layout.lanes : 1;
    layout.looped = wanted > max_threads;
    return layout;
}

// Shared memory of a block that is not planned here, with what CUDA keeps for itself.
constexpr int64_t kOtherShared = 2048;

// Shares a block's memory out: to the sums, then to as many copies of its rows as fit.
void share_memory(NormBackwardPlan& plan, int64_t group_size, int64_t memory) {
    const int64_t elements = plan.layout.block_rows * group_size;
    const int64_t sum_bytes = ceil_div(plan.sums * elements * static_cast<int64_t>(sizeof(float)), 16) * 16;
    plan.sum_bytes = sum_bytes <= memory ? sum_bytes : 0;
    const int64_t fit = plan.sum_bytes > 0 ? (memory - sum_bytes) / (plan.layout.block_rows * plan.row_bytes) : 0;
    plan.rows_ahead = static_cast<int>(fit < kNormRowsAhead ? fit : kNormRowsAhead);
}

NormBackwardPlan norm_backward_plan(const MambaNorm& p) {
    NormBackwardPlan plan;
    plan.layout = norm_layout(p, kNormBackwardThreads, kNormBackwardThreads);
    plan.sums = p.bias != nullptr ? 2 : 1;
    // dout, and x and z, or residual_out and dresidual_out
    plan.row_bytes = ceil_div(p.group_size * (dtype_size(p.dtype) + 2 * dtype_size(p.other_dtype)), 16) * 16;
    int processors = 1;
    int block_shared = 0;
    plan.error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, p.run.device);
    if (plan.error == cudaSuccess) {
        plan.error = cudaDeviceGetAttribute(&block_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, p.run.device);
    }
    share_memory(plan, p.group_size, block_shared - kOtherShared);
    // With one row ahead nothing is on its way while that row is computed: rather fewer rows at a time, in whole warps. So
    // the sums of several rows are always in shared memory: a block's part of the workspace has a place for those of one.
    const int warp_rows = plan.layout.lanes < 32 ? 32 / plan.layout.lanes : 1;
    while (plan.rows_ahead < 2 && plan.layout.block_rows > warp_rows) {
        plan.layout.block_rows -= warp_rows;
        share_memory(plan, p.group_size, block_shared - kOtherShared);
    }
    plan.layout.looped = plan.layout.looped || plan.rows_ahead == 0;
    const int64_t wanted = processors / p.ngroups;  // one block a multiprocessor
    const int64_t most = ceil_div(p.rows, plan.layout.block_rows);
    plan.slots = wanted < most ? wanted : most;
    plan.slots = plan.slots > 1 ? plan.slots : 1;
    const bool direct = plan.slots == 1 && plan.sum_bytes > 0;
    const int64_t width = p.ngroups * p.group_size;
    plan.workspace_bytes = direct ? 0 : plan.slots * plan.sums * width * static_cast<int64_t>(sizeof(float));
    return plan;
}

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

int32_t check_blocks(const char* function, int64_t rows, int64_t block_rows) {
    if (ceil_div(rows, block_rows) <= kMaxBlocks) {
        return MAMBA_OK;
    }
    return fail(MAMBA_ERROR_UNSUPPORTED, "%s: rows * ngroups = %lld is too large", function, static_cast<long long>(rows));
}

int32_t swiglu(const char* function, const MambaSwiglu* params, bool backward) {
    int32_t status = check_swiglu(function, params, backward);
    if (status != MAMBA_OK || params->rows == 0 || params->width == 0) {
        return status;
    }
    status = check_blocks(function, params->rows, 1);
    if (status != MAMBA_OK) {
        return status;
    }
    const DeviceGuard guard(params->run.device);
    cudaError_t error = guard.error;
    if (error == cudaSuccess) {
        if (params->dtype == MAMBA_FLOAT32) {
            error = launch_swiglu<float>(*params, backward);
        }
#ifndef MAMBA_DISABLE_HALF
        if (params->dtype == MAMBA_FLOAT16) {
            error = launch_swiglu<__half>(*params, backward);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (params->dtype == MAMBA_BFLOAT16) {
            error = launch_swiglu<__nv_bfloat16>(*params, backward);
        }
#endif
    }
    return cuda_status(error, function, params->rows, params->width, 1, 1);
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_norm_forward(const MambaNorm* params) {
    const char* const function = "norm_forward";
    int32_t status = check_norm_forward(params);
    if (status != MAMBA_OK || params->rows == 0) {
        return status;
    }
    const NormLayout layout = norm_layout(*params, kNormMaxThreads, kNormBlock);
    status = check_blocks(function, params->rows * params->ngroups, layout.block_rows);
    if (status != MAMBA_OK) {
        return status;
    }
    const DeviceGuard guard(params->run.device);
    cudaError_t error = guard.error;
    if (error == cudaSuccess) {
        if (params->dtype == MAMBA_FLOAT32) {
            error = launch_norm_forward<float>(*params, layout);
        }
#ifndef MAMBA_DISABLE_HALF
        if (params->dtype == MAMBA_FLOAT16) {
            error = launch_norm_forward<__half>(*params, layout);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (params->dtype == MAMBA_BFLOAT16) {
            error = launch_norm_forward<__nv_bfloat16>(*params, layout);
        }
#endif
    }
    return cuda_status(error, function, params->rows, params->ngroups * params->group_size, 1, 1);
}

int64_t mamba_norm_backward_workspace(const MambaNorm* params) {
    if (check_norm("norm_backward_workspace", *params) != MAMBA_OK || params->rows == 0) {
        return 0;
    }
    return norm_backward_plan(*params).workspace_bytes;
}

int32_t mamba_norm_backward(const MambaNormBackward* params) {
    const char* const function = "norm_backward";
    int32_t status = check_norm_backward(params);
    if (status != MAMBA_OK || params->forward.rows == 0) {
        return status;
    }
    const MambaNorm& p = params->forward;
    status = check_blocks(function, p.rows * p.ngroups, 1);
    if (status != MAMBA_OK) {
        return status;
    }
    const DeviceGuard guard(p.run.device);
    const NormBackwardPlan plan = norm_backward_plan(p);
    cudaError_t error = guard.error != cudaSuccess ? guard.error : plan.error;
    if (error == cudaSuccess && (params->workspace != nullptr) != (plan.workspace_bytes > 0)) {
        return fail(MAMBA_ERROR_INVALID, "%s: workspace must %s NULL for %lld bytes", function,
                    plan.workspace_bytes > 0 ? "not be" : "be", static_cast<long long>(plan.workspace_bytes));
    }
    if (error == cudaSuccess) {
        if (p.dtype == MAMBA_FLOAT32) {
            error = launch_norm_backward<float>(*params, plan);
        }
#ifndef MAMBA_DISABLE_HALF
        if (p.dtype == MAMBA_FLOAT16) {
            error = launch_norm_backward<__half>(*params, plan);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (p.dtype == MAMBA_BFLOAT16) {
            error = launch_norm_backward<__nv_bfloat16>(*params, plan);
        }
#endif
        if (error == cudaSuccess && plan.workspace_bytes > 0) {
            error = launch_norm_sums(*params, plan);
        }
    }
    return cuda_status(error, function, p.rows, p.ngroups * p.group_size, 1, 1);
}

int32_t mamba_swiglu_forward(const MambaSwiglu* params) {
    return swiglu("swiglu_forward", params, false);
}

int32_t mamba_swiglu_backward(const MambaSwiglu* params) {
    return swiglu("swiglu_backward", params, true);
}
