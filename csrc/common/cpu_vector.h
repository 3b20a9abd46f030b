// One vector of floats per instruction set, behind one set of names. The cpu/kernels.cpp files are compiled three times with
// MAMBA_ISA = generic, avx2 and avx512. Everything they include lives in a namespace of that name, and they use no STL:
// an inline function shared by the three compilations could reach a CPU that lacks the instructions it was compiled to.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

#ifndef MAMBA_ISA
#error "MAMBA_ISA is not defined: compile this file with -DMAMBA_ISA=generic, avx2 or avx512 (csrc/CMakeLists.txt does)"
#endif

#if defined(_MSC_VER)
#define MAMBA_INLINE __forceinline
#define MAMBA_INLINE_LAMBDA  // after its parameters; __forceinline cannot stand there
#else
#define MAMBA_INLINE inline __attribute__((always_inline)) /* NOLINT(msvc): the branch for other compilers */
#define MAMBA_INLINE_LAMBDA __attribute__((always_inline)) /* NOLINT(msvc): as above */
#endif

#define MAMBA_ISA_LEVEL_generic 0
#define MAMBA_ISA_LEVEL_avx2 1
#define MAMBA_ISA_LEVEL_avx512 2
#define MAMBA_ISA_JOIN_EXPANDED(prefix, isa) prefix##isa
#define MAMBA_ISA_JOIN(prefix, isa) MAMBA_ISA_JOIN_EXPANDED(prefix, isa)
#define MAMBA_ISA_LEVEL MAMBA_ISA_JOIN(MAMBA_ISA_LEVEL_, MAMBA_ISA)

namespace mamba {
namespace MAMBA_ISA {

// Storage of the 16-bit types; arithmetic is always float.
struct Half {
    uint16_t bits;
};
struct Bfloat16 {
    uint16_t bits;
};

}  // namespace MAMBA_ISA
}  // namespace mamba

#if MAMBA_ISA_LEVEL == 2
#include "common/cpu_vector_avx512.h"
#elif MAMBA_ISA_LEVEL == 1
#include "common/cpu_vector_avx2.h"
#else
#include "common/cpu_vector_generic.h"
#endif

namespace mamba {
namespace MAMBA_ISA {

MAMBA_INLINE void prefetch(const void* data) {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_prefetch(static_cast<const char*>(data), _MM_HINT_T0);
#else
    (void)data;
#endif
}

// 2 * kLanes elements: those of bfloat16 at even places and those at odd ones, of other types the first half and the second.
template <typename T>
MAMBA_INLINE void load_pair(const T* data, Vec& first, Vec& second) {
    first = load(data);
    second = load(data + kLanes);
}
template <typename T>
MAMBA_INLINE void store_pair(T* data, Vec first, Vec second) {
    store(data, first);
    store(data + kLanes, second);
}
// Floats, a multiple of 2 * kLanes of them, in the order in which load_pair gives those of bfloat16. `to` may be `from`.
inline void order_as_pairs(const float* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += 2 * kLanes) {
        Vec even, odd;
        split_alternate(load(from + i), load(from + i + kLanes), even, odd);
        store(to + i, even);
        store(to + i + kLanes, odd);
    }
}
// The first count < 2 * kLanes elements; the other lanes are zero.
template <typename T>
MAMBA_INLINE void load_pair_partial(const T* data, int count, Vec& first, Vec& second) {
    T copy[2 * kLanes] = {};
    memcpy(copy, data, static_cast<size_t>(count) * sizeof(T));
    load_pair(copy, first, second);
}

MAMBA_INLINE Vec operator+(Vec a, Vec b) {
    return add(a, b);
}
MAMBA_INLINE Vec operator-(Vec a, Vec b) {
    return subtract(a, b);
}
MAMBA_INLINE Vec operator*(Vec a, Vec b) {
    return multiply(a, b);
}
MAMBA_INLINE Vec operator/(Vec a, Vec b) {
    return divide(a, b);
}

// 2^r for |r| <= 1/2, relative error below 2e-8 before rounding; exactly 1 at 0, and as exact in 2^r - 1 for small r, so that
// states which decay slowly do not drift. Coefficients: minimax fit of (2^r - 1) / r, the first one nearest to ln 2.
MAMBA_INLINE Vec exp2_polynomial(Vec r) {
    Vec p = set1(1.5353362e-4f);
    p = fma(p, r, set1(1.3398875e-3f));
    p = fma(p, r, set1(9.6184369e-3f));
    p = fma(p, r, set1(5.5503324e-2f));
    p = fma(p, r, set1(2.4022648e-1f));
    p = fma(p, r, set1(6.9314718e-1f));
    return fma(p, r, set1(1.0f));
}

// 2^x for any x: zero below the normal floats, infinity from 128 on, NaN stays NaN.
MAMBA_INLINE Vec exp2(Vec x) {
    Vec whole, fraction;
    split_power(x, whole, fraction);
    return scale_by_power(exp2_polynomial(fraction), whole);
}

// e^x to about an ulp for |x| <= 88; beyond that it stays at the value of +-88 (about 0 and 1.7e38).
MAMBA_INLINE Vec exp(Vec x) {
    const Vec limited = minimum(set1(88.0f), maximum(set1(-88.0f), x));
    const Vec whole = round_nearest(limited * set1(1.44269504f));
    // whole * ln 2 in two parts, the first with so few bits that the product is exact
    Vec rest = fma(whole, set1(-0.693359375f), limited);
    rest = fma(whole, set1(2.12194440e-4f), rest);
    return scale_by_power(exp2_polynomial(rest * set1(1.44269504f)), whole);
}

// log(1 + y) for 0 <= y < infinity, accurate for small y: 1 + y is split as 2^exponent (1 + f), what rounding 1 + y lost
// goes into f, and log(1 + f) is a series in s = f / (2 + f), |s| < 0.18.
MAMBA_INLINE Vec log1p(Vec y) {
    const Vec one = set1(1.0f);
    const Vec w = one + y;
    const Vec lost = y - (w - one);
    Vec exponent, mantissa, inverse_scale;
    split_exponent(w, exponent, mantissa, inverse_scale);
    const Vec f = fma(lost, inverse_scale, mantissa - one);
    const Vec s = f / (f + set1(2.0f));
    const Vec s2 = s * s;
    Vec p = fma(s2, set1(1.0f / 9.0f), set1(1.0f / 7.0f));
    p = fma(p, s2, set1(1.0f / 5.0f));
    p = fma(p, s2, set1(1.0f / 3.0f));
    const Vec twice = s + s;
    return fma(exponent, set1(0.693147181f), fma(twice * s2, p, twice));
}

MAMBA_INLINE Vec sigmoid(Vec x) {
    const Vec one = set1(1.0f);
    return one / (one + exp(zero() - x));
}

// log(1 + e^x), the identity above 20 as in torch; slope gets its derivative.
MAMBA_INLINE Vec softplus(Vec x, Vec& slope) {
    const Vec limit = set1(20.0f);
    const Vec e = exp(x);
    slope = select_greater(x, limit, set1(1.0f), e / (e + set1(1.0f)));
    return select_greater(x, limit, x, log1p(e));
}

}  // namespace MAMBA_ISA
}  // namespace mamba
