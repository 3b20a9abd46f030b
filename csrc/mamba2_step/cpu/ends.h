// The beginning and the end of a Mamba-2 layer's decode step, between which all is float: dt behind its bias, softplus and
// limits, A.
#pragma once

#include "common/cpu_widen.h"

namespace mamba {
namespace MAMBA_ISA {

inline void begin_step(const MambaMamba2Step& p, float* rows, float* A) {
    const int64_t before_dt = 2 * (p.nheads * p.headdim + p.ngroups * p.dstate), columns = before_dt + p.nheads;
    widen_rows(p.dtype, p.zxBCdt, p.zxBCdt_batch_stride, p.batch, columns, rows);
    for (int64_t head = 0; head < p.nheads; head += kLanes) {
        const int lanes = block_lanes(p.nheads - head);
        const Vec bias = load_lanes(p.dt_bias_dtype, p.dt_bias, head, 1, lanes);
        for (int64_t batch = 0; batch < p.batch; ++batch) {
            float* const dt = rows + batch * columns + before_dt + head;
            Vec slope;
            float values[kLanes];
            store(values, softplus(load_lanes(MAMBA_FLOAT32, dt, 0, 1, lanes) + bias, slope));
            for (int i = 0; i < lanes; ++i) {  // a NaN stays
                dt[i] = values[i] < p.dt_min ? p.dt_min : values[i] > p.dt_max ? p.dt_max : values[i];
            }
        }
        const Vec A_log = load_lanes(p.A_log_dtype, p.A_log, head, 1, lanes);
        store_lanes(MAMBA_FLOAT32, A, head, 1, lanes, zero() - exp2(A_log * set1(1.44269504f)));
    }
}

inline void end_step(const MambaMamba2Step& p, const float* rows) {
    narrow_rows(rows, p.batch, p.nheads * p.headdim, p.dtype, p.out, p.out_batch_stride);
}

}  // namespace MAMBA_ISA
}  // namespace mamba
