// What both libraries refuse before a norm or SwiGLU.
#pragma once

#include "common/check.h"

namespace mamba {

// What forward and backward ask of the part they share.
inline void check_norm(Check& check, const MambaNorm& p) {
    check.at_least(0, "rows", p.rows);
    check.at_least(1, "ngroups", p.ngroups);
    check.range(1, MAMBA_MAX_NORM_GROUP, "group_size", p.group_size);
    check.dtype("x", p.dtype);
    check.dtype("weight", p.weight_dtype);
    check.dtype("bias", p.bias_dtype, p.bias != nullptr);
    check.that(p.other_dtype == p.dtype || p.other_dtype == MAMBA_FLOAT32, MAMBA_ERROR_INVALID,
               "residual and z must be float32 or of x's dtype, %s, got %s", dtype_name(p.dtype), dtype_name(p.other_dtype));
    check.that(p.z == nullptr || (p.residual == nullptr && p.residual_out == nullptr), MAMBA_ERROR_INVALID,
               "z cannot be given together with residual or residual_out");
    check.pointer("weight", p.weight, p.rows > 0);
}

inline int32_t check_norm_forward(const char* function, const MambaNorm* params) {
    Check check(function);
    check.pointer("params", params);
    if (check.ok()) {
        check_norm(check, *params);
        check.pointer("x", params->x, params->rows > 0);
        check.pointer("out", params->out, params->rows > 0);
    }
    return check.status();
}

inline int32_t check_norm_backward(const char* function, const MambaNormBackward* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaNormBackward& q = *params;
    const MambaNorm& p = q.forward;
    check_norm(check, p);
    if (!check.ok() || p.rows == 0) {
        return check.status();
    }
    check.pointer("x", p.x, p.residual_out == nullptr);
    check.pointer("rstd", p.rstd);
    check.pointer("mean", p.mean, !p.is_rms_norm);
    check.pointer("dout", q.dout);
    check.pointer("dx", q.dx);
    check.pointer("dweight", q.dweight);
    check.pointer("dbias", q.dbias, p.bias != nullptr);
    check.pointer("dz", q.dz, p.z != nullptr);
    check.that((p.bias != nullptr || q.dbias == nullptr) && (p.z != nullptr || q.dz == nullptr), MAMBA_ERROR_INVALID,
               "dbias is given without bias, or dz without z");
    check.that(p.z == nullptr || (q.dresidual_out == nullptr && q.dresidual == nullptr), MAMBA_ERROR_INVALID,
               "z cannot be given together with dresidual_out or dresidual");
    return check.status();
}

inline bool swiglu_is_empty(const MambaSwiglu& p) {
    return p.rows == 0 || p.width == 0;
}

inline int32_t check_swiglu(const char* function, const MambaSwiglu* params, bool backward) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaSwiglu& p = *params;
    check.at_least(0, "rows", p.rows);
    check.at_least(0, "width", p.width);
    check.dtype("xy", p.dtype);
    check.range(0, 1, "gate_last", p.gate_last);
    if (check.ok() && !swiglu_is_empty(p)) {
        check.pointer("xy", p.xy);
        check.pointer("out", p.out, !backward);
        check.pointer("dout", p.dout, backward);
        check.pointer("dxy", p.dxy, backward);
    }
    return check.status();
}

}  // namespace mamba
