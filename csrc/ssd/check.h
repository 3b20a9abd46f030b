// What both libraries refuse before Mamba-2's scan starts. Python has checked shapes and dtypes already; this guards the C ABI.
#pragma once

#include "common/error.h"

namespace mamba {

// Sizes and dtypes, without which the _workspace functions say 0.
inline int32_t check_ssd_sizes(const char* function, const MambaSsd* params) {
    if (params == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "%s: params is NULL", function);
    }
    const MambaSsd& p = *params;
    if (p.batch < 0 || p.seqlen < 0 || p.nheads < 0 || p.headdim < 0) {
        return fail(MAMBA_ERROR_INVALID, "%s: negative size: batch=%lld seqlen=%lld nheads=%lld headdim=%lld", function,
                    static_cast<long long>(p.batch), static_cast<long long>(p.seqlen), static_cast<long long>(p.nheads),
                    static_cast<long long>(p.headdim));
    }
    if (p.dstate < 1 || p.dstate > MAMBA_MAX_DSTATE) {
        return fail(MAMBA_ERROR_UNSUPPORTED, "%s: dstate must be 1..%d, got %lld", function, MAMBA_MAX_DSTATE,
                    static_cast<long long>(p.dstate));
    }
    if (p.headdim > MAMBA_MAX_HEADDIM) {
        return fail(MAMBA_ERROR_UNSUPPORTED, "%s: headdim must be 1..%d, got %lld", function, MAMBA_MAX_HEADDIM,
                    static_cast<long long>(p.headdim));
    }
    if (p.ngroups < 1 || p.nheads % p.ngroups != 0) {
        return fail(MAMBA_ERROR_INVALID, "%s: ngroups must divide nheads, got ngroups=%lld nheads=%lld", function,
                    static_cast<long long>(p.ngroups), static_cast<long long>(p.nheads));
    }
    int32_t status = check_dtype("x", p.dtype);
    status = status != MAMBA_OK ? status : check_dtype("dt", p.dt_dtype);
    status = status != MAMBA_OK ? status : check_dtype("A", p.A_dtype);
    return status != MAMBA_OK || p.dt_bias == nullptr ? status : check_dtype("dt_bias", p.dt_bias_dtype);
}

// Whether there is nothing to compute, not even a final state.
inline bool ssd_is_empty(const MambaSsd& p) {
    return p.batch == 0 || p.nheads == 0 || p.headdim == 0;
}

inline int32_t check_ssd_inputs(const char* function, const MambaSsd& p, int64_t workspace_bytes) {
    struct Required {
        const char* name;
        const void* pointer;
    };
    const Required required[] = {{"x", p.x}, {"dt", p.dt}, {"B", p.B}, {"C", p.C}};
    for (const Required& argument : required) {
        if (argument.pointer == nullptr && p.seqlen > 0) {
            return fail(MAMBA_ERROR_INVALID, "%s: %s is NULL", function, argument.name);
        }
    }
    if (p.A == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "%s: A is NULL", function);
    }
    if (p.workspace == nullptr && workspace_bytes > 0) {
        return fail(MAMBA_ERROR_INVALID, "%s: workspace is NULL, this problem needs %lld bytes", function,
                    static_cast<long long>(workspace_bytes));
    }
    return MAMBA_OK;
}

inline int32_t check_ssd_backward_arguments(const char* function, const MambaSsdBackward& q) {
    const MambaSsd& p = q.forward;
    if (p.z != nullptr || p.cu_seqlens != nullptr) {
        return fail(MAMBA_ERROR_UNSUPPORTED, "%s: takes neither z nor cu_seqlens", function);
    }
    const bool steps = p.seqlen > 0;
    const bool missing =
        (steps && (q.dout == nullptr || q.dx == nullptr || q.ddt == nullptr || q.dB == nullptr || q.dC == nullptr)) ||
        q.dA == nullptr || (p.D != nullptr && q.dD == nullptr) || (p.dt_bias != nullptr && q.ddt_bias == nullptr);
    if (missing) {
        return fail(MAMBA_ERROR_INVALID,
                    "%s: dout, dx, ddt, dA, dB, dC, and dD and ddt_bias where D and dt_bias are, are required", function);
    }
    return MAMBA_OK;
}

}  // namespace mamba
