// What both libraries refuse before a linear layer of few rows.
#pragma once

#include "common/alignment.h"
#include "common/check.h"

namespace mamba {

inline bool linear_is_empty(const MambaLinear& p) {
    return p.rows == 0 || p.out_features == 0;
}

// Of a call with a norm before it.
inline void check_linear_norm(Check& check, const MambaLinear& p) {
    check.that(p.rows <= 1 && p.weight_dtype == MAMBA_INT8, MAMBA_ERROR_UNSUPPORTED,
               "a norm needs 1 row and an int8 weight, got %lld rows and dtype code %d", static_cast<long long>(p.rows),
               static_cast<int>(p.weight_dtype));
    check.that(p.in_features % 16 == 0 && p.in_features <= MAMBA_MAX_LINEAR_NORM, MAMBA_ERROR_UNSUPPORTED,
               "in_features must be a multiple of 16 and at most %d with a norm, got %lld", MAMBA_MAX_LINEAR_NORM,
               static_cast<long long>(p.in_features));
    check.range(0, 1 << 30, "out_features", p.out_features);
    check.that(p.residual_dtype == p.dtype || p.residual_dtype == MAMBA_FLOAT32, MAMBA_ERROR_INVALID,
               "residual must be float32 or of x's dtype, %s, got %s", dtype_name(p.dtype), dtype_name(p.residual_dtype));
    check.pointer("residual_out", p.residual_out, !linear_is_empty(p));
    check.that(rows_aligned(p.x, 1, 16) && rows_aligned(p.weight, 1, 16) && rows_aligned(p.norm_weight, 1, 16) &&
                   rows_aligned(p.residual, 1, 16) && rows_aligned(p.residual_out, 1, 16),
               MAMBA_ERROR_UNSUPPORTED,
               "x, weight, norm_weight, residual and residual_out must be 16-byte aligned with a norm");
}

// has_norm: whether this library takes one before it.
inline int32_t check_linear(const char* function, const MambaLinear* params, bool has_norm) {
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
    check.dtype("norm_weight", p.norm_weight_dtype, p.norm_weight != nullptr);
    check.dtype("residual", p.residual_dtype, p.norm_weight != nullptr);
    check.that(has_norm || p.norm_weight == nullptr, MAMBA_ERROR_UNSUPPORTED, "a norm before it is in mamba_cuda alone");
    if (check.ok() && p.norm_weight != nullptr) {
        check_linear_norm(check, p);
    }
    if (!check.ok() || linear_is_empty(p)) {
        return check.status();
    }
    check.pointer("x", p.x, p.in_features > 0);
    check.pointer("weight", p.weight, p.in_features > 0);
    check.pointer("scales", p.scales, p.in_features > 0 && p.weight_dtype == MAMBA_INT8);
    check.pointer("out", p.out);
    return check.status();
}

inline bool dequantize_is_empty(const MambaDequantize& p) {
    return p.rows == 0 || p.features == 0;
}

inline int32_t check_dequantize(const char* function, const MambaDequantize* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaDequantize& p = *params;
    check.at_least(0, "rows", p.rows);
    check.at_least(0, "features", p.features);
    check.at_least(0, "weight_rows", p.weight_rows);
    check.dtype("out", p.dtype);
    check.that(p.indices == nullptr || p.index_bytes == 4 || p.index_bytes == 8, MAMBA_ERROR_INVALID,
               "index_bytes must be 4 or 8, got %d", static_cast<int>(p.index_bytes));
    check.that(p.indices != nullptr || p.weight_rows == p.rows, MAMBA_ERROR_INVALID,
               "weight_rows must be rows = %lld without indices, got %lld", static_cast<long long>(p.rows),
               static_cast<long long>(p.weight_rows));
    if (!check.ok() || dequantize_is_empty(p)) {
        return check.status();
    }
    check.pointer("weight", p.weight, p.weight_rows > 0);
    check.pointer("scales", p.scales, p.weight_rows > 0);
    check.pointer("out", p.out);
    return check.status();
}

inline int32_t check_greedy_token(const char* function, const MambaGreedyToken* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaGreedyToken& p = *params;
    check.at_least(0, "rows", p.rows);
    check.range(1, 1 << 30, "vocabulary", p.vocabulary);
    check.dtype("logits", p.dtype);
    if (check.ok() && p.rows > 0) {
        check.pointer("logits", p.logits);
        check.pointer("tokens", p.tokens);
        check.pointer("ends", p.ends, p.sequences != nullptr);
        check.pointer("eos", p.eos, p.ended != nullptr);
    }
    if (p.ended != nullptr) {
        check.at_least(1, "eos_count", p.eos_count);
    }
    return check.status();
}

}  // namespace mamba
