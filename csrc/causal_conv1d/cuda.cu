// The causal convolution's C ABI on the GPU: checks, then the dtype's kernels.
#include "causal_conv1d/plan.h"

namespace mamba {

namespace {

int32_t check_sizes(const char* function, int64_t batch, int64_t dim, int64_t seqlen, int32_t width) {
    if (batch < 0 || dim < 0 || seqlen < 0) {
        return fail(MAMBA_ERROR_INVALID, "%s: sizes must not be negative, got batch=%lld dim=%lld seqlen=%lld", function,
                    static_cast<long long>(batch), static_cast<long long>(dim), static_cast<long long>(seqlen));
    }
    if (width < 2 || width > kConvMaxWidth) {
        return fail(MAMBA_ERROR_UNSUPPORTED, "%s: width must be 2, 3 or 4, got %d", function, static_cast<int>(width));
    }
    return MAMBA_OK;
}

int32_t check_pointer(const char* function, const char* argument, const void* pointer, bool required) {
    if (required && pointer == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "%s: %s is NULL", function, argument);
    }
    return MAMBA_OK;
}

int32_t check_dtypes(int32_t x, int32_t weight, const void* bias_pointer, int32_t bias) {
    int32_t status = check_dtype("x", x);
    if (status == MAMBA_OK) {
        status = check_dtype("weight", weight);
    }
    if (status == MAMBA_OK && bias_pointer != nullptr) {
        status = check_dtype("bias", bias);
    }
    return status;
}

// What forward and backward ask of the part they share. `elements`: whether the (B, D, L) tensors hold any.
int32_t check_forward(const char* function, const MambaCausalConv1d& params, bool elements) {
    int32_t status = check_sizes(function, params.batch, params.dim, params.seqlen, params.width);
    if (status == MAMBA_OK) {
        status = check_dtypes(params.dtype, params.weight_dtype, params.bias, params.bias_dtype);
    }
    if (status == MAMBA_OK) {
        status = check_pointer(function, "x", params.x, elements);
    }
    if (status == MAMBA_OK) {
        status = check_pointer(function, "weight", params.weight, params.dim > 0);
    }
    if (status == MAMBA_OK && params.seq_idx != nullptr &&
        (params.initial_states != nullptr || params.final_states != nullptr)) {
        status =
            fail(MAMBA_ERROR_INVALID, "%s: seq_idx cannot be given together with initial_states or final_states", function);
    }
    return status;
}

bool has_elements(const MambaCausalConv1d& params) {
    return params.batch > 0 && params.dim > 0 && params.seqlen > 0;
}

}  // namespace

}  // namespace mamba

int32_t mamba_causal_conv1d_forward(const MambaCausalConv1d* params) {
    using namespace mamba;
    const char* const function = "causal_conv1d_forward";
    if (params == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "%s: params is NULL", function);
    }
    const bool elements = has_elements(*params);
    int32_t status = check_forward(function, *params, elements);
    if (status == MAMBA_OK) {
        status = check_pointer(function, "out", params->out, elements);
    }
    if (status != MAMBA_OK) {
        return status;
    }
    if (params->batch == 0 || params->dim == 0 || (params->seqlen == 0 && params->final_states == nullptr)) {
        return MAMBA_OK;
    }
    const DeviceGuard guard(params->run.device);
    cudaError_t error = guard.error;
    if (error == cudaSuccess) {
        if (params->dtype == MAMBA_FLOAT32) {
            error = causal_conv1d_forward_launch<float>(*params);
        }
#ifndef MAMBA_DISABLE_HALF
        if (params->dtype == MAMBA_FLOAT16) {
            error = causal_conv1d_forward_launch<__half>(*params);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (params->dtype == MAMBA_BFLOAT16) {
            error = causal_conv1d_forward_launch<__nv_bfloat16>(*params);
        }
#endif
    }
    return cuda_status(error, function, params->batch, params->dim, params->seqlen, 0);
}

int64_t mamba_causal_conv1d_backward_slots(const MambaCausalConv1d* params) {
    return params == nullptr ? 1 : mamba::causal_conv1d_backward_plan(*params).slots;
}

