// x of a projection as its kernels read it.
#pragma once

#include "common/cpu_widen.h"
#include "linear/cpu/kernels.h"

namespace mamba {
namespace MAMBA_ISA {

// A block of x as integers of 16 bits and a scale: within 2^-16 of the block's largest element, where a bfloat16 is within 2^-9
// of itself. Returns whether it is finite, and large enough for the scale's inverse, or zero.
inline bool quantize_block(const float* x, int16_t* integers, float* scale) {
    constexpr float kLargest = 32767.0f, kSmall = 1e-20f;
    Vec largest = zero(), not_finite = zero();
    for (int i = 0; i < kFeatureBlock; i += kLanes) {
        const Vec value = load(x + i);
        largest = maximum(maximum(value, zero() - value), largest);
        not_finite = fma(value, zero(), not_finite);  // NaN
    }
    float lanes[kLanes], most = 0.0f;
    store(lanes, largest);
    for (int i = 0; i < kLanes; ++i) {
        most = lanes[i] > most ? lanes[i] : most;
    }
    if (sum(not_finite) != 0.0f || (most > 0.0f && most <= kSmall)) {
        return false;
    }
    *scale = most / kLargest;
    const Vec inverse = set1(most > 0.0f ? kLargest / most : 0.0f);
    for (int i = 0; i < kFeatureBlock; i += kLanes) {
        store_integers(integers + i, round_nearest(load(x + i) * inverse));
    }
    return true;
}

inline ProjectionInput prepare_input(const Projection& p, float* scratch) {
    ProjectionInput x = {};
    x.pitch = round_up(p.features, kFeatureBlock);
    x.floats = scratch;
    for (int64_t row = 0; row < p.rows; ++row) {
        float* const floats = scratch + row * x.pitch;
        widen_row(p.x_dtype, p.x, row * p.x_stride, p.features, floats);
        fill_zero(floats + p.features, x.pitch - p.features);
        if (p.weight_dtype == MAMBA_BFLOAT16) {
            order_as_pairs(floats, x.pitch, floats);
        }
    }
    fill_zero(scratch + p.rows * x.pitch, (input_rows(p) - p.rows) * x.pitch);
    if (!takes_integers(p)) {
        return x;
    }
    const int64_t count = input_rows(p) * x.pitch;
    float* const scales = scratch + count;
    int16_t* const integers = reinterpret_cast<int16_t*>(scales + count / kFeatureBlock);
    for (int64_t i = 0; i < count; i += kFeatureBlock) {
        if (!quantize_block(scratch + i, integers + i, scales + i / kFeatureBlock)) {
            return x;
        }
        for (int quad = 0; takes_vnni(p) && quad < kFeatureBlock; quad += 4) {
            const int16_t second = integers[i + quad + 1];
            integers[i + quad + 1] = integers[i + quad + 2];
            integers[i + quad + 2] = second;
        }
    }
    x.integers = integers;
    x.scales = scales;
    return x;
}

}  // namespace MAMBA_ISA
}  // namespace mamba
