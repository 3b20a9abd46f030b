// The beginning and the end of a Mamba layer's decode step, between which all is float.
#pragma once

#include "common/cpu_widen.h"

namespace mamba {
namespace MAMBA_ISA {

inline void begin_step(const MambaMambaStep& p, float* rows, float* A) {
    widen_rows(p.dtype, p.xz, p.xz_batch_stride, p.batch, 2 * p.dim, rows);
    const int64_t count = p.dim * p.dstate;
    for (int64_t i = 0; i < count; i += kLanes) {
        const int lanes = block_lanes(count - i);
        const Vec value = exp2(load_lanes(p.A_log_dtype, p.A_log, i, 1, lanes) * set1(1.44269504f));
        store_lanes(MAMBA_FLOAT32, A, i, 1, lanes, zero() - value);
    }
}

inline void end_step(const MambaMambaStep& p, const float* rows) {
    narrow_rows(rows, p.batch, p.dim, p.dtype, p.out, p.out_batch_stride);
}

}  // namespace MAMBA_ISA
}  // namespace mamba