int32_t mamba_causal_conv1d_backward(const MambaCausalConv1dBackward* params) {
    using namespace mamba;
    const char* const function = "causal_conv1d_backward";
    if (params == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "%s: params is NULL", function);
    }
    const MambaCausalConv1d& forward = params->forward;
    const bool elements = has_elements(forward);
    int32_t status = check_forward(function, forward, elements);
    if (status == MAMBA_OK) {
        status = check_pointer(function, "dout", params->dout, elements);
    }
    if (status == MAMBA_OK) {
        status = check_pointer(function, "dx", params->dx, elements);
    }
    if (status == MAMBA_OK) {
        status = check_pointer(function, "dweight", params->dweight, forward.dim > 0);
    }
    if (status == MAMBA_OK) {
        status = check_pointer(function, "dbias", params->dbias, forward.dim > 0 && forward.bias != nullptr);
    }
    if (status == MAMBA_OK && forward.seq_idx != nullptr &&
        (params->dfinal_states != nullptr || params->dinitial_states != nullptr)) {
        status =
            fail(MAMBA_ERROR_INVALID, "%s: seq_idx cannot be given together with dfinal_states or dinitial_states", function);
    }
    if (status == MAMBA_OK && params->slots != mamba_causal_conv1d_backward_slots(&forward)) {
        status =
            fail(MAMBA_ERROR_INVALID, "%s: slots must be %lld, as mamba_causal_conv1d_backward_slots says, got %lld", function,
                 static_cast<long long>(mamba_causal_conv1d_backward_slots(&forward)), static_cast<long long>(params->slots));
    }
    if (status != MAMBA_OK || forward.dim == 0) {
        return status;
    }
    const DeviceGuard guard(forward.run.device);
    cudaError_t error = guard.error;
    if (error == cudaSuccess) {
        if (forward.dtype == MAMBA_FLOAT32) {
            error = causal_conv1d_backward_launch<float>(*params);
        }
#ifndef MAMBA_DISABLE_HALF
        if (forward.dtype == MAMBA_FLOAT16) {
            error = causal_conv1d_backward_launch<__half>(*params);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (forward.dtype == MAMBA_BFLOAT16) {
            error = causal_conv1d_backward_launch<__nv_bfloat16>(*params);
        }
#endif
    }
    return cuda_status(error, function, forward.batch, forward.dim, forward.seqlen, 0);
}

int32_t mamba_causal_conv1d_update(const MambaCausalConv1dUpdate* params) {
    using namespace mamba;
    const char* const function = "causal_conv1d_update";
    if (params == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "%s: params is NULL", function);
    }
    const bool elements = params->batch > 0 && params->dim > 0 && params->seqlen > 0;
    int32_t status = check_sizes(function, params->batch, params->dim, params->seqlen, params->width);
    if (status == MAMBA_OK) {
        status = check_dtypes(params->dtype, params->weight_dtype, params->bias, params->bias_dtype);
    }
    if (status == MAMBA_OK) {
        status = check_dtype("conv_state", params->state_dtype);
    }
    if (status == MAMBA_OK) {
        status = check_pointer(function, "x", params->x, elements);
    }
    if (status == MAMBA_OK) {
        status = check_pointer(function, "conv_state", params->conv_state, elements);
    }
    if (status == MAMBA_OK) {
        status = check_pointer(function, "weight", params->weight, elements);
    }
    if (status == MAMBA_OK) {
        status = check_pointer(function, "out", params->out, elements);
    }
    if (status == MAMBA_OK && params->state_len < params->width - 1) {
        status = fail(MAMBA_ERROR_INVALID, "%s: state_len must be at least width - 1 = %d, got %lld", function,
                      static_cast<int>(params->width - 1), static_cast<long long>(params->state_len));
    }
    if (status == MAMBA_OK && params->conv_state_indices == nullptr && params->state_rows < params->batch) {
        status = fail(MAMBA_ERROR_INVALID, "%s: state_rows must be at least batch = %lld without conv_state_indices, got %lld",
                      function, static_cast<long long>(params->batch), static_cast<long long>(params->state_rows));
    }
    if (status != MAMBA_OK || !elements) {
        return status;
    }
    const DeviceGuard guard(params->run.device);
    cudaError_t error = guard.error;
    if (error == cudaSuccess) {
        if (params->dtype == MAMBA_FLOAT32) {
            error = causal_conv1d_update_launch<float>(*params);
        }
#ifndef MAMBA_DISABLE_HALF
        if (params->dtype == MAMBA_FLOAT16) {
            error = causal_conv1d_update_launch<__half>(*params);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (params->dtype == MAMBA_BFLOAT16) {
            error = causal_conv1d_update_launch<__nv_bfloat16>(*params);
        }
#endif
    }
    return cuda_status(error, function, params->batch, params->dim, params->seqlen, 0);
}
