// What the norm's two directions and SwiGLU share on the CPU: a row in vectors, silu, and the parameters as floats.
#pragma once

#include "common/cpu_tile.h"
#include "norm/cpu/kernels.h"

namespace mamba {
namespace MAMBA_ISA {

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

}  // namespace MAMBA_ISA
}  // namespace mamba
