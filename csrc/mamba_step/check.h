// What both libraries refuse before a decode step of a Mamba layer.
#pragma once

#include "causal_conv1d/check.h"

namespace mamba {

inline bool mamba_step_is_empty(const MambaMambaStep& p) {
    return p.batch == 0 || p.dim == 0;
}

inline int32_t check_mamba_step(const char* function, const MambaMambaStep* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaMambaStep& p = *params;
    check.at_least(0, "batch", p.batch);
    check.at_least(0, "dim", p.dim);
    check.range(1, MAMBA_MAX_DT_RANK, "dt_rank", p.dt_rank);
    check.range(1, MAMBA_MAX_DSTATE, "dstate", p.dstate);
    check.range(2, kConvMaxWidth, "width", p.width);
    check.at_least(p.width - 1, "state_len", p.state_len);
    check.dtype("xz", p.dtype);
    check.dtype("conv_state", p.conv_state_dtype);
    check.dtype("conv_weight", p.conv_weight_dtype);
    check.dtype("conv_bias", p.conv_bias_dtype, p.conv_bias != nullptr);
    check.dtype("state", p.state_dtype);
    check.dtype("dt_bias", p.dt_bias_dtype, p.dt_bias != nullptr);
    check.dtype("A_log", p.A_log_dtype);
    check.dtype("D", p.D_dtype);
    if (!check.ok() || mamba_step_is_empty(p)) {
        return check.status();
    }
    check.pointer("xz", p.xz);
    check.pointer("conv_state", p.conv_state);
    check.pointer("conv_weight", p.conv_weight);
    check.pointer("x_proj_weight", p.x_proj_weight);
    check.pointer("dt_proj_weight", p.dt_proj_weight);
    check.pointer("state", p.state);
    check.pointer("A_log", p.A_log);
    check.pointer("D", p.D);
    check.pointer("out", p.out);
    check.pointer("workspace", p.workspace, mamba_mamba_step_workspace(params) > 0);
    return check.status();
}

}  // namespace mamba
