// The decode step's C ABI on the GPU: checks, then the kernel for the state's dtype.
#include "state_update/launch.h"

namespace mamba {

namespace {

int32_t check_arguments(const char* function, const MambaSelectiveStateUpdate& params) {
    struct Argument {
        const char* name;
        const void* pointer;
        int32_t dtype;
        bool required;
    };
    const bool elements = params.batch > 0 && params.nheads > 0 && params.headdim > 0;
    const Argument arguments[] = {
        {"state", params.state, params.state_dtype, elements},
        {"x", params.x, params.x_dtype, elements},
        {"out", params.out, params.x_dtype, elements},
        {"dt", params.dt, params.dt_dtype, elements},
        {"A", params.A, params.A_dtype, elements},
        {"B", params.B, params.BC_dtype, elements},
        {"C", params.C, params.BC_dtype, elements},
        {"D", params.D, params.D_dtype, false},
        {"dt_bias", params.dt_bias, params.dt_bias_dtype, false},
    };
    for (const Argument& argument : arguments) {
        if (argument.required && argument.pointer == nullptr) {
            return fail(MAMBA_ERROR_INVALID, "%s: %s is NULL", function, argument.name);
        }
        if (argument.pointer != nullptr) {
            const int32_t status = check_dtype(argument.name, argument.dtype);
            if (status != MAMBA_OK) {
                return status;
            }
        }
    }
    return MAMBA_OK;
}

int32_t check_sizes(const char* function, const MambaSelectiveStateUpdate& params) {
    if (params.batch < 0 || params.nheads < 0 || params.headdim < 0) {
        return fail(MAMBA_ERROR_INVALID, "%s: sizes must not be negative, got batch=%lld nheads=%lld headdim=%lld", function,
                    static_cast<long long>(params.batch), static_cast<long long>(params.nheads),
                    static_cast<long long>(params.headdim));
    }
    if (params.dstate < 1 || params.dstate > MAMBA_MAX_DSTATE) {
        return fail(MAMBA_ERROR_UNSUPPORTED, "%s: dstate must be from 1 to %d, got %lld", function, MAMBA_MAX_DSTATE,
                    static_cast<long long>(params.dstate));
    }
    if (params.ngroups < 1 || params.nheads % params.ngroups != 0) {
        return fail(MAMBA_ERROR_INVALID, "%s: nheads must be a multiple of ngroups, got nheads=%lld ngroups=%lld", function,
                    static_cast<long long>(params.nheads), static_cast<long long>(params.ngroups));
    }
    if (params.state_batch_indices == nullptr && params.state_rows < params.batch) {
        return fail(MAMBA_ERROR_INVALID, "%s: state_rows must be at least batch = %lld without state_batch_indices, got %lld",
                    function, static_cast<long long>(params.batch), static_cast<long long>(params.state_rows));
    }
    return MAMBA_OK;
}

}  // namespace

}  // namespace mamba

int32_t mamba_selective_state_update(const MambaSelectiveStateUpdate* params) {
    using namespace mamba;
    const char* const function = "selective_state_update";
    if (params == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "%s: params is NULL", function);
    }
    int32_t status = check_sizes(function, *params);
    if (status == MAMBA_OK) {
        status = check_arguments(function, *params);
    }
    const int64_t dim = params->nheads * params->headdim;
    if (status != MAMBA_OK || params->batch == 0 || dim == 0) {
        return status;
    }
    const DeviceGuard guard(params->run.device);
    cudaError_t error = guard.error;
    if (error == cudaSuccess) {
        if (params->state_dtype == MAMBA_FLOAT32) {
            error = selective_state_update_launch<float>(*params);
        }
#ifndef MAMBA_DISABLE_HALF
        if (params->state_dtype == MAMBA_FLOAT16) {
            error = selective_state_update_launch<__half>(*params);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (params->state_dtype == MAMBA_BFLOAT16) {
            error = selective_state_update_launch<__nv_bfloat16>(*params);
        }
#endif
    }
    return cuda_status(error, function, params->batch, dim, 1, params->dstate);
}
