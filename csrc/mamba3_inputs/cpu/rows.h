// From a Mamba-3 layer's projection to what its scan takes and back, row by row.
#pragma once

#include <math.h>

#include "common/cpu_sums.h"
#include "mamba3_inputs/cpu/kernels.h"

namespace mamba {
namespace MAMBA_ISA {

// Of q or of k.
struct InputsMatrix {
    const void *from, *weight;
    int32_t weight_dtype;
    float eps;
};

inline InputsMatrix inputs_matrix(const MambaMamba3Inputs& p, bool of_k) {
    return of_k ? InputsMatrix{p.k, p.k_weight, p.k_weight_dtype, p.k_eps}
                : InputsMatrix{p.q, p.q_weight, p.q_weight_dtype, p.q_eps};
}

// `count` elements as floats, zero up to a whole vector; returns the sum of their squares.
inline float load_inputs(int32_t dtype, const void* data, int64_t offset, int64_t count, float* values) {
    Vec squares = zero();
    for (int64_t i = 0; i < count; i += kLanes) {
        const Vec value = load_lanes(dtype, data, offset + i, 1, block_lanes(count - i));
        store(values + i, value);
        squares = fma(value, value, squares);
    }
    return sum(squares);
}

inline float rstd_of_row(float squares, int64_t count, float eps) {
    return 1.0f / ::sqrtf(squares / static_cast<float>(count) + eps);
}

// -A of a step; slope gets its derivative.
inline Vec inputs_rate(const MambaMamba3Inputs& p, Vec a, Vec& slope) {
    const Vec one = set1(1.0f), floor = set1(p.A_floor);
    Vec rate;
    if (p.A_softplus != 0) {
        rate = softplus(a, slope);
    } else {
        const Vec tail = one / (one - a);
        rate = select_greater(zero(), a, tail, one + a);  // a NaN stays
        slope = select_greater(zero(), a, tail * tail, one);
    }
    slope = select_greater(floor, rate, zero(), slope);
    return select_greater(floor, rate, floor, rate);
}

inline void mamba3_inputs_forward(const MambaMamba3Inputs& p, int64_t begin, int64_t end) {
    float values[MAMBA_MAX_DSTATE], weight[MAMBA_MAX_DSTATE];
    for (int of_k = 0; of_k < 2; ++of_k) {
        const InputsMatrix matrix = inputs_matrix(p, of_k != 0);
        load_inputs(matrix.weight_dtype, matrix.weight, 0, p.dstate, weight);
        for (int64_t i = begin * p.matrices; i < end * p.matrices; ++i) {
            const int64_t at = i / p.matrices * p.row_stride + i % p.matrices * p.dstate;
            const Vec rstd = set1(rstd_of_row(load_inputs(p.dtype, matrix.from, at, p.dstate, values), p.dstate, matrix.eps));
            for (int64_t j = 0; j < p.dstate; j += kLanes) {
                store_lanes(p.dtype, of_k != 0 ? p.k_out : p.q_out, i * p.dstate + j, 1, block_lanes(p.dstate - j),
                            load(values + j) * (rstd * load(weight + j)));
            }
        }
    }
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t head = 0; head < p.nheads; head += kLanes) {
            const int lanes = block_lanes(p.nheads - head);
            const int64_t at = row * p.row_stride + head, to = row * p.nheads + head;
            Vec slope;
            const Vec bias = load_lanes(MAMBA_FLOAT32, p.dt_bias, head, 1, lanes);
            const Vec dt = softplus(load_lanes(p.dtype, p.dt, at, 1, lanes) + bias, slope);
            store_lanes(MAMBA_FLOAT32, p.dt_out, to, 1, lanes, dt);
            const Vec rate = inputs_rate(p, load_lanes(p.dtype, p.a, at, 1, lanes), slope);
            store_lanes(MAMBA_FLOAT32, p.adt_out, to, 1, lanes, zero() - rate * dt);
        }
    }
}

// Adds to floats in memory.
inline void add_lanes(float* sums, int lanes, Vec value) {
    store_lanes(MAMBA_FLOAT32, sums, 0, 1, lanes, load_lanes(MAMBA_FLOAT32, sums, 0, 1, lanes) + value);
}

