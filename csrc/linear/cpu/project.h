// A matrix of any dtype times a few vectors of floats: the matrix is read once, and widened in registers.
#pragma once

#include "common/cpu_widen.h"
#include "linear/cpu/kernels.h"

namespace mamba {
namespace MAMBA_ISA {

inline void widen_x(const Projection& p, float* x) {
    widen_rows(p.x_dtype, p.x, p.x_stride, p.rows, p.features, x);
}

template <typename W>
inline float dot(const W* weight, const float* x, int64_t size) {
    Vec sums[4] = {zero(), zero(), zero(), zero()};  // so that one addition need not wait for the last
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
        for (int k = 0; k < 4; ++k) {
            sums[k] = fma(load(weight + i + k * kLanes), load(x + i + k * kLanes), sums[k]);
        }
    }
    for (; i < size; i += kLanes) {
        const int lanes = block_lanes(size - i);
        sums[0] = fma(load_partial(weight + i, lanes), load_partial(x + i, lanes), sums[0]);
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// A row of an int8 weight: a partial sum for each scale.
inline float dot_int8(const Projection& p, int64_t output, const float* x) {
    const int64_t blocks = ceil_div(p.features, MAMBA_INT8_BLOCK);
    const Half* const scales = static_cast<const Half*>(p.scales) + output * blocks;
    const int8_t* const weight = static_cast<const int8_t*>(p.weight) + output * p.features;
    Vec total = zero();
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * MAMBA_INT8_BLOCK, left = p.features - first;
        float values[MAMBA_INT8_BLOCK] = {};
        const int count = left < MAMBA_INT8_BLOCK ? static_cast<int>(left) : MAMBA_INT8_BLOCK;
        for (int i = 0; i < count; ++i) {
            values[i] = static_cast<float>(weight[first + i]);
        }
        Vec partial = zero();
        for (int i = 0; i < count; i += kLanes) {
            partial = fma(load(values + i), load_partial(x + first + i, block_lanes(count - i)), partial);
        }
        total = fma(partial, set1(sum(load_partial(scales + block, 1))), total);
    }
    return sum(total);
}

template <typename W>
inline float dot_output(const Projection& p, int64_t output, const float* x, W*) {
    return dot(static_cast<const W*>(p.weight) + output * p.features, x, p.features);
}
inline float dot_output(const Projection& p, int64_t output, const float* x, int8_t*) {
    return dot_int8(p, output, x);
}

template <typename W>
inline void project_as(const Projection& p, const float* x, int64_t begin, int64_t end) {
    float values[kLanes];
    for (int64_t first = begin; first < end; first += kLanes) {
        const int count = block_lanes(end - first);
        const Vec bias = p.bias != nullptr ? load_lanes(p.bias_dtype, p.bias, first, 1, count) : zero();
        for (int64_t row = 0; row < p.rows; ++row) {  // the weight's block of rows stays in the cache
            for (int i = 0; i < count; ++i) {
                values[i] = dot_output(p, first + i, x + row * p.features, static_cast<W*>(nullptr));
            }
            const Vec sums = load_partial(values, count) + bias;
            store_lanes(p.out_dtype, p.out, row * p.out_stride + first, 1, count, sums);
        }
    }
}

inline void project_outputs(const Projection& p, const float* x, int64_t begin, int64_t end) {
    if (p.weight_dtype == MAMBA_FLOAT32) {
        project_as<float>(p, x, begin, end);
    }
    if (p.weight_dtype == MAMBA_INT8) {
        project_as<int8_t>(p, x, begin, end);
    }
#ifndef MAMBA_DISABLE_HALF
    if (p.weight_dtype == MAMBA_FLOAT16) {
        project_as<Half>(p, x, begin, end);
    }
#endif
#ifndef MAMBA_DISABLE_BF16
    if (p.weight_dtype == MAMBA_BFLOAT16) {
        project_as<Bfloat16>(p, x, begin, end);
    }
#endif
}

}  // namespace MAMBA_ISA
}  // namespace mamba
