// The vector of cpu_vector.h with AVX2, FMA and F16C: 8 lanes.
#pragma once

#include <immintrin.h>

namespace mamba {
namespace MAMBA_ISA {

constexpr int kLanes = 8;
struct Vec {
    __m256 v;
};

MAMBA_INLINE Vec zero() {
    return {_mm256_setzero_ps()};
}
MAMBA_INLINE Vec set1(float value) {
    return {_mm256_set1_ps(value)};
}
MAMBA_INLINE Vec add(Vec a, Vec b) {
    return {_mm256_add_ps(a.v, b.v)};
}
MAMBA_INLINE Vec subtract(Vec a, Vec b) {
    return {_mm256_sub_ps(a.v, b.v)};
}
MAMBA_INLINE Vec multiply(Vec a, Vec b) {
    return {_mm256_mul_ps(a.v, b.v)};
}
MAMBA_INLINE Vec divide(Vec a, Vec b) {
    return {_mm256_div_ps(a.v, b.v)};
}
// a * b + c
MAMBA_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
// maximum and minimum give b where a or b is NaN.
MAMBA_INLINE Vec maximum(Vec a, Vec b) {
    return {_mm256_max_ps(a.v, b.v)};
}
MAMBA_INLINE Vec minimum(Vec a, Vec b) {
    return {_mm256_min_ps(a.v, b.v)};
}
MAMBA_INLINE Vec round_nearest(Vec a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a > b ? x : y in each lane
MAMBA_INLINE Vec select_greater(Vec a, Vec b, Vec x, Vec y) {
    return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ))};
}
MAMBA_INLINE float sum(Vec a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
    return _mm_cvtss_f32(s);
}
MAMBA_INLINE float largest_lane(Vec a) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

// The sums of 8 vectors, each in the lane of its vector's place.
MAMBA_INLINE Vec sum_each(const Vec* rows) {
    __m256 halves[4];
    for (int i = 0; i < 4; ++i) {
        const __m256 a = rows[i].v, b = rows[i + 4].v;
        halves[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    const __m256 pair01 = _mm256_add_ps(_mm256_unpacklo_ps(halves[0], halves[1]), _mm256_unpackhi_ps(halves[0], halves[1]));
    const __m256 pair23 = _mm256_add_ps(_mm256_unpacklo_ps(halves[2], halves[3]), _mm256_unpackhi_ps(halves[2], halves[3]));
    return {_mm256_add_ps(_mm256_shuffle_ps(pair01, pair23, 0x44), _mm256_shuffle_ps(pair01, pair23, 0xee))};
}

// x = whole + fraction, |fraction| <= 1/2, with x held where scale_by_power needs it: 2^-127 comes out as 0, 2^128 as infinity.
MAMBA_INLINE void split_power(Vec x, Vec& whole, Vec& fraction) {
    const Vec limited = minimum(set1(128.0f), maximum(set1(-127.0f), x));
    whole = round_nearest(limited);
    fraction = subtract(limited, whole);
}
// a * 2^whole for an integer-valued whole in [-127, 128] and a near 1
MAMBA_INLINE Vec scale_by_power(Vec a, Vec whole) {
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(whole.v), 23);
    // a NaN keeps its NaN bits: its whole converts to 0x80000000, which is shifted out
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), power))};
}
// w = 2^exponent * mantissa with mantissa in [sqrt(1/2), sqrt(2)); inverse_scale = 2^-exponent. For normal w > 0.
MAMBA_INLINE void split_exponent(Vec w, Vec& exponent, Vec& mantissa, Vec& inverse_scale) {
    const __m256i bits = _mm256_castps_si256(w.v);
    const __m256i power = _mm256_srai_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f3504f3)), 23);
    exponent = {_mm256_cvtepi32_ps(power)};
    mantissa = {_mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(power, 23)))};
    inverse_scale = {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(127), power), 23))};
}