inline void mamba3_inputs_backward(const MambaMamba3InputsBackward& q, int64_t begin, int64_t end, float* sums) {
    const MambaMamba3Inputs& p = q.forward;
    float values[MAMBA_MAX_DSTATE], weight[MAMBA_MAX_DSTATE], gradient[MAMBA_MAX_DSTATE];
    fill_zero(sums, mamba3_inputs_sums(p));
    for (int of_k = 0; of_k < 2; ++of_k) {
        const InputsMatrix matrix = inputs_matrix(p, of_k != 0);
        float* dweight = sums + of_k * p.dstate;
        load_inputs(matrix.weight_dtype, matrix.weight, 0, p.dstate, weight);
        for (int64_t i = begin * p.matrices; i < end * p.matrices; ++i) {
            const int64_t row = i / p.matrices, column = i % p.matrices * p.dstate;
            const float squares = load_inputs(p.dtype, matrix.from, row * p.row_stride + column, p.dstate, values);
            const Vec rstd = set1(rstd_of_row(squares, p.dstate, matrix.eps));
            load_inputs(p.dtype, of_k != 0 ? q.dk_out : q.dq_out, i * p.dstate, p.dstate, gradient);
            Vec along = zero();
            for (int64_t j = 0; j < p.dstate; j += kLanes) {
                const Vec value = load(values + j) * rstd, given = load(gradient + j), weighted = given * load(weight + j);
                add_lanes(dweight + j, block_lanes(p.dstate - j), given * value);
                along = fma(weighted, value, along);
                store(values + j, value);
                store(gradient + j, weighted);
            }
            const Vec mean = set1(sum(along) / static_cast<float>(p.dstate));
            for (int64_t j = 0; j < p.dstate; j += kLanes) {
                store_lanes(p.dtype, of_k != 0 ? q.dk : q.dq, row * q.drow_stride + column + j, 1, block_lanes(p.dstate - j),
                            (load(gradient + j) - mean * load(values + j)) * rstd);
            }
        }
    }
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t head = 0; head < p.nheads; head += kLanes) {
            const int lanes = block_lanes(p.nheads - head);
            const int64_t at = row * p.row_stride + head, own = row * p.nheads + head, to = row * q.drow_stride + head;
            Vec slope, rate_slope;
            const Vec bias = load_lanes(MAMBA_FLOAT32, p.dt_bias, head, 1, lanes);
            const Vec dt = softplus(load_lanes(p.dtype, p.dt, at, 1, lanes) + bias, slope);
            const Vec rate = inputs_rate(p, load_lanes(p.dtype, p.a, at, 1, lanes), rate_slope);
            const Vec dadt = load_lanes(MAMBA_FLOAT32, q.dadt_out, own, 1, lanes);
            const Vec ddt = (load_lanes(MAMBA_FLOAT32, q.ddt_out, own, 1, lanes) - rate * dadt) * slope;
            store_lanes(p.dtype, q.ddt, to, 1, lanes, ddt);
            store_lanes(p.dtype, q.da, to, 1, lanes, zero() - dt * dadt * rate_slope);
            add_lanes(sums + 2 * p.dstate + head, lanes, ddt);
        }
    }
}

// The sums lie part by part, each with all three gradients.
inline void mamba3_inputs_add_parts(const MambaMamba3InputsBackward& q, int64_t parts) {
    const MambaMamba3Inputs& p = q.forward;
    float* sums = static_cast<float*>(q.workspace);
    const int64_t size = mamba3_inputs_sums(p);
    for (int64_t i = 0; i < size; i += kLanes) {
        const int lanes = block_lanes(size - i);
        for (int64_t part = 1; part < parts; ++part) {
            add_lanes(sums + i, lanes, load_lanes(MAMBA_FLOAT32, sums + part * size, i, 1, lanes));
        }
    }
    add_parts(part_sum(sums, 1, q.dq_weight, p.q_weight_dtype, p.dstate));
    add_parts(part_sum(sums + p.dstate, 1, q.dk_weight, p.k_weight_dtype, p.dstate));
    add_parts(part_sum(sums + 2 * p.dstate, 1, q.ddt_bias, MAMBA_FLOAT32, p.nheads));
}

}  // namespace MAMBA_ISA
}  // namespace mamba
