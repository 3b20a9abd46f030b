// The norm's forward on the CPU.
#pragma once

#include <math.h>

#include "norm/cpu/row.h"

namespace mamba {
namespace MAMBA_ISA {

template <typename T, typename Other>
inline void norm_group(const MambaNorm& p, int64_t row, int64_t group, const float* weights, const float* biases, float* s) {
    const int64_t size = p.group_size, column = group * size;
    const T* x = row_at<const T>(p.x, row, p.x_row_stride, column);
    const Other* residual = row_at<const Other>(p.residual, row, p.residual_row_stride, column);
    const Other* z = row_at<const Other>(p.z, row, p.z_row_stride, column);
    T* out = row_at<T>(p.out, row, p.out_row_stride, column);
    Other* residual_out = row_at<Other>(p.residual_out, row, p.residual_out_row_stride, column);
    const bool gate_first = z != nullptr && !p.norm_before_gate, gate_last = z != nullptr && p.norm_before_gate;
    const float count = static_cast<float>(size);

    Vec totals = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        Vec value = load_row(x, i, size);
        if (residual != nullptr) {
            value = round_to<Other>(value + load_row(residual, i, size));
        } else if (gate_first) {
            value = value * silu(load_row(z, i, size));
        }
        if (residual_out != nullptr) {
            store_row(residual_out, i, size, value);
        }
        store(s + i, value);
        totals = p.is_rms_norm ? fma(value, value, totals) : totals + value;
    }
    float total = sum(totals), mean = 0.0f;
    if (!p.is_rms_norm) {
        mean = total / count;
        totals = zero();
        for (int64_t i = 0; i < size; i += kLanes) {
            const Vec distance = keep_row(load(s + i) - set1(mean), i, size);
            totals = fma(distance, distance, totals);
        }
        total = sum(totals);
    }
    const float rstd = 1.0f / sqrtf(total / count + p.eps);
    if (p.mean != nullptr) {
        p.mean[row * p.ngroups + group] = mean;
    }
    if (p.rstd != nullptr) {
        p.rstd[row * p.ngroups + group] = rstd;
    }
    for (int64_t i = 0; i < size; i += kLanes) {
        Vec value = (load(s + i) - set1(mean)) * set1(rstd);
        value = fma(value, load(weights + column + i), load(biases + column + i));
        if (gate_last) {
            value = value * silu(load_row(z, i, size));
        }
        store_row(out, i, size, value);
    }
}

template <typename T, typename Other>
void norm_forward_rows(const MambaNorm& p, int64_t begin, int64_t end, float* scratch) {
    const int64_t pitch = norm_pitch(p.ngroups * p.group_size);
    float *weights = scratch, *biases = weights + pitch, *s = biases + pitch;
    load_parameters(p, weights, biases);
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t group = 0; group < p.ngroups; ++group) {
            norm_group<T, Other>(p, row, group, weights, biases, s);
        }
    }
}

inline void norm_forward(const MambaNorm& p, int64_t begin, int64_t end, float* scratch) {
    with_type(p.dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
        using T = typename decltype(type)::type;
        if (p.other_dtype == MAMBA_FLOAT32) {
            norm_forward_rows<T, float>(p, begin, end, scratch);
        } else {
            norm_forward_rows<T, T>(p, begin, end, scratch);
        }
    });
}

}  // namespace MAMBA_ISA
}  // namespace mamba
