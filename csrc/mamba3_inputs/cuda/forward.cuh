// From a Mamba-3 layer's projection to what its scan takes. A warp takes a row: its heads, and its rows of q and k one of each
// at a time, whose loads are on their way together.
#pragma once

#include "mamba3_inputs/cuda/rows.cuh"

namespace mamba {

template <typename T>
__global__ void __launch_bounds__(kMamba3InputsThreads) mamba3_inputs_kernel(const MambaMamba3Inputs p, bool vectors) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int lane = threadIdx.x % 32;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kMamba3InputsWarps + threadIdx.x / 32;
    if (row >= p.rows) {
        return;
    }
    const int matrices = static_cast<int>(p.matrices), dstate = static_cast<int>(p.dstate), heads = static_cast<int>(p.nheads);
    const int64_t to = row * matrices * dstate, from = row * p.row_stride;
#pragma unroll 1
    for (int matrix = 0; matrix < matrices; ++matrix) {
        float values[2][kMamba3InputsEach];
#pragma unroll
        for (int of_k = 0; of_k < 2; ++of_k) {
            const T* const rows = static_cast<const T*>(of_k != 0 ? p.k : p.q);
            load_columns(rows + from + matrix * dstate, dstate, lane, vectors, values[of_k]);
        }
#pragma unroll
        for (int of_k = 0; of_k < 2; ++of_k) {
            const Mamba3InputsMatrix side(p, of_k != 0);
            const float rstd = rstd_of_row(values[of_k], dstate, side.eps);
            float weight[kMamba3InputsEach];
            load_weight(side.weight, side.weight_dtype, dstate, lane, weight);
#pragma unroll
            for (int j = 0; j < kMamba3InputsEach; ++j) {
                values[of_k][j] *= rstd * weight[j];
            }
            T* const rows = static_cast<T*>(of_k != 0 ? p.k_out : p.q_out);
            store_columns(rows + to + matrix * dstate, dstate, lane, vectors, values[of_k]);
        }
    }
    constexpr int kHeads = 4;  // of a lane, at a time
    for (int begin = lane; begin < heads; begin += 32 * kHeads) {
        float dt[kHeads], a[kHeads];
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            const int head = begin + 32 * i;
            dt[i] = head < heads ? to_float(static_cast<const T*>(p.dt)[from + head]) : 0.0f;
            a[i] = head < heads ? to_float(static_cast<const T*>(p.a)[from + head]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kHeads; ++i) {
            const int head = begin + 32 * i;
            if (head < heads) {
                const float step = softplus(dt[i] + p.dt_bias[head]);
                p.dt_out[row * heads + head] = step;
                p.adt_out[row * heads + head] = -Mamba3Rate(p, a[i]).value * step;
            }
        }
    }
}

}  // namespace mamba