MAMBA_INLINE Vec load(const float* data) {
    return {_mm256_loadu_ps(data)};
}
MAMBA_INLINE Vec load(const Half* data) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)))};
}
MAMBA_INLINE Vec load(const Bfloat16* data) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))};
}
MAMBA_INLINE Vec load(const int8_t* data) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data))))};
}
MAMBA_INLINE void store(float* data, Vec a) {
    _mm256_storeu_ps(data, a.v);
}
MAMBA_INLINE void store(Half* data, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(data), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
// The upper halves are a rounded to nearest even by adding just under half an ulp; NaN would overflow into infinity and becomes
// a quiet NaN.
MAMBA_INLINE __m256i round_to_bfloat16(Vec a) {
    const __m256i bits = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
}
MAMBA_INLINE void store(Bfloat16* data, Vec a) {
    const __m256i high = _mm256_srli_epi32(round_to_bfloat16(a), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(data), _mm256_castsi256_si128(packed));
}

// The first count < kLanes elements; the other lanes are zero.
template <typename T>
MAMBA_INLINE Vec load_partial(const T* data, int count) {
    T copy[kLanes] = {};
    memcpy(copy, data, static_cast<size_t>(count) * sizeof(T));
    return load(copy);
}
template <typename T>
MAMBA_INLINE void store_partial(T* data, Vec a, int count) {
    T copy[kLanes];
    store(copy, a);
    memcpy(data, copy, static_cast<size_t>(count) * sizeof(T));
}

MAMBA_INLINE void load_pair(const Bfloat16* data, Vec& first, Vec& second) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
    first = {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))};
    second = {_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
MAMBA_INLINE void store_pair(Bfloat16* data, Vec first, Vec second) {
    const __m256i even = _mm256_srli_epi32(round_to_bfloat16(first), 16), odd = round_to_bfloat16(second);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), _mm256_blend_epi16(even, odd, 0xaa));
}

// Of the elements of a, then b: those at even places and those at odd ones. And the reverse.
MAMBA_INLINE void split_alternate(Vec a, Vec b, Vec& even, Vec& odd) {
    const __m256d evens = _mm256_castps_pd(_mm256_shuffle_ps(a.v, b.v, 0x88));
    const __m256d odds = _mm256_castps_pd(_mm256_shuffle_ps(a.v, b.v, 0xdd));
    even = {_mm256_castpd_ps(_mm256_permute4x64_pd(evens, 0xd8))};
    odd = {_mm256_castpd_ps(_mm256_permute4x64_pd(odds, 0xd8))};
}
MAMBA_INLINE void join_alternate(Vec even, Vec odd, Vec& a, Vec& b) {
    const __m256 low = _mm256_unpacklo_ps(even.v, odd.v), high = _mm256_unpackhi_ps(even.v, odd.v);
    a = {_mm256_permute2f128_ps(low, high, 0x20)};
    b = {_mm256_permute2f128_ps(low, high, 0x31)};
}

// Integer-valued lanes within 16 bits.
MAMBA_INLINE void store_integers(int16_t* data, Vec a) {
    const __m256i integers = _mm256_cvtps_epi32(a.v);
    const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(data), packed);
}

// 32 weights of int8 as 16 bits.
struct Int8Block {
    __m256i low, high;
};
MAMBA_INLINE Int8Block load_block(const int8_t* data) {
    const __m128i* const halves = reinterpret_cast<const __m128i*>(data);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)), _mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))};
}
// Their products with 32 integers, exact, summed up in the lanes.
MAMBA_INLINE Vec multiply_block(Int8Block block, const int16_t* x) {
    const __m256i* const halves = reinterpret_cast<const __m256i*>(x);
    const __m256i low = _mm256_madd_epi16(block.low, _mm256_loadu_si256(halves));
    const __m256i high = _mm256_madd_epi16(block.high, _mm256_loadu_si256(halves + 1));
    return {_mm256_cvtepi32_ps(_mm256_add_epi32(low, high))};
}

// The 8 x 8 matrix whose rows are rows[0..7], transposed: first 4 x 4 pieces within 128 bits, then the pieces.
MAMBA_INLINE void transpose(Vec* rows) {
    __m256 pieces[8];
    for (int quad = 0; quad < 8; quad += 4) {
        const __m256 low01 = _mm256_unpacklo_ps(rows[quad].v, rows[quad + 1].v);
        const __m256 high01 = _mm256_unpackhi_ps(rows[quad].v, rows[quad + 1].v);
        const __m256 low23 = _mm256_unpacklo_ps(rows[quad + 2].v, rows[quad + 3].v);
        const __m256 high23 = _mm256_unpackhi_ps(rows[quad + 2].v, rows[quad + 3].v);
        pieces[quad] = _mm256_shuffle_ps(low01, low23, 0x44);
        pieces[quad + 1] = _mm256_shuffle_ps(low01, low23, 0xee);
        pieces[quad + 2] = _mm256_shuffle_ps(high01, high23, 0x44);
        pieces[quad + 3] = _mm256_shuffle_ps(high01, high23, 0xee);
    }
    for (int column = 0; column < 4; ++column) {
        rows[column] = {_mm256_permute2f128_ps(pieces[column], pieces[column + 4], 0x20)};
        rows[column + 4] = {_mm256_permute2f128_ps(pieces[column], pieces[column + 4], 0x31)};
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
