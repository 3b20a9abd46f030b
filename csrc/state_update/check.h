// What both libraries refuse before a decode step.
#pragma once

#include "common/check.h"

namespace mamba {

inline bool state_update_is_empty(const MambaSelectiveStateUpdate& p) {
    return p.batch == 0 || p.nheads == 0 || p.headdim == 0;
}

inline int32_t check_state_update(const char* function, const MambaSelectiveStateUpdate* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaSelectiveStateUpdate& p = *params;
    check.at_least(0, "batch", p.batch);
    check.at_least(1, "seqlen", p.seqlen);
    check.at_least(0, "nheads", p.nheads);
    check.at_least(0, "headdim", p.headdim);
    check.range(1, MAMBA_MAX_DSTATE, "dstate", p.dstate);
    check.divides("ngroups", p.ngroups, "nheads", p.nheads);
    check.dtype("state", p.state_dtype);
    check.dtype("x", p.x_dtype);
    check.dtype("dt", p.dt_dtype);
    check.dtype("A", p.A_dtype);
    check.dtype("B and C", p.BC_dtype);
    check.dtype("D", p.D_dtype, p.D != nullptr);
    check.dtype("dt_bias", p.dt_bias_dtype, p.dt_bias != nullptr);
    if (!check.ok() || state_update_is_empty(p)) {
        return check.status();
    }
    check.pointer("state", p.state);
    check.pointer("x", p.x);
    check.pointer("dt", p.dt);
    check.pointer("A", p.A);
    check.pointer("B", p.B);
    check.pointer("C", p.C);
    check.pointer("out", p.out);
    check.at_least(p.state_batch_indices == nullptr ? p.batch : 0, "state_rows", p.state_rows);
    return check.status();
}

}  // namespace mamba
