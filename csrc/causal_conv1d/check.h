// What both libraries refuse before a causal convolution.
#pragma once

#include "common/check.h"

namespace mamba {

constexpr int kConvMaxWidth = 4;

// Whether the (B, D, L) tensors hold anything. Params: MambaCausalConv1d or MambaCausalConv1dUpdate.
template <class Params>
bool conv_has_elements(const Params& p) {
    return p.batch > 0 && p.dim > 0 && p.seqlen > 0;
}

template <class Params>
void check_conv_operands(Check& check, const Params& p) {
    check.at_least(0, "batch", p.batch);
    check.at_least(0, "dim", p.dim);
    check.at_least(0, "seqlen", p.seqlen);
    check.range(2, kConvMaxWidth, "width", p.width);
    check.dtype("x", p.dtype);
    check.dtype("weight", p.weight_dtype);
    check.dtype("bias", p.bias_dtype, p.bias != nullptr);
    check.pointer("x", p.x, conv_has_elements(p));
    check.pointer("weight", p.weight, p.dim > 0);
}

inline void check_conv_inputs(Check& check, const MambaCausalConv1d& p) {
    check_conv_operands(check, p);
    check.that(p.seq_idx == nullptr || p.final_states == nullptr, MAMBA_ERROR_INVALID,
               "seq_idx cannot be given together with final_states");
}

inline int32_t check_conv_forward(const char* function, const MambaCausalConv1d* params) {
    Check check(function);
    check.pointer("params", params);
    if (check.ok()) {
        check_conv_inputs(check, *params);
        check.pointer("out", params->out, conv_has_elements(*params));
    }
    return check.status();
}

inline int32_t check_conv_backward(const char* function, const MambaCausalConv1dBackward* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaCausalConv1d& p = params->forward;
    check_conv_inputs(check, p);
    check.that(p.seq_idx == nullptr || params->dfinal_states == nullptr, MAMBA_ERROR_INVALID,
               "seq_idx cannot be given together with dfinal_states");
    check.pointer("dout", params->dout, conv_has_elements(p));
    check.pointer("dx", params->dx, conv_has_elements(p));
    check.pointer("dweight", params->dweight, p.dim > 0);
    check.pointer("dbias", params->dbias, p.dim > 0 && p.bias != nullptr);
    if (check.ok()) {
        const int64_t bytes = mamba_causal_conv1d_backward_workspace(&p);
        check.that((params->workspace != nullptr) == (bytes > 0), MAMBA_ERROR_INVALID, "workspace must %s NULL for %lld bytes",
                   bytes > 0 ? "not be" : "be", static_cast<long long>(bytes));
    }
    return check.status();
}

inline int32_t check_conv_update(const char* function, const MambaCausalConv1dUpdate* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaCausalConv1dUpdate& p = *params;
    check_conv_operands(check, p);
    check.dtype("conv_state", p.state_dtype);
    check.at_least(p.width - 1, "state_len", p.state_len);
    check.pointer("conv_state", p.conv_state, conv_has_elements(p));
    check.pointer("out", p.out, conv_has_elements(p));
    check.at_least(p.conv_state_indices == nullptr ? p.batch : 0, "state_rows", p.state_rows);
    return check.status();
}

}  // namespace mamba
