// Norm and SwiGLU on the CPU, compiled once per instruction set. No STL here: see common/cpu_vector.h.
#include "norm/cpu/kernels.h"

#include <math.h>

#include "common/cpu_tile.h"

namespace mamba {
namespace MAMBA_ISA {

inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

// Elements [first, first + kLanes) of a row of `size`, zero beyond it, and the reverse.
template <typename T>
MAMBA_INLINE Vec load_row(const T* row, int64_t first, int64_t size) {
    const int64_t left = size - first;
    return left >= kLanes ? load(row + first) : load_partial(row + first, static_cast<int>(left));
}
template <typename T>
MAMBA_INLINE void store_row(T* row, int64_t first, int64_t size, Vec value) {
    const int64_t left = size - first;
    if (left >= kLanes) {
        store(row + first, value);
    } else {
        store_partial(row + first, value, static_cast<int>(left));
    }
}
// Zero in the lanes beyond the row.
MAMBA_INLINE Vec keep_row(Vec value, int64_t first, int64_t size) {
    const int64_t left = size - first;
    if (left >= kLanes) {
        return value;
    }
    float lanes[kLanes];
    store(lanes, value);
    return load_partial(lanes, static_cast<int>(left));
}

// The value that a T would hold.
template <typename T>
MAMBA_INLINE Vec round_to(Vec value) {
    T lanes[kLanes];
    store(lanes, value);
    return load(lanes);
}
template <>
MAMBA_INLINE Vec round_to<float>(Vec value) {
    return value;
}

MAMBA_INLINE Vec silu(Vec x) {
    return x * sigmoid(x);
}
// silu(x), and its derivative s (1 + x (1 - s)) with s = sigmoid(x).
MAMBA_INLINE Vec silu(Vec x, Vec& slope) {
    const Vec one = set1(1.0f), s = sigmoid(x);
    slope = s * fma(x, one - s, one);
    return x * s;
}

inline void load_parameter(const void* data, int32_t dtype, int64_t count, float* values) {
    for (int64_t i = 0; i < count; i += kLanes) {
        store(values + i, load_lanes(dtype, data, i, 1, block_lanes(count - i)));
    }
}

template <typename T>
MAMBA_INLINE T* row_at(const void* data, int64_t row, int64_t stride, int64_t column) {
    return data == nullptr ? nullptr : static_cast<T*>(const_cast<void*>(data)) + row * stride + column;
}

// ---- forward ---------------------------------------------------------------------------------------------------------

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

// weight and bias as floats, zero where there is no bias and in a vector beyond them.
inline void load_parameters(const MambaNorm& p, float* weights, float* biases) {
    const int64_t width = p.ngroups * p.group_size;
    load_parameter(p.weight, p.weight_dtype, width, weights);
    if (p.bias != nullptr) {
        load_parameter(p.bias, p.bias_dtype, width, biases);
    } else {
        fill_zero(biases, norm_pitch(width));
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

// ---- backward --------------------------------------------------------------------------------------------------------

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

// ---- the dtypes ------------------------------------------------------------------------------------------------------

template <typename T>
inline void norm_forward_beside(const MambaNorm& p, int64_t begin, int64_t end, float* scratch) {
    if (p.other_dtype == MAMBA_FLOAT32) {
        norm_forward_rows<T, float>(p, begin, end, scratch);
    } else {
        norm_forward_rows<T, T>(p, begin, end, scratch);
    }
}

template <typename T>
inline void norm_backward_beside(const MambaNormBackward& q, int64_t begin, int64_t end, float* scratch) {
    if (q.forward.other_dtype == MAMBA_FLOAT32) {
        norm_backward_rows<T, float>(q, begin, end, scratch);
    } else {
        norm_backward_rows<T, T>(q, begin, end, scratch);
    }
}

inline void norm_forward(const MambaNorm& p, int64_t begin, int64_t end, float* scratch) {
    if (p.dtype == MAMBA_FLOAT32) {
        norm_forward_rows<float, float>(p, begin, end, scratch);
    }
#ifndef MAMBA_DISABLE_HALF
    if (p.dtype == MAMBA_FLOAT16) {
        norm_forward_beside<Half>(p, begin, end, scratch);
    }
#endif
#ifndef MAMBA_DISABLE_BF16
    if (p.dtype == MAMBA_BFLOAT16) {
        norm_forward_beside<Bfloat16>(p, begin, end, scratch);
    }
#endif
}

inline void norm_backward(const MambaNormBackward& q, int64_t begin, int64_t end, float* scratch) {
    if (q.forward.dtype == MAMBA_FLOAT32) {
        norm_backward_rows<float, float>(q, begin, end, scratch);
    }
#ifndef MAMBA_DISABLE_HALF
    if (q.forward.dtype == MAMBA_FLOAT16) {
        norm_backward_beside<Half>(q, begin, end, scratch);
    }
#endif
#ifndef MAMBA_DISABLE_BF16
    if (q.forward.dtype == MAMBA_BFLOAT16) {
        norm_backward_beside<Bfloat16>(q, begin, end, scratch);
    }
#endif
}

// ---- SwiGLU ----------------------------------------------------------------------------------------------------------

template <typename T>
void swiglu_rows(const MambaSwiglu& p, bool backward, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* x_row = row_at<const T>(p.xy, row, p.xy_row_stride, 0);
        const T* dout = backward ? row_at<const T>(p.dout, row, p.dout_row_stride, 0) : nullptr;
        T* dxy = backward ? row_at<T>(p.dxy, row, p.dxy_row_stride, 0) : nullptr;
        T* out = row_at<T>(p.out, row, p.out_row_stride, 0);
        for (int64_t i = 0; i < p.width; i += kLanes) {
            const Vec x = load_row(x_row, i, p.width), y = load_row(x_row + p.width, i, p.width);
            Vec slope = zero();
            const Vec gate = backward ? silu(x, slope) : silu(x);
            if (out != nullptr) {
                store_row(out, i, p.width, gate * y);
            }
            if (backward) {
                const Vec gradient = load_row(dout, i, p.width);
                store_row(dxy, i, p.width, gradient * y * slope);
                store_row(dxy + p.width, i, p.width, gradient * gate);
            }
        }
    }
}

inline void swiglu(const MambaSwiglu& p, bool backward, int64_t begin, int64_t end) {
    if (p.dtype == MAMBA_FLOAT32) {
        swiglu_rows<float>(p, backward, begin, end);
    }
#ifndef MAMBA_DISABLE_HALF
    if (p.dtype == MAMBA_FLOAT16) {
        swiglu_rows<Half>(p, backward, begin, end);
    }
#endif
#ifndef MAMBA_DISABLE_BF16
    if (p.dtype == MAMBA_BFLOAT16) {
        swiglu_rows<Bfloat16>(p, backward, begin, end);
    }
#endif
}

inline void swiglu_forward(const MambaSwiglu& p, int64_t begin, int64_t end) {
    swiglu(p, false, begin, end);
}
inline void swiglu_backward(const MambaSwiglu& p, int64_t begin, int64_t end) {
    swiglu(p, true, begin, end);
}

extern const NormKernels norm_kernels = {norm_forward, norm_backward, norm_add_shares, swiglu_forward, swiglu_backward};

}  // namespace MAMBA_ISA
}  // namespace mamba
