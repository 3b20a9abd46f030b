// Which gradients of the backward scan are summed from parts, and where those lie.
#pragma once

#include "common/integers.h"
#include "common/part_sums.h"
#include "mamba_kernels.h"

namespace mamba {

// Where the kernels write dA, dD, ddelta_bias and dB, dC of constants: (P, ...), one part for each segment of each batch entry;
// and dB, dC of variable B, C: (slots, B, G, N, L). Null for those of absent inputs.
struct ScanParts {
    float *dA, *dB, *dC, *dD, *ddelta_bias;
};

// What backward's kernels get.
struct ScanBackward : MambaSelectiveScanBackward {
    ScanParts parts;
};

// Lays the parts out in `workspace`, behind what segments pass on; a single float32 part is the gradient itself. Returns how
// many floats that takes; gradients and workspace may be null to ask for this alone.
static inline int64_t lay_out_scan_parts(const MambaSelectiveScanBackward& q, int64_t segments, int64_t slots,
                                         ScanParts* parts) {
    const MambaSelectiveScan& p = q.forward;
    const int64_t states = p.dim * p.dstate, count = p.batch * segments;
    const int64_t matrix = p.batch * p.ngroups * p.dstate * p.seqlen;
    int64_t used = 0;
    const auto take = [&](int64_t floats) {
        float* const at = p.workspace != nullptr ? p.workspace + used : nullptr;
        used += round_up(floats, 64);
        return at;
    };
    const auto parameter = [&](bool present, float* gradient, int64_t size) {
        return !present || count == 1 ? gradient : take(count * size);
    };
    const auto of_matrix = [&](bool variable, void* gradient) {
        float* const one = static_cast<float*>(gradient);
        if (variable) {
            return count == 1 && slots == 1 && p.dtype == MAMBA_FLOAT32 ? one : take(slots * matrix);
        }
        return parameter(true, one, states);
    };
    if (segments > 1) {
        take(segments * 2 * p.batch * states);
    }
    parts->dB = of_matrix(p.variable_B, q.dB);
    parts->dC = of_matrix(p.variable_C, q.dC);
    parts->dA = parameter(true, q.dA, states);
    parts->dD = parameter(p.D != nullptr, q.dD, p.dim);
    parts->ddelta_bias = parameter(p.delta_bias != nullptr, q.ddelta_bias, p.dim);
    return used;
}

static inline int64_t scan_workspace_bytes(const MambaSelectiveScan& p, int64_t segments, int64_t slots) {
    MambaSelectiveScanBackward q = {};
    q.forward = p;
    ScanParts parts;
    return lay_out_scan_parts(q, segments, slots, &parts) * static_cast<int64_t>(sizeof(float));
}

static inline ScanBackward scan_backward(const MambaSelectiveScanBackward& params) {
    ScanBackward q;
    static_cast<MambaSelectiveScanBackward&>(q) = params;
    lay_out_scan_parts(params, params.forward.segments, params.slots, &q.parts);
    return q;
}

// What remains to be added up.
static inline PartSums scan_part_sums(const ScanBackward& q) {
    const MambaSelectiveScan& p = q.forward;
    const int64_t states = p.dim * p.dstate, count = p.batch * p.segments;
    PartSums sums = {};
    const auto add = [&](const float* parts, float* gradient, int64_t size) {
        if (parts != gradient) {
            sums.add(part_sum(parts, count, gradient, MAMBA_FLOAT32, size));
        }
    };
    const auto add_matrix = [&](bool variable, const float* parts, void* gradient, int64_t batch_stride, int64_t group_stride,
                                int64_t dstate_stride) {
        if (!variable) {
            add(parts, static_cast<float*>(gradient), states);
        } else if (parts != gradient) {
            sums.add({parts, q.slots, gradient, p.dtype, p.seqlen, p.ngroups, p.dstate, p.batch * p.ngroups * p.dstate,
                      batch_stride, group_stride, dstate_stride});
        }
    };
    add_matrix(p.variable_B, q.parts.dB, q.dB, q.dB_batch_stride, q.dB_group_stride, q.dB_dstate_stride);
    add_matrix(p.variable_C, q.parts.dC, q.dC, q.dC_batch_stride, q.dC_group_stride, q.dC_dstate_stride);
    add(q.parts.dA, q.dA, states);
    add(q.parts.dD, q.dD, p.dim);
    add(q.parts.ddelta_bias, q.ddelta_bias, p.dim);
    return sums;
}

}  // namespace mamba
