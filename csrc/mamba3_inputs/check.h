// What both libraries refuse before they prepare what Mamba-3's scan takes.
#pragma once

#include "common/check.h"

namespace mamba {

inline bool mamba3_inputs_are_empty(const MambaMamba3Inputs& p) {
    return p.rows == 0 || p.nheads == 0;
}

inline void check_mamba3_inputs_sizes(Check& check, const MambaMamba3Inputs& p) {
    check.at_least(0, "rows", p.rows);
    check.at_least(0, "nheads", p.nheads);
    check.range(1, MAMBA_MAX_DSTATE, "dstate", p.dstate);
    check.range(1, INT32_MAX / (64 * MAMBA_MAX_DSTATE), "matrices", p.matrices);
    check.range(0, INT32_MAX / 64, "nheads", p.nheads);
    check.dtype("q", p.dtype);
    check.dtype("q_weight", p.q_weight_dtype);
    check.dtype("k_weight", p.k_weight_dtype);
}

inline int32_t check_mamba3_inputs_problem(const char* function, const MambaMamba3Inputs* params) {
    Check check(function);
    check.pointer("params", params);
    if (check.ok()) {
        check_mamba3_inputs_sizes(check, *params);
    }
    return check.status();
}

inline void check_mamba3_inputs_pointers(Check& check, const MambaMamba3Inputs& p) {
    check.pointer("q", p.q);
    check.pointer("k", p.k);
    check.pointer("dt", p.dt);
    check.pointer("a", p.a);
    check.pointer("q_weight", p.q_weight);
    check.pointer("k_weight", p.k_weight);
    check.pointer("dt_bias", p.dt_bias);
}

inline int32_t check_mamba3_inputs_forward(const char* function, const MambaMamba3Inputs* params) {
    const int32_t status = check_mamba3_inputs_problem(function, params);
    if (status != MAMBA_OK || mamba3_inputs_are_empty(*params)) {
        return status;
    }
    Check check(function);
    const MambaMamba3Inputs& p = *params;
    check_mamba3_inputs_pointers(check, p);
    check.pointer("q_out", p.q_out);
    check.pointer("k_out", p.k_out);
    check.pointer("dt_out", p.dt_out);
    check.pointer("adt_out", p.adt_out);
    return check.status();
}

inline int32_t check_mamba3_inputs_backward(const char* function, const MambaMamba3InputsBackward* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaMamba3InputsBackward& q = *params;
    check_mamba3_inputs_sizes(check, q.forward);
    if (!check.ok() || mamba3_inputs_are_empty(q.forward)) {
        return check.status();
    }
    check_mamba3_inputs_pointers(check, q.forward);
    check.pointer("dq_out", q.dq_out);
    check.pointer("dk_out", q.dk_out);
    check.pointer("ddt_out", q.ddt_out);
    check.pointer("dadt_out", q.dadt_out);
    check.pointer("dq", q.dq);
    check.pointer("dk", q.dk);
    check.pointer("ddt", q.ddt);
    check.pointer("da", q.da);
    check.pointer("dq_weight", q.dq_weight);
    check.pointer("dk_weight", q.dk_weight);
    check.pointer("ddt_bias", q.ddt_bias);
    check.pointer("workspace", q.workspace);
    return check.status();
}

}  // namespace mamba
