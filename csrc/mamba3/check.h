// What both libraries refuse before Mamba-3's scan.
#pragma once

#include "common/check.h"

namespace mamba {

// Largest rank of backward in mamba_cuda.
constexpr int kMamba3MostCudaRank = 16;

// Whether there is nothing to compute, not even a final state.
inline bool mamba3_is_empty(const MambaMamba3& p) {
    return p.sequences == 0 || p.nheads == 0 || p.headdim == 0;
}

inline void check_mamba3_sizes(Check& check, const MambaMamba3& p) {
    check.at_least(0, "batch", p.batch);
    check.at_least(0, "seqlen", p.seqlen);
    check.at_least(0, "nheads", p.nheads);
    check.at_least(0, "sequences", p.sequences);
    check.range(1, MAMBA_MAX_RANK, "rank", p.rank);
    check.range(0, MAMBA_MAX_HEADDIM, "headdim", p.headdim);
    check.range(1, MAMBA_MAX_DSTATE, "dstate", p.dstate);
    check.divides("ngroups", p.ngroups, "nheads", p.nheads);
    check.at_least(0, "nangles", p.nangles);
    check.that(2 * p.nangles <= p.dstate, MAMBA_ERROR_INVALID,
               "an angle turns two of the dstate=%lld entries, got nangles=%lld", static_cast<long long>(p.dstate),
               static_cast<long long>(p.nangles));
    check.that(
        p.cu_seqlens != nullptr ? p.batch == 1 && p.seq_idx == nullptr : p.sequences == p.batch, MAMBA_ERROR_INVALID,
        "sequences must be batch without cu_seqlens, which are for batch=1 without seq_idx, got sequences=%lld batch=%lld",
        static_cast<long long>(p.sequences), static_cast<long long>(p.batch));
    check.dtype("q", p.dtype);
    check.dtype("adt", p.adt_dtype);
    check.dtype("dt", p.dt_dtype);
    check.dtype("trap", p.trap_dtype);
    check.dtype("angles", p.angle_dtype);
}

// What the _workspace function needs to know: sizes and dtypes, not yet pointers.
inline int32_t check_mamba3_problem(const char* function, const MambaMamba3* params) {
    Check check(function);
    check.pointer("params", params);
    if (check.ok()) {
        check_mamba3_sizes(check, *params);
    }
    return check.status();
}

inline void check_mamba3_inputs(Check& check, const MambaMamba3& p) {
    const bool steps = p.seqlen > 0, states = p.ssm_state != nullptr;
    check.pointer("q", p.q, steps);
    check.pointer("k", p.k, steps);
    check.pointer("v", p.v, steps);
    check.pointer("adt", p.adt, steps);
    check.pointer("dt", p.dt, steps);
    check.pointer("trap", p.trap, steps);
    check.pointer("q_bias", p.q_bias);
    check.pointer("k_bias", p.k_bias);
    check.pointer("angles", p.angles, steps && p.nangles > 0);
    check.pointer("angle_state", p.angle_state, states && p.nangles > 0);
    check.pointer("k_state", p.k_state, states);
    check.pointer("v_state", p.v_state, states);
}

inline int32_t check_mamba3_forward(const char* function, const MambaMamba3* params) {
    const int32_t status = check_mamba3_problem(function, params);
    if (status != MAMBA_OK || mamba3_is_empty(*params)) {
        return status;
    }
    Check check(function);
    const MambaMamba3& p = *params;
    check_mamba3_inputs(check, p);
    check.pointer("out", p.out, p.seqlen > 0);
    check.pointer("final_angle", p.final_angle, p.final_ssm != nullptr && p.nangles > 0);
    check.pointer("final_k", p.final_k, p.final_ssm != nullptr);
    check.pointer("final_v", p.final_v, p.final_ssm != nullptr);
    return check.status();
}

inline int32_t check_mamba3_backward(const char* function, const MambaMamba3Backward* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaMamba3Backward& q = *params;
    const MambaMamba3& p = q.forward;
    check_mamba3_sizes(check, p);
    if (!check.ok() || mamba3_is_empty(p)) {
        return check.status();
    }
    const bool steps = p.seqlen > 0, states = p.ssm_state != nullptr;
    check_mamba3_inputs(check, p);
    check.pointer("dout", q.dout, steps);
    check.pointer("dq", q.dq, steps);
    check.pointer("dk", q.dk, steps);
    check.pointer("dv", q.dv, steps);
    check.pointer("dadt", q.dadt, steps);
    check.pointer("ddt", q.ddt, steps);
    check.pointer("dtrap", q.dtrap, steps);
    check.pointer("dq_bias", q.dq_bias);
    check.pointer("dk_bias", q.dk_bias);
    check.pointer("dangles", q.dangles, steps && p.nangles > 0);
    check.pointer("dD", q.dD, p.D != nullptr);
    check.pointer("dz", q.dz, p.z != nullptr && steps);
    check.pointer("dmimo_v", q.dmimo_v, p.mimo_v != nullptr);
    check.pointer("dmimo_z", q.dmimo_z, p.mimo_z != nullptr);
    check.pointer("dmimo_out", q.dmimo_out, p.mimo_out != nullptr);
    check.pointer("dnorm_weight", q.dnorm_weight, p.norm_weight != nullptr);
    check.pointer("dangle_state", q.dangle_state, states && p.nangles > 0);
    check.pointer("dssm_state", q.dssm_state, states);
    check.pointer("dk_state", q.dk_state, states);
    check.pointer("dv_state", q.dv_state, states);
    return check.status();
}

inline int32_t check_mamba3_step(const char* function, const MambaMamba3Step* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaMamba3Step& q = *params;
    const MambaMamba3& p = q.scan;
    check_mamba3_sizes(check, p);
    check.range(1, 1, "seqlen", p.seqlen);
    check.dtype("ssm", q.ssm_dtype);
    check.dtype("k_state", q.k_dtype);
    check.dtype("v_state", q.v_dtype);
    check.dtype("parameters", q.parameter_dtype);
    check.dtype("weights", q.weight_dtype);
    if (!check.ok() || mamba3_is_empty(p)) {
        return check.status();
    }
    check_mamba3_inputs(check, p);
    check.that(p.ssm_state == nullptr && p.cu_seqlens == nullptr && p.seq_idx == nullptr, MAMBA_ERROR_INVALID,
               "a step has its own states and no packed sequences");
    const bool raw = q.dt_bias != nullptr || q.q_weight != nullptr || q.k_weight != nullptr;
    check.pointer("dt_bias", q.dt_bias, raw);
    check.pointer("q_weight", q.q_weight, raw);
    check.pointer("k_weight", q.k_weight, raw);
    check.pointer("out", p.out);
    check.pointer("state_angle", q.state_angle, p.nangles > 0);
    check.pointer("state_ssm", q.state_ssm);
    check.pointer("state_k", q.state_k);
    check.pointer("state_v", q.state_v);
    return check.status();
}

}  // namespace mamba
