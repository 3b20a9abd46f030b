// The norm's backward on the CPU.
#pragma once

#include "norm/cpu/row.h"

namespace mamba {
namespace MAMBA_ISA {

struct NormArrays {
    float *dweight, *dbias, *weight, *bias, *x_hat, *wdy;
};

template <typename T, typename Other>
inline void norm_group_backward(const MambaNormBackward& q, int64_t row, int64_t group, const NormArrays& arrays) {
    const MambaNorm& p = q.forward;
    const int64_t size = p.group_size, column = group * size;
    const T* x = row_at<const T>(p.x, row, p.x_row_stride, column);
    const Other* sum_row = row_at<const Other>(p.residual_out, row, p.residual_out_row_stride, column);
    const Other* z = row_at<const Other>(p.z, row, p.z_row_stride, column);
    const T* dout = row_at<const T>(q.dout, row, q.dout_row_stride, column);
    const Other* dsum = row_at<const Other>(q.dresidual_out, row, q.dresidual_out_row_stride, column);
    T* dx = row_at<T>(q.dx, row, q.dx_row_stride, column);
    Other* dresidual = row_at<Other>(q.dresidual, row, q.dresidual_row_stride, column);
    Other* dz = row_at<Other>(q.dz, row, q.dz_row_stride, column);
    const bool gate_first = z != nullptr && !p.norm_before_gate, gate_last = z != nullptr && p.norm_before_gate;
    const Vec mean = set1(p.is_rms_norm ? 0.0f : p.mean[row * p.ngroups + group]);
    const Vec rstd = set1(p.rstd[row * p.ngroups + group]);
    float *dweight = arrays.dweight + column, *dbias = arrays.dbias + column;
    const float *weight = arrays.weight + column, *bias = arrays.bias + column;

    Vec along_x_hat = zero(), along_one = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        Vec x_hat = sum_row != nullptr ? load_row(sum_row, i, size) : load_row(x, i, size);
        Vec dy = load_row(dout, i, size);
        if (gate_first) {
            x_hat = x_hat * silu(load_row(z, i, size));
        }
        x_hat = keep_row((x_hat - mean) * rstd, i, size);
        if (gate_last) {
            Vec slope;
            const Vec gate = silu(load_row(z, i, size), slope);
            store_row(dz, i, size, dy * fma(x_hat, load(weight + i), load(bias + i)) * slope);
            dy = dy * gate;
        }
        store_row(dweight, i, size, fma(dy, x_hat, load_row(dweight, i, size)));
        store_row(dbias, i, size, dy + load_row(dbias, i, size));
        const Vec wdy = keep_row(dy * load(weight + i), i, size);  // beyond the group is another's weight, perhaps NaN
        along_x_hat = fma(wdy, x_hat, along_x_hat);
        along_one = along_one + wdy;
        store(arrays.x_hat + i, x_hat);
        store(arrays.wdy + i, wdy);
    }
    const float count = static_cast<float>(size);
    along_x_hat = set1(sum(along_x_hat) / count);
    along_one = p.is_rms_norm ? zero() : set1(sum(along_one) / count);
    for (int64_t i = 0; i < size; i += kLanes) {
        Vec gradient = (load(arrays.wdy + i) - fma(load(arrays.x_hat + i), along_x_hat, along_one)) * rstd;
        if (gate_first) {  // so far it is that of x silu(z)
            Vec slope;
            const Vec gate = silu(load_row(z, i, size), slope);
            store_row(dz, i, size, gradient * load_row(x, i, size) * slope);
            gradient = gradient * gate;
        }
        if (dsum != nullptr) {
            gradient = gradient + load_row(dsum, i, size);
        }
        if (dresidual != nullptr) {
            store_row(dresidual, i, size, gradient);
        }
        store_row(dx, i, size, gradient);
    }
}

template <typename T, typename Other>
void norm_backward_rows(const MambaNormBackward& q, int64_t begin, int64_t end, float* scratch) {
    const MambaNorm& p = q.forward;
    const int64_t pitch = norm_pitch(p.ngroups * p.group_size);
    NormArrays arrays;
    arrays.dweight = scratch;
    arrays.dbias = arrays.dweight + pitch;
    arrays.weight = arrays.dbias + pitch;
    arrays.bias = arrays.weight + pitch;
    arrays.x_hat = arrays.bias + pitch;
    arrays.wdy = arrays.x_hat + norm_pitch(p.group_size);
    fill_zero(arrays.dweight, 2 * pitch);
    load_parameters(p, arrays.weight, arrays.bias);
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t group = 0; group < p.ngroups; ++group) {
            norm_group_backward<T, Other>(q, row, group, arrays);
        }
    }
}

inline void norm_add_shares(const MambaNormBackward& q, int64_t shares, int64_t pitch, float* scratch) {
    const MambaNorm& p = q.forward;
    const int64_t width = p.ngroups * p.group_size;
    for (int which = 0; which < (p.bias != nullptr ? 2 : 1); ++which) {
        const float* sums = scratch + which * norm_pitch(width);
        for (int64_t i = 0; i < width; i += kLanes) {
            Vec total = load(sums + i);
            for (int64_t share = 1; share < shares; ++share) {
                total = total + load(sums + share * pitch + i);
            }
            store_lanes(which == 0 ? p.weight_dtype : p.bias_dtype, which == 0 ? q.dweight : q.dbias, i, 1,
                        block_lanes(width - i), total);
        }
    }
}

inline void norm_backward(const MambaNormBackward& q, int64_t begin, int64_t end, float* scratch) {
    with_type(q.forward.dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
        using T = typename decltype(type)::type;
        if (q.forward.other_dtype == MAMBA_FLOAT32) {
            norm_backward_rows<T, float>(q, begin, end, scratch);
        } else {
            norm_backward_rows<T, T>(q, begin, end, scratch);
        }
    });
}

}  // namespace MAMBA_ISA
}  // namespace mamba
