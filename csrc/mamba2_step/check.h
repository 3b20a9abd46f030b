// What both libraries refuse before a decode step of a Mamba-2 layer.
#pragma once

#include "causal_conv1d/check.h"

namespace mamba {

inline bool mamba2_step_is_empty(const MambaMamba2Step& p) {
    return p.batch == 0 || p.nheads == 0;
}

inline int32_t check_mamba2_step(const char* function, const MambaMamba2Step* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaMamba2Step& p = *params;
    check.at_least(0, "batch", p.batch);
    check.at_least(0, "nheads", p.nheads);
    check.range(1, MAMBA_MAX_HEADDIM, "headdim", p.headdim);
    check.range(1, MAMBA_MAX_DSTATE, "dstate", p.dstate);
    check.divides("ngroups", p.ngroups, "nheads", p.nheads);
    check.range(2, kConvMaxWidth, "width", p.width);
    check.at_least(p.width - 1, "state_len", p.state_len);
    check.dtype("zxBCdt", p.dtype);
    check.dtype("conv_state", p.conv_state_dtype);
    check.dtype("conv_weight", p.conv_weight_dtype);
    check.dtype("conv_bias", p.conv_bias_dtype, p.conv_bias != nullptr);
    check.dtype("state", p.state_dtype);
    check.dtype("dt_bias", p.dt_bias_dtype);
    check.dtype("A_log", p.A_log_dtype);
    check.dtype("D", p.D_dtype);
    check.dtype("norm_weight", p.norm_weight_dtype, p.norm_weight != nullptr);
    if (!check.ok() || mamba2_step_is_empty(p)) {
        return check.status();
    }
    check.pointer("zxBCdt", p.zxBCdt);
    check.pointer("conv_state", p.conv_state);
    check.pointer("conv_weight", p.conv_weight);
    check.pointer("state", p.state);
    check.pointer("dt_bias", p.dt_bias);
    check.pointer("A_log", p.A_log);
    check.pointer("D", p.D);
    check.pointer("out", p.out);
    return check.status();
}

}  // namespace mamba
