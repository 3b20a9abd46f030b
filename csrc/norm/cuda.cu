// The C ABI of norm and SwiGLU in mamba_cuda.
#include "common/cuda_sums.h"
#include "norm/check.h"
#include "norm/launch.h"

namespace mamba {

KernelTable norm_forward_table("norm_forward", kNormForwardKernels);
KernelTable norm_backward_table("norm_backward", kNormBackwardKernels);
KernelTable swiglu_forward_table("swiglu_forward", kSwigluKernels);
KernelTable swiglu_backward_table("swiglu_backward", kSwigluKernels);

namespace {

// The grids have one dimension.
int32_t check_blocks(const char* function, int64_t blocks) {
    Check check(function);
    check.that(blocks <= INT32_MAX, MAMBA_ERROR_UNSUPPORTED, "too large for one launch: %lld blocks",
               static_cast<long long>(blocks));
    return check.status();
}

int32_t swiglu(const char* function, const MambaSwiglu* params, bool backward) {
    int32_t status = check_swiglu(function, params, backward);
    if (status != MAMBA_OK || swiglu_is_empty(*params)) {
        return status;
    }
    status = check_blocks(function, params->rows);
    if (status != MAMBA_OK) {
        return status;
    }
    const CallDevice device(params->run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const KernelTable& table = backward ? swiglu_backward_table : swiglu_forward_table;
        const int kernel = choose_kernel(table, kSwigluKernels, device.major, params->dtype, *params);
        error = launchers_of<NormLaunchers>(params->dtype).swiglu(*params, backward, kernel);
    }
    return cuda_status(error, function, params->rows, params->width, 1, 1);
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_norm_forward(const MambaNorm* params) {
    const char* const function = "norm_forward";
    int32_t status = check_norm_forward(function, params);
    if (status != MAMBA_OK || params->rows == 0) {
        return status;
    }
    const NormLayout layout = norm_layout(*params, 16 / dtype_size(params->dtype), kNormMaxThreads, kNormBlock);
    status = check_blocks(function, ceil_div(params->rows * params->ngroups, layout.block_rows));
    if (status != MAMBA_OK) {
        return status;
    }
    const CallDevice device(params->run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(norm_forward_table, kNormForwardKernels, device.major, params->dtype, *params, layout);
        error = launchers_of<NormLaunchers>(params->dtype).forward(*params, layout, kernel);
    }
    return cuda_status(error, function, params->rows, params->ngroups * params->group_size, 1, 1);
}

int64_t mamba_norm_backward_workspace(const MambaNorm* params) {
    Check check("norm_backward_workspace");
    check.pointer("params", params);
    if (check.ok()) {
        check_norm(check, *params);
    }
    return check.ok() && params->rows > 0 ? norm_backward_plan(*params).workspace_bytes : 0;
}

int32_t mamba_norm_backward(const MambaNormBackward* params) {
    const char* const function = "norm_backward";
    int32_t status = check_norm_backward(function, params);
    if (status != MAMBA_OK || params->forward.rows == 0) {
        return status;
    }
    const MambaNorm& p = params->forward;
    status = check_blocks(function, p.rows * p.ngroups);
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
        const DeviceLimits device(p.run.device);
        const int kernel = choose_kernel(norm_backward_table, kNormBackwardKernels, device.major, p.dtype, *params, plan);
        error = launchers_of<NormLaunchers>(p.dtype).backward(*params, plan, kernel);
    }
    if (error == cudaSuccess && plan.workspace_bytes > 0) {
        const float* const parts = static_cast<const float*>(params->workspace);
        const int64_t width = p.ngroups * p.group_size;
        PartSums sums = {};
        sums.add(part_sum(parts, plan.slots, params->dweight, p.weight_dtype, width));
        sums.add(part_sum(parts + plan.slots * width, plan.slots, params->dbias, p.bias_dtype, width));
        error = launch_part_sums(sums, p.run.stream);
    }
    return cuda_status(error, function, p.rows, p.ngroups * p.group_size, 1, 1);
}

int32_t mamba_swiglu_forward(const MambaSwiglu* params) {
    return swiglu("swiglu_forward", params, false);
}

int32_t mamba_swiglu_backward(const MambaSwiglu* params) {
    return swiglu("swiglu_backward", params, true);
}
