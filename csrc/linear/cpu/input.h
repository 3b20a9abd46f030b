// x of a projection as its kernels read it.
#pragma once

#include "common/cpu_widen.h"
#include "linear/cpu/kernels.h"

namespace mamba {
namespace MAMBA_ISA {

inline bool all_finite(const float* x, int64_t count) {
    Vec products = zero();
    for (int64_t i = 0; i < count; i += kLanes) {
        products = fma(load(x + i), zero(), products);  // NaN
    }
    return sum(products) == 0.0f;
}

// A block's scale for integers up to `most`; false if it is too small for the scale's inverse, and not zero.
inline bool scale_of_block(const float* x, float most, float* scale, float* inverse) {
    constexpr float kSmall = 1e-20f;
    Vec lanes = zero();
    for (int i = 0; i < kFeatureBlock; i += kLanes) {
        const Vec value = load(x + i);
        lanes = maximum(maximum(value, zero() - value), lanes);
    }
    const float largest = largest_lane(lanes);
    *scale = largest / most;
    *inverse = largest > 0.0f ? most / largest : 0.0f;
    return largest == 0.0f || largest > kSmall;
}

// Finite x as integers of 16 bits and a scale for each block: within 2^-16 of the block's largest element, where a bfloat16 is
// within 2^-9 of itself. False if a block is too small.
inline bool quantize(const float* x, int64_t count, int16_t* integers, float* scales) {
    for (int64_t i = 0; i < count; i += kFeatureBlock) {
        float inverse;
        if (!scale_of_block(x + i, 32767.0f, scales + i / kFeatureBlock, &inverse)) {
            return false;
        }
        for (int64_t j = i; j < i + kFeatureBlock; j += kLanes) {
            store_integers(integers + j, round_nearest(load(x + j) * set1(inverse)));
        }
    }
    return true;
}

#if MAMBA_ISA_LEVEL == 2
// The same for VNNI: see ProjectionInput::bytes.
inline bool quantize_bytes(const float* x, int64_t count, int8_t* bytes, float* scales, int32_t* starts) {
    constexpr float kMost = 127.0f * 256.0f + 127.0f;  // so that the first byte is none of 128
    const __m512i half = _mm512_set1_epi32(128);
    for (int64_t i = 0; i < count; i += kFeatureBlock) {
        float inverse;
        if (!scale_of_block(x + i, kMost, scales + i / kFeatureBlock, &inverse)) {
            return false;
        }
        __m512i sums = _mm512_setzero_si512();
        for (int64_t j = i; j < i + kFeatureBlock; j += kLanes) {
            const __m512i value = _mm512_cvtps_epi32((load(x + j) * set1(inverse)).v);
            const __m512i first = _mm512_srai_epi32(_mm512_add_epi32(value, half), 8);  // so the second is -128 to 127
            const __m128i firsts = _mm512_cvtepi32_epi8(first), seconds = _mm512_cvtepi32_epi8(value);
            __m128i* const to = reinterpret_cast<__m128i*>(bytes + 2 * j);
            _mm_storeu_si128(to, _mm_unpacklo_epi32(firsts, seconds));
            _mm_storeu_si128(to + 1, _mm_unpackhi_epi32(firsts, seconds));
            sums = _mm512_add_epi32(sums, value);
        }
        starts[i / kFeatureBlock] = -128 * _mm512_reduce_add_epi32(sums);
    }
    return true;
}
#endif

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
    const int64_t count = input_rows(p) * x.pitch, blocks = count / kFeatureBlock;
    float* const scales = scratch + count;
    void* const integers = scales + 2 * blocks;
    x.scales = scales;
    if (!all_finite(scratch, p.rows * x.pitch)) {
        return x;
    }
#if MAMBA_ISA_LEVEL == 2
    if (takes_vnni(p)) {
        int32_t* const starts = reinterpret_cast<int32_t*>(scales + blocks);
        int8_t* const bytes = static_cast<int8_t*>(integers);
        x.bytes = quantize_bytes(scratch, count, bytes, scales, starts) ? bytes : nullptr;
        x.starts = starts;
        return x;
    }
#endif
    int16_t* const words = static_cast<int16_t*>(integers);
    x.integers = quantize(scratch, count, words, scales) ? words : nullptr;
    return x;
}

}  // namespace MAMBA_ISA
}  // namespace mamba
