// Who adds up dweight and dbias in backward: the kernels themselves, or several slots of them, each of which leaves a part.
#pragma once

#include "common/part_sums.h"
#include "mamba_kernels.h"

namespace mamba {

// What backward's kernels get: the call, and where their sums go.
struct ConvBackward : MambaCausalConv1dBackward {
    int64_t slots;
    void* weight_sums;  // (slots, D, W): dweight itself where there is one slot, else float32 parts
    void* bias_sums;    // (slots, D), the same
    int32_t weight_sums_dtype, bias_sums_dtype;
};

static inline int64_t conv_workspace_bytes(const MambaCausalConv1d& p, int64_t slots) {
    const int64_t values = p.dim * (p.width + (p.bias != nullptr ? 1 : 0));
    return slots == 1 ? 0 : slots * values * static_cast<int64_t>(sizeof(float));
}

static inline ConvBackward conv_backward(const MambaCausalConv1dBackward& params, int64_t slots) {
    const MambaCausalConv1d& p = params.forward;
    ConvBackward q;
    static_cast<MambaCausalConv1dBackward&>(q) = params;
    q.slots = slots;
    q.weight_sums = params.dweight;
    q.bias_sums = params.dbias;
    q.weight_sums_dtype = p.weight_dtype;
    q.bias_sums_dtype = p.bias_dtype;
    if (slots > 1) {
        float* const parts = static_cast<float*>(params.workspace);
        q.weight_sums = parts;
        q.bias_sums = params.dbias != nullptr ? parts + slots * p.dim * p.width : nullptr;
        q.weight_sums_dtype = q.bias_sums_dtype = MAMBA_FLOAT32;
    }
    return q;
}

// What remains to be added up.
static inline PartSums conv_part_sums(const ConvBackward& q) {
    const MambaCausalConv1d& p = q.forward;
    PartSums sums = {};
    if (q.slots > 1) {
        const float* const weight_parts = static_cast<const float*>(q.weight_sums);
        const float* const bias_parts = static_cast<const float*>(q.bias_sums);
        sums.add(part_sum(weight_parts, q.slots, q.dweight, p.weight_dtype, p.dim * p.width));
        sums.add(part_sum(bias_parts, q.slots, q.dbias, p.bias_dtype, p.dim));
    }
    return sums;
}

}  // namespace mamba
