// What both libraries refuse before a scan starts. Python has checked shapes and dtypes already; this guards the C ABI.
#pragma once

#include "common/error.h"

namespace mamba {

inline int32_t check_selective_scan_inputs(const MambaSelectiveScan& p) {
    if (p.batch < 0 || p.dim < 0 || p.seqlen < 0) {
        return fail(MAMBA_ERROR_INVALID, "selective_scan: negative size: batch=%lld dim=%lld seqlen=%lld",
                    static_cast<long long>(p.batch), static_cast<long long>(p.dim), static_cast<long long>(p.seqlen));
    }
    if (p.dstate < 1 || p.dstate > MAMBA_MAX_DSTATE) {
        return fail(MAMBA_ERROR_UNSUPPORTED, "selective_scan: dstate must be 1..%d, got %lld", MAMBA_MAX_DSTATE,
                    static_cast<long long>(p.dstate));
    }
    if (p.ngroups < 1 || p.dim % p.ngroups != 0) {
        return fail(MAMBA_ERROR_INVALID, "selective_scan: ngroups must divide dim, got ngroups=%lld dim=%lld",
                    static_cast<long long>(p.ngroups), static_cast<long long>(p.dim));
    }
    const int32_t status = check_dtype("selective_scan: u", p.dtype);
    if (status != MAMBA_OK) {
        return status;
    }
    if (p.batch * p.ngroups * ((p.dim / p.ngroups + 7) / 8) * (p.segments > 1 ? p.segments : 1) > 2147483647) {
        return fail(MAMBA_ERROR_UNSUPPORTED, "selective_scan: batch * dim is too large: batch=%lld dim=%lld ngroups=%lld",
                    static_cast<long long>(p.batch), static_cast<long long>(p.dim), static_cast<long long>(p.ngroups));
    }
    if (p.batch == 0 || p.dim == 0) {
        return MAMBA_OK;
    }
    if (p.segments < 1 || (p.segments > 1 && p.workspace == nullptr)) {
        return fail(MAMBA_ERROR_INVALID,
                    "selective_scan: segments must be at least 1, and above 1 workspace not NULL; got %lld",
                    static_cast<long long>(p.segments));
    }
    const int64_t tiles = (p.seqlen + MAMBA_SCAN_CHECKPOINT - 1) / MAMBA_SCAN_CHECKPOINT;
    if (p.segments > 1 && (p.segments - 1) * ((tiles + p.segments - 1) / p.segments) >= tiles) {
        return fail(MAMBA_ERROR_INVALID, "selective_scan: segments=%lld would leave a segment of seqlen=%lld empty",
                    static_cast<long long>(p.segments), static_cast<long long>(p.seqlen));
    }
    const bool rows = p.u != nullptr && p.delta != nullptr;
    const bool matrices =
        (p.B != nullptr || (p.variable_B && p.seqlen == 0)) && (p.C != nullptr || (p.variable_C && p.seqlen == 0));
    if (p.A == nullptr || !matrices || (!rows && p.seqlen > 0)) {
        return fail(MAMBA_ERROR_INVALID, "selective_scan: u, delta, A, B and C must not be NULL");
    }
    return MAMBA_OK;
}

inline int32_t check_selective_scan(const MambaSelectiveScan* params) {
    if (params == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "selective_scan: params is NULL");
    }
    const int32_t status = check_selective_scan_inputs(*params);
    if (status == MAMBA_OK && params->out == nullptr && params->batch * params->dim * params->seqlen > 0) {
        return fail(MAMBA_ERROR_INVALID, "selective_scan: out must not be NULL");
    }
    return status;
}

inline int32_t check_selective_scan_backward(const MambaSelectiveScanBackward* params) {
    if (params == nullptr) {
        return fail(MAMBA_ERROR_INVALID, "selective_scan_backward: params is NULL");
    }
    const MambaSelectiveScan& p = params->forward;
    const int32_t status = check_selective_scan_inputs(p);
    if (status != MAMBA_OK || p.batch == 0 || p.dim == 0) {
        return status;
    }
    if (params->slots < 1) {
        return fail(MAMBA_ERROR_INVALID, "selective_scan_backward: slots must be at least 1, got %lld",
                    static_cast<long long>(params->slots));
    }
    if (p.seqlen > 0) {
        if (params->dout == nullptr || params->du == nullptr || params->ddelta == nullptr ||
            (p.z != nullptr && params->dz == nullptr)) {
            return fail(MAMBA_ERROR_INVALID, "selective_scan_backward: dout, du, ddelta and, with z, dz must not be NULL");
        }
        if (p.seqlen > MAMBA_SCAN_CHECKPOINT && p.checkpoints == nullptr) {
            return fail(MAMBA_ERROR_INVALID, "selective_scan_backward: checkpoints must not be NULL for seqlen=%lld > %d",
                        static_cast<long long>(p.seqlen), MAMBA_SCAN_CHECKPOINT);
        }
    }
    const bool sums = (params->dB != nullptr || (p.variable_B && p.seqlen == 0)) &&
                      (params->dC != nullptr || (p.variable_C && p.seqlen == 0));
    if (params->dA == nullptr || !sums || (p.D != nullptr && params->dD == nullptr) ||
        (p.delta_bias != nullptr && params->ddelta_bias == nullptr)) {
        return fail(MAMBA_ERROR_INVALID,
                    "selective_scan_backward: dA, dB, dC and, with D and delta_bias, dD and ddelta_bias "
                    "must not be NULL");
    }
    return MAMBA_OK;
}

}  // namespace mamba
