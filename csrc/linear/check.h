// What both libraries refuse before a linear layer of few rows.
#pragma once

#include "common/check.h"

namespace mamba {

inline bool linear_is_empty(const MambaLinear& p) {
    return p.rows == 0 || p.out_features == 0;
}

inline int32_t check_linear(const char* function, const MambaLinear* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaLinear& p = *params;
    check.at_least(0, "rows", p.rows);
    check.at_least(0, "in_features", p.in_features);
    check.at_least(0, "out_features", p.out_features);
    check.dtype("x", p.dtype);
    check.that(p.weight_dtype == p.dtype || p.weight_dtype == MAMBA_INT8, MAMBA_ERROR_INVALID,
               "weight: dtype code %d is none of that of x (%d) and int8 (%d)", static_cast<int>(p.weight_dtype),
               static_cast<int>(p.dtype), MAMBA_INT8);
    check.dtype("bias", p.bias_dtype, p.bias != nullptr);
    if (!check.ok() || linear_is_empty(p)) {
        return check.status();
    }
    check.pointer("x", p.x, p.in_features > 0);
    check.pointer("weight", p.weight, p.in_features > 0);
    check.pointer("scales", p.scales, p.in_features > 0 && p.weight_dtype == MAMBA_INT8);
    check.pointer("out", p.out);
    return check.status();
}

}  // namespace mamba
