// The causal convolution's C ABI in mamba_cuda.
#include "causal_conv1d/check.h"
#include "causal_conv1d/launch.h"
#include "common/cuda_device.h"
#include "common/cuda_sums.h"

namespace mamba {
KernelTable conv_forward_table("causal_conv1d_forward", kConvForwardKernels);
KernelTable conv_backward_table("causal_conv1d_backward", kConvBackwardKernels);
KernelTable conv_update_table("causal_conv1d_update", kConvUpdateKernels);
}  // namespace mamba

using namespace mamba;

int32_t mamba_causal_conv1d_forward(const MambaCausalConv1d* params) {
    const char* const function = "causal_conv1d_forward";
    const int32_t status = check_conv_forward(function, params);
    if (status != MAMBA_OK || params->batch == 0 || params->dim == 0 ||
        (params->seqlen == 0 && params->final_states == nullptr)) {
        return status;
    }
    const CallDevice device(params->run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(conv_forward_table, kConvForwardKernels, device.major, params->dtype, *params);
        error = launchers_of<ConvLaunchers>(params->dtype).forward(*params, kernel);
    }
    return cuda_status(error, function, params->batch, params->dim, params->seqlen, 0);
}

int64_t mamba_causal_conv1d_backward_workspace(const MambaCausalConv1d* params) {
    return params == nullptr ? 0 : conv_workspace_bytes(*params, conv_backward_plan(*params).slots);
}

int32_t mamba_causal_conv1d_backward(const MambaCausalConv1dBackward* params) {
    const char* const function = "causal_conv1d_backward";
    const int32_t status = check_conv_backward(function, params);
    if (status != MAMBA_OK || params->forward.dim == 0) {
        return status;
    }
    const MambaCausalConv1d& p = params->forward;
    const CallDevice device(p.run.device);
    const ConvBackwardPlan plan = conv_backward_plan(p);
    const ConvBackward q = conv_backward(*params, plan.slots);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(conv_backward_table, kConvBackwardKernels, device.major, p.dtype, *params);
        error = launchers_of<ConvLaunchers>(p.dtype).backward(q, plan, kernel);
    }
    error = error != cudaSuccess ? error : launch_part_sums(conv_part_sums(q), p.run.stream);
    return cuda_status(error, function, p.batch, p.dim, p.seqlen, 0);
}

int32_t mamba_causal_conv1d_update(const MambaCausalConv1dUpdate* params) {
    const char* const function = "causal_conv1d_update";
    const int32_t status = check_conv_update(function, params);
    if (status != MAMBA_OK || !conv_has_elements(*params)) {
        return status;
    }
    const CallDevice device(params->run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(conv_update_table, kConvUpdateKernels, device.major, params->dtype, *params);
        error = launchers_of<ConvLaunchers>(params->dtype).update(*params, kernel);
    }
    return cuda_status(error, function, params->batch, params->dim, params->seqlen, 0);
}
