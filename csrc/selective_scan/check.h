// What both libraries refuse before a scan.
#pragma once

#include "common/check.h"
#include "common/integers.h"
#include "selective_scan/parts.h"

namespace mamba {

inline bool scan_is_empty(const MambaSelectiveScan& p) {
    return p.batch == 0 || p.dim == 0;
}

inline void check_scan_sizes(Check& check, const MambaSelectiveScan& p) {
    check.at_least(0, "batch", p.batch);
    check.at_least(0, "dim", p.dim);
    check.at_least(0, "seqlen", p.seqlen);
    check.range(1, MAMBA_MAX_DSTATE, "dstate", p.dstate);
    check.divides("ngroups", p.ngroups, "dim", p.dim);
    check.dtype("u", p.dtype);
}

// Of a gradient (1, G, N, L).
inline bool scan_matrix_is_contiguous(const MambaSelectiveScan& p, int64_t group_stride, int64_t dstate_stride) {
    return (p.ngroups == 1 || group_stride == p.dstate * p.seqlen) && (p.dstate == 1 || dstate_stride == p.seqlen);
}

inline int32_t check_scan_plan(const char* function, const MambaSelectiveScan* params, const MambaSelectiveScanPlan* plan) {
    Check check(function);
    check.pointer("params", params);
    check.pointer("plan", plan);
    if (check.ok()) {
        check_scan_sizes(check, *params);
    }
    return check.status();
}

// What forward and backward ask of the part they share.
inline void check_scan_inputs(Check& check, const MambaSelectiveScan& p) {
    check_scan_sizes(check, p);
    if (!check.ok() || scan_is_empty(p)) {
        return;
    }
    const bool steps = p.seqlen > 0;
    check.pointer("u", p.u, steps);
    check.pointer("delta", p.delta, steps);
    check.pointer("A", p.A);
    check.pointer("B", p.B, steps || !p.variable_B);
    check.pointer("C", p.C, steps || !p.variable_C);
    check.at_least(1, "segments", p.segments);
    check.that(!p.add || p.reverse, MAMBA_ERROR_UNSUPPORTED, "add needs reverse: it is for the second of two directions");
    if (check.ok()) {
        const int64_t tiles = ceil_div(p.seqlen, MAMBA_SCAN_CHECKPOINT);
        check.that(p.segments == 1 || (p.segments - 1) * ceil_div(tiles, p.segments) < tiles, MAMBA_ERROR_INVALID,
                   "segments=%lld would leave a segment of seqlen=%lld empty", static_cast<long long>(p.segments),
                   static_cast<long long>(p.seqlen));
        check.that(p.batch * p.ngroups * ceil_div(p.dim / p.ngroups, 8) * p.segments <= INT32_MAX, MAMBA_ERROR_UNSUPPORTED,
                   "batch * dim is too large: batch=%lld dim=%lld ngroups=%lld", static_cast<long long>(p.batch),
                   static_cast<long long>(p.dim), static_cast<long long>(p.ngroups));
    }
}

inline int32_t check_scan_forward(const char* function, const MambaSelectiveScan* params) {
    Check check(function);
    check.pointer("params", params);
    if (check.ok()) {
        check_scan_inputs(check, *params);
        check.pointer("workspace", params->workspace, params->segments > 1);
        check.pointer("out", params->out, !scan_is_empty(*params) && params->seqlen > 0);
    }
    return check.status();
}

inline int32_t check_scan_backward(const char* function, const MambaSelectiveScanBackward* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaSelectiveScanBackward& q = *params;
    const MambaSelectiveScan& p = q.forward;
    check_scan_inputs(check, p);
    if (!check.ok() || scan_is_empty(p)) {
        return check.status();
    }
    const bool steps = p.seqlen > 0;
    check.at_least(1, "slots", q.slots);
    check.pointer("dout", q.dout, steps);
    check.pointer("du", q.du, steps);
    check.pointer("ddelta", q.ddelta, steps);
    check.pointer("dz", q.dz, steps && p.z != nullptr);
    check.pointer("checkpoints", p.checkpoints, p.seqlen > MAMBA_SCAN_CHECKPOINT);
    check.pointer("dA", q.dA);
    check.pointer("dB", q.dB, steps || !p.variable_B);
    check.pointer("dC", q.dC, steps || !p.variable_C);
    check.pointer("dD", q.dD, p.D != nullptr);
    check.pointer("ddelta_bias", q.ddelta_bias, p.delta_bias != nullptr);
    check.pointer("workspace", p.workspace, check.ok() && scan_workspace_bytes(p, p.segments, q.slots) > 0);
    const bool written_once = p.batch == 1 && p.dtype == MAMBA_FLOAT32;
    check.that(!written_once || !p.variable_B || scan_matrix_is_contiguous(p, q.dB_group_stride, q.dB_dstate_stride),
               MAMBA_ERROR_UNSUPPORTED, "a float32 dB of one batch entry must be contiguous");
    check.that(!written_once || !p.variable_C || scan_matrix_is_contiguous(p, q.dC_group_stride, q.dC_dstate_stride),
               MAMBA_ERROR_UNSUPPORTED, "a float32 dC of one batch entry must be contiguous");
    return check.status();
}

inline int32_t check_scan_double_backward(const char* function, const MambaSelectiveScanDoubleBackward* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaSelectiveScanDoubleBackward& q = *params;
    const MambaSelectiveScan& p = q.forward;
    check_scan_inputs(check, p);
    if (!check.ok() || scan_is_empty(p)) {
        return check.status();
    }
    check.that(p.dtype == MAMBA_FLOAT32, MAMBA_ERROR_UNSUPPORTED, "u must be float32, got %s", dtype_name(p.dtype));
    check.that(p.variable_B && p.variable_C, MAMBA_ERROR_UNSUPPORTED, "B and C must vary, got variable_B=%d variable_C=%d",
               static_cast<int>(p.variable_B), static_cast<int>(p.variable_C));
    const bool bare = !p.delta_softplus && p.D == nullptr && p.z == nullptr && p.delta_bias == nullptr && !p.add;
    check.that(bare, MAMBA_ERROR_UNSUPPORTED, "delta_softplus and add must be 0, D, z and delta_bias NULL");
    check.at_least(1, "seqlen", p.seqlen);
    check.at_least(1, "slots", q.slots);
    check.pointer("out", p.out);
    check.pointer("dout", q.dout);
    check.pointer("u_tangent", q.u_tangent);
    check.pointer("delta_tangent", q.delta_tangent);
    check.pointer("A_tangent", q.A_tangent);
    check.pointer("B_tangent", q.B_tangent);
    check.pointer("C_tangent", q.C_tangent);
    check.pointer("dout_tangent", q.dout_tangent);
    check.pointer("ddelta", q.ddelta);
    check.pointer("out_tangent", q.out_tangent);
    check.pointer("last_state_tangent", q.last_state_tangent);
    check.pointer("du_tangent", q.du_tangent);
    check.pointer("ddelta_tangent", q.ddelta_tangent);
    check.pointer("dA_tangent", q.dA_tangent);
    check.pointer("dB_tangent", q.dB_tangent);
    check.pointer("dC_tangent", q.dC_tangent);
    check.pointer("dinitial_state_tangent", q.dinitial_state_tangent);
    return check.status();
}

// The inputs of a carry call are those of the call that it goes before.
inline void check_scan_carry(Check& check, const MambaSelectiveScan& p) {
    check_scan_inputs(check, p);
    if (check.ok() && !scan_is_empty(p)) {
        check.at_least(1, "seqlen", p.seqlen);
        check.pointer("workspace", p.workspace);
    }
}

inline int32_t check_scan_forward_carry(const char* function, const MambaSelectiveScan* params) {
    Check check(function);
    check.pointer("params", params);
    if (check.ok()) {
        check_scan_carry(check, *params);
    }
    return check.status();
}

inline int32_t check_scan_backward_carry(const char* function, const MambaSelectiveScanBackward* params) {
    Check check(function);
    check.pointer("params", params);
    if (check.ok()) {
        check_scan_carry(check, params->forward);
        check.pointer("dout", params->dout, check.ok() && !scan_is_empty(params->forward));
    }
    return check.status();
}

}  // namespace mamba
