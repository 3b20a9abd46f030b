// What both libraries refuse before a norm or SwiGLU starts. Python has checked shapes and dtypes already; this guards the
// C ABI.
#pragma once

#include "common/error.h"

namespace mamba {

inline int32_t check_norm(const char* function, const MambaNorm& p) {
    if (p.rows < 0 || p.ngroups < 1 || p.group_size < 1) {
        return fail(
            MAMBA_ERROR_INVALID,
            "%s: rows must be at least 0, ngroups and group_size at least 1, got rows=%lld ngroups=%lld group_size=%lld",
            function, static_cast<long long>(p.rows), static_cast<long long>(p.ngroups), static_cast<long long>(p.group_size));
    }
    if (p.group_size > MAMBA_MAX_NORM_GROUP) {
        return fail(MAMBA_ERROR_UNSUPPORTED, "%s: group_size must be at most %lld, got %lld", function,
                    static_cast<long long>(MAMBA_MAX_NORM_GROUP), static_cast<long long>(p.group_size));
    }
    int32_t status = check_dtype("norm: x", p.dtype);
    status = status != MAMBA_OK ? status : check_dtype("norm: weight", p.weight_dtype);
    if (status == MAMBA_OK && p.bias != nullptr) {
        status = check_dtype("norm: bias", p.bias_dtype);
    }
    if (status != MAMBA_OK) {
        return status;
    }
    if (p.other_dtype != p.dtype && p.other_dtype != MAMBA_FLOAT32) {
        return fail(MAMBA_ERROR_INVALID, "%s: residual and z must be float32 or of x's dtype, %s, got %s", function,
                    dtype_name(p.dtype), dtype_name(p.other_dtype));
    }
    if (p.z != nullptr && (p.residual != nullptr || p.residual_out != nullptr)) {
        return fail(MAMBA_ERROR_INVALID, "%s: z cannot be given together with residual or residual_out", function);
    }
    if (p.rows > 0 && p.weight == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "%s: weight is NULL", function);
    }
    return MAMBA_OK;
}

inline int32_t check_norm_forward(const MambaNorm* params) {
    if (params == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "norm_forward: params is NULL");
    }
    const int32_t status = check_norm("norm_forward", *params);
    if (status == MAMBA_OK && params->rows > 0 && (params->x == nullptr || params->out == nullptr)) {
        return fail(MAMBA_ERROR_INVALID, "norm_forward: x and out must not be NULL");
    }
    return status;
}

inline int32_t check_norm_backward(const MambaNormBackward* params) {
    if (params == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "norm_backward: params is NULL");
    }
    const MambaNorm& p = params->forward;
    const int32_t status = check_norm("norm_backward", p);
    if (status != MAMBA_OK || p.rows == 0) {
        return status;
    }
    if ((p.x == nullptr && p.residual_out == nullptr) || p.rstd == nullptr || (p.mean == nullptr && !p.is_rms_norm)) {
        return fail(MAMBA_ERROR_INVALID,
                    "norm_backward: x or residual_out, rstd, and mean unless is_rms_norm, must not be NULL");
    }
    if (params->dout == nullptr || params->dx == nullptr || params->dweight == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "norm_backward: dout, dx and dweight must not be NULL");
    }
    if ((p.bias != nullptr) != (params->dbias != nullptr) || (p.z != nullptr) != (params->dz != nullptr)) {
        return fail(MAMBA_ERROR_INVALID, "norm_backward: dbias goes with bias, and dz with z");
    }
    if (p.z != nullptr && (params->dresidual_out != nullptr || params->dresidual != nullptr)) {
        return fail(MAMBA_ERROR_INVALID, "norm_backward: z cannot be given together with dresidual_out or dresidual");
    }
    return MAMBA_OK;
}

inline int32_t check_swiglu(const char* function, const MambaSwiglu* params, bool backward) {
    if (params == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "%s: params is NULL", function);
    }
    if (params->rows < 0 || params->width < 0) {
        return fail(MAMBA_ERROR_INVALID, "%s: sizes must not be negative, got rows=%lld width=%lld", function,
                    static_cast<long long>(params->rows), static_cast<long long>(params->width));
    }
    const int32_t status = check_dtype("swiglu: xy", params->dtype);
    if (status != MAMBA_OK || params->rows == 0 || params->width == 0) {
        return status;
    }
    if (params->xy == nullptr || (backward ? params->dout == nullptr || params->dxy == nullptr : params->out == nullptr)) {
        return fail(MAMBA_ERROR_INVALID, backward ? "%s: xy, dout and dxy must not be NULL" : "%s: xy and out must not be NULL",
                    function);
    }
    return MAMBA_OK;
}

}  // namespace mamba
