// What both libraries refuse before Mamba-2's scan.
#pragma once

#include "common/check.h"

namespace mamba {

// Whether there is nothing to compute, not even a final state.
inline bool ssd_is_empty(const MambaSsd& p) {
    return p.batch == 0 || p.nheads == 0 || p.headdim == 0;
}

inline bool ssd_forward_is_empty(const MambaSsd& p) {
    return ssd_is_empty(p) || (p.out == nullptr && p.final_state == nullptr);
}

inline void check_ssd_sizes(Check& check, const MambaSsd& p) {
    check.at_least(0, "batch", p.batch);
    check.at_least(0, "seqlen", p.seqlen);
    check.at_least(0, "nheads", p.nheads);
    check.range(0, MAMBA_MAX_HEADDIM, "headdim", p.headdim);
    check.range(1, MAMBA_MAX_DSTATE, "dstate", p.dstate);
    check.divides("ngroups", p.ngroups, "nheads", p.nheads);
    check.dtype("x", p.dtype);
    check.dtype("dt", p.dt_dtype);
    check.dtype("A", p.A_dtype);
    check.dtype("dt_bias", p.dt_bias_dtype, p.dt_bias != nullptr);
}

// What the _workspace functions need to know: sizes and dtypes, not yet pointers.
inline int32_t check_ssd_problem(const char* function, const MambaSsd* params) {
    Check check(function);
    check.pointer("params", params);
    if (check.ok()) {
        check_ssd_sizes(check, *params);
    }
    return check.status();
}

inline void check_ssd_inputs(Check& check, const MambaSsd& p) {
    check.pointer("x", p.x, p.seqlen > 0);
    check.pointer("dt", p.dt, p.seqlen > 0);
    check.pointer("A", p.A);
    check.pointer("B", p.B, p.seqlen > 0);
    check.pointer("C", p.C, p.seqlen > 0);
}

inline int32_t check_ssd_forward(const char* function, const MambaSsd* params) {
    Check check(function);
    check.pointer("params", params);
    if (check.ok()) {
        check_ssd_sizes(check, *params);
        if (!ssd_forward_is_empty(*params)) {
            check_ssd_inputs(check, *params);
        }
    }
    return check.status();
}

inline int32_t check_ssd_backward(const char* function, const MambaSsdBackward* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaSsdBackward& q = *params;
    const MambaSsd& p = q.forward;
    check_ssd_sizes(check, p);
    if (!check.ok() || ssd_is_empty(p)) {
        return check.status();
    }
    check_ssd_inputs(check, p);
    check.that(p.z == nullptr && p.cu_seqlens == nullptr, MAMBA_ERROR_UNSUPPORTED, "takes neither z nor cu_seqlens");
    check.pointer("dout", q.dout, p.seqlen > 0);
    check.pointer("dx", q.dx, p.seqlen > 0);
    check.pointer("ddt", q.ddt, p.seqlen > 0);
    check.pointer("dA", q.dA);
    check.pointer("dB", q.dB, p.seqlen > 0);
    check.pointer("dC", q.dC, p.seqlen > 0);
    check.pointer("dD", q.dD, p.D != nullptr);
    check.pointer("ddt_bias", q.ddt_bias, p.dt_bias != nullptr);
    return check.status();
}

inline bool ssd_carry_is_empty(const MambaSsdCarry& p) {
    return p.batch == 0 || p.nheads == 0;
}

inline int32_t check_ssd_carry(const char* function, const MambaSsdCarry* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaSsdCarry& p = *params;
    check.at_least(0, "batch", p.batch);
    check.at_least(0, "pieces", p.pieces);
    check.at_least(0, "nheads", p.nheads);
    check.at_least(0, "state_size", p.state_size);
    if (check.ok() && !ssd_carry_is_empty(p)) {
        check.pointer("passed", p.passed, p.pieces > 0 && p.state_size > 0);
        check.pointer("factors", p.factors, p.pieces > 0);
    }
    return check.status();
}

// bytes: what the _workspace function says.
inline int32_t check_ssd_workspace(const char* function, const MambaSsd& p, int64_t bytes) {
    Check check(function);
    check.that(bytes == 0 || p.workspace != nullptr, MAMBA_ERROR_INVALID, "workspace is NULL, this problem needs %lld bytes",
               static_cast<long long>(bytes));
    return check.status();
}

}  // namespace mamba
