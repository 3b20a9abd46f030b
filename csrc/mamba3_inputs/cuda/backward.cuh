// Back from what Mamba-3's scan takes to the projection: the norms' and rates' gradients, and a block's parts of those of
// weights and dt_bias.
#pragma once

#include "mamba3_inputs/cuda/rows.cuh"

namespace mamba {

// A block takes some rows: of q, of k, or of the heads. A warp has a row of q or k at a time; its lanes are neighbouring heads.
template <typename T>
__global__ void __launch_bounds__(kMamba3InputsThreads)
    mamba3_inputs_backward_kernel(const MambaMamba3InputsBackward q, const Mamba3InputsWorkspace workspace, bool vectors) {
    __shared__ float sums[kMamba3InputsWarps][MAMBA_MAX_DSTATE];
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const MambaMamba3Inputs& p = q.forward;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kMamba3InputsBackwardRows;
    const int rows = p.rows - first < kMamba3InputsBackwardRows ? static_cast<int>(p.rows - first) : kMamba3InputsBackwardRows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int matrices = static_cast<int>(p.matrices), dstate = static_cast<int>(p.dstate);
    float* const parts = static_cast<float*>(q.workspace);
    const int of_k = static_cast<int>(blockIdx.y);
    if (of_k < 2) {
        const Mamba3InputsMatrix matrix(p, of_k != 0);
        const T* const from = static_cast<const T*>(matrix.from) + first * p.row_stride;
        const T* const given = static_cast<const T*>(of_k != 0 ? q.dk_out : q.dq_out) + first * matrices * dstate;
        T* const to = static_cast<T*>(of_k != 0 ? q.dk : q.dq) + first * q.drow_stride;
        float weight[kMamba3InputsEach], dweight[kMamba3InputsEach];
        load_weight(matrix.weight, matrix.weight_dtype, dstate, lane, weight);
#pragma unroll
        for (int j = 0; j < kMamba3InputsEach; ++j) {
            dweight[j] = 0.0f;
        }
        for (int i = warp; i < rows * matrices; i += kMamba3InputsWarps) {
            const int row = i / matrices, column = (i - row * matrices) * dstate;
            float values[kMamba3InputsEach], gradient[kMamba3InputsEach];
            load_columns(from + row * p.row_stride + column, dstate, lane, vectors, values);
            load_columns(given + i * dstate, dstate, lane, vectors, gradient);
            const float rstd = rstd_of_row(values, dstate, matrix.eps);
            float along = 0.0f;
#pragma unroll
            for (int j = 0; j < kMamba3InputsEach; ++j) {
                values[j] *= rstd;
                dweight[j] = fmaf(gradient[j], values[j], dweight[j]);
                gradient[j] *= weight[j];
                along = fmaf(gradient[j], values[j], along);
            }
            along = sum_over_warp(along) / static_cast<float>(dstate);
#pragma unroll
            for (int j = 0; j < kMamba3InputsEach; ++j) {
                gradient[j] = rstd * fmaf(-along, values[j], gradient[j]);
            }
            store_columns(to + row * q.drow_stride + column, dstate, lane, vectors, gradient);
        }
        of_columns(dstate, lane, [&](int column, int place) {
#pragma unroll
            for (int j = 0; j < kMamba3InputsWide; ++j) {
                sums[warp][column + j] = dweight[place + j];
            }
        });
        __syncthreads();
        float* const part = parts + (of_k != 0 ? workspace.k_weight : workspace.q_weight) + blockIdx.x * p.dstate;
        for (int column = threadIdx.x; column < dstate; column += kMamba3InputsThreads) {
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < kMamba3InputsWarps; ++other) {
                sum += sums[other][column];
            }
            part[column] = sum;
        }
        return;
    }
    constexpr int kEach = kMamba3InputsBackwardRows / kMamba3InputsWarps;  // rows of a warp
    const int heads = static_cast<int>(p.nheads);
    for (int begin = 0; begin < heads; begin += MAMBA_MAX_DSTATE) {
        const int end = heads - begin < MAMBA_MAX_DSTATE ? heads : begin + MAMBA_MAX_DSTATE;
        for (int head = begin + lane; head < end; head += 32) {
            const float bias = p.dt_bias[head];
            float sum = 0.0f;
            // all loads first: the compiler cannot tell that what is stored is none of them
            float in[kEach], a[kEach], ddt[kEach], dadt[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int64_t row = first + warp + i * kMamba3InputsWarps;
                const bool counts = warp + i * kMamba3InputsWarps < rows;
                in[i] = bias + (counts ? to_float(static_cast<const T*>(p.dt)[row * p.row_stride + head]) : 0.0f);
                a[i] = counts ? to_float(static_cast<const T*>(p.a)[row * p.row_stride + head]) : 0.0f;
                ddt[i] = counts ? q.ddt_out[row * heads + head] : 0.0f;
                dadt[i] = counts ? q.dadt_out[row * heads + head] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                if (warp + i * kMamba3InputsWarps < rows) {
                    const int64_t to = (first + warp + i * kMamba3InputsWarps) * q.drow_stride + head;
                    const Mamba3Rate rate(p, a[i]);
                    const float own = fmaf(-rate.value, dadt[i], ddt[i]) * sigmoid(in[i]);
                    static_cast<T*>(q.ddt)[to] = from_float<T>(own);
                    static_cast<T*>(q.da)[to] = from_float<T>(-softplus(in[i]) * dadt[i] * rate.slope);
                    sum += own;
                }
            }
            sums[warp][head - begin] = sum;
        }
        __syncthreads();
        for (int head = begin + static_cast<int>(threadIdx.x); head < end; head += kMamba3InputsThreads) {
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < kMamba3InputsWarps; ++other) {
                sum += sums[other][head - begin];
            }
            parts[workspace.dt_bias + blockIdx.x * p.nheads + head] = sum;
        }
        __syncthreads();
    }
}

}  // namespace mamba
