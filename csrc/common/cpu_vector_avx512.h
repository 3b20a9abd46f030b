// The vector of cpu_vector.h with AVX-512 (F, BW, VL, DQ): 16 lanes.
#pragma once

// gcc 12 warns about its own intrinsics, which start from a deliberately undefined register.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push                             // NOLINT(msvc): the branch for another compiler
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // NOLINT(msvc): the same
#pragma GCC diagnostic ignored "-Wuninitialized"        // NOLINT(msvc): the same
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop  // NOLINT(msvc): the same
#endif

namespace mamba {
namespace MAMBA_ISA {

constexpr int kLanes = 16;
struct Vec {
    __m512 v;
};

MAMBA_INLINE Vec zero() {
    return {_mm512_setzero_ps()};
}
MAMBA_INLINE Vec set1(float value) {
    return {_mm512_set1_ps(value)};
}
MAMBA_INLINE Vec add(Vec a, Vec b) {
    return {_mm512_add_ps(a.v, b.v)};
}
MAMBA_INLINE Vec subtract(Vec a, Vec b) {
    return {_mm512_sub_ps(a.v, b.v)};
}
MAMBA_INLINE Vec multiply(Vec a, Vec b) {
    return {_mm512_mul_ps(a.v, b.v)};
}
MAMBA_INLINE Vec divide(Vec a, Vec b) {
    return {_mm512_div_ps(a.v, b.v)};
}
// a * b + c
MAMBA_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
// maximum and minimum give b where a or b is NaN.
MAMBA_INLINE Vec maximum(Vec a, Vec b) {
    return {_mm512_max_ps(a.v, b.v)};
}
MAMBA_INLINE Vec minimum(Vec a, Vec b) {
    return {_mm512_min_ps(a.v, b.v)};
}
MAMBA_INLINE Vec round_nearest(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a > b ? x : y in each lane
MAMBA_INLINE Vec select_greater(Vec a, Vec b, Vec x, Vec y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), y.v, x.v)};
}
MAMBA_INLINE float sum(Vec a) {
    return _mm512_reduce_add_ps(a.v);
}
MAMBA_INLINE float largest_lane(Vec a) {
    return _mm512_reduce_max_ps(a.v);
}

// The sums of 16 vectors, each in the lane of its vector's place.
MAMBA_INLINE Vec sum_each(const Vec* rows) {
    __m512 halves[8], quarters[4];
    for (int i = 0; i < 8; ++i) {
        const int row = i < 4 ? i : i + 4;
        const __m512 a = rows[row].v, b = rows[row + 4].v;
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512 a = halves[i], b = halves[i + 4];
        quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    const __m512 pair01 =
        _mm512_add_ps(_mm512_unpacklo_ps(quarters[0], quarters[1]), _mm512_unpackhi_ps(quarters[0], quarters[1]));
    const __m512 pair23 =
        _mm512_add_ps(_mm512_unpacklo_ps(quarters[2], quarters[3]), _mm512_unpackhi_ps(quarters[2], quarters[3]));
    return {_mm512_add_ps(_mm512_shuffle_ps(pair01, pair23, 0x44), _mm512_shuffle_ps(pair01, pair23, 0xee))};
}

// x = whole + fraction, |fraction| <= 1/2. The reduce instruction has no inf - inf: infinities get fraction 0.
MAMBA_INLINE void split_power(Vec x, Vec& whole, Vec& fraction) {
    whole = round_nearest(x);
    fraction = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^whole for an integer-valued whole
MAMBA_INLINE Vec scale_by_power(Vec a, Vec whole) {
    return {_mm512_scalef_ps(a.v, whole.v)};
}
// w = 2^exponent * mantissa with mantissa in [sqrt(1/2), sqrt(2)); inverse_scale = 2^-exponent. For normal w > 0.
MAMBA_INLINE void split_exponent(Vec w, Vec& exponent, Vec& mantissa, Vec& inverse_scale) {
    const __m512i bits = _mm512_castps_si512(w.v);
    const __m512i power = _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(0x3f3504f3)), 23);
    exponent = {_mm512_cvtepi32_ps(power)};
    mantissa = {_mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(power, 23)))};
    inverse_scale = {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(127), power), 23))};
}

MAMBA_INLINE Vec bits_to_vec(__m256i bits, Half) {
    return {_mm512_cvtph_ps(bits)};
}
MAMBA_INLINE Vec bits_to_vec(__m256i bits, Bfloat16) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
MAMBA_INLINE __m256i vec_to_bits(Vec a, Half) {
    return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// The upper halves are a rounded to nearest even by adding just under half an ulp, or half of one if it is odd; NaN would
// overflow into infinity and becomes a quiet NaN.
MAMBA_INLINE __m512i round_to_bfloat16(Vec a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i added = _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7fff), _mm512_set1_epi32(0x8000));
    return _mm512_mask_mov_epi32(_mm512_add_epi32(bits, added), nan, _mm512_set1_epi32(0x7fc00000));
}
MAMBA_INLINE __m256i vec_to_bits(Vec a, Bfloat16) {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bfloat16(a), 16));
}

MAMBA_INLINE Vec load(const float* data) {
    return {_mm512_loadu_ps(data)};
}
MAMBA_INLINE Vec load(const int8_t* data) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data))))};
}
template <typename T>
MAMBA_INLINE Vec load(const T* data) {
    return bits_to_vec(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data)), T{});
}
MAMBA_INLINE void store(float* data, Vec a) {
    _mm512_storeu_ps(data, a.v);
}
template <typename T>
MAMBA_INLINE void store(T* data, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), vec_to_bits(a, T{}));
}

MAMBA_INLINE __mmask16 first_lanes(int count) {
    return static_cast<__mmask16>((1u << count) - 1u);
}
// The first count < kLanes elements; the other lanes are zero.
MAMBA_INLINE Vec load_partial(const float* data, int count) {
    return {_mm512_maskz_loadu_ps(first_lanes(count), data)};
}
template <typename T>
MAMBA_INLINE Vec load_partial(const T* data, int count) {
    return bits_to_vec(_mm256_maskz_loadu_epi16(first_lanes(count), data), T{});
}
MAMBA_INLINE void store_partial(float* data, Vec a, int count) {
    _mm512_mask_storeu_ps(data, first_lanes(count), a.v);
}
template <typename T>
MAMBA_INLINE void store_partial(T* data, Vec a, int count) {
    _mm256_mask_storeu_epi16(data, first_lanes(count), vec_to_bits(a, T{}));
}

MAMBA_INLINE void split_pairs(__m512i pairs, Vec& even, Vec& odd) {
    even = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
    odd = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
MAMBA_INLINE void load_pair(const Bfloat16* data, Vec& first, Vec& second) {
    split_pairs(_mm512_loadu_si512(data), first, second);
}
MAMBA_INLINE void store_pair(Bfloat16* data, Vec first, Vec second) {
    const __m512i even = _mm512_srli_epi32(round_to_bfloat16(first), 16), odd = round_to_bfloat16(second);
    _mm512_storeu_si512(data, _mm512_mask_blend_epi16(0xaaaaaaaau, even, odd));
}
MAMBA_INLINE void load_pair_partial(const Bfloat16* data, int count, Vec& first, Vec& second) {
    split_pairs(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << count) - 1u), data), first, second);
}

// Of the elements of a, then b: those at even places and those at odd ones. And the reverse.
MAMBA_INLINE void split_alternate(Vec a, Vec b, Vec& even, Vec& odd) {
    const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even = {_mm512_permutex2var_ps(a.v, places, b.v)};
    odd = {_mm512_permutex2var_ps(a.v, _mm512_add_epi32(places, _mm512_set1_epi32(1)), b.v)};
}
MAMBA_INLINE void join_alternate(Vec even, Vec odd, Vec& a, Vec& b) {
    const __m512i places = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    a = {_mm512_permutex2var_ps(even.v, places, odd.v)};
    b = {_mm512_permutex2var_ps(even.v, _mm512_add_epi32(places, _mm512_set1_epi32(8)), odd.v)};
}

// Integer-valued lanes within 16 bits.
MAMBA_INLINE void store_integers(int16_t* data, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}

// 32 weights of int8 as 16 bits.
struct Int8Block {
    __m512i v;
};
MAMBA_INLINE Int8Block load_block(const int8_t* data) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data)))};
}
// Their products with 32 integers, exact, summed up in the lanes.
MAMBA_INLINE Vec multiply_block(Int8Block block, const int16_t* x) {
    return {_mm512_cvtepi32_ps(_mm512_madd_epi16(block.v, _mm512_loadu_si512(x)))};
}

// The 16 x 16 matrix whose rows are rows[0..15], transposed: first 4 x 4 pieces within 128 bits, then the pieces.
MAMBA_INLINE void transpose(Vec* rows) {
    __m512 pieces[16];
    for (int quad = 0; quad < 16; quad += 4) {
        const __m512 low01 = _mm512_unpacklo_ps(rows[quad].v, rows[quad + 1].v);
        const __m512 high01 = _mm512_unpackhi_ps(rows[quad].v, rows[quad + 1].v);
        const __m512 low23 = _mm512_unpacklo_ps(rows[quad + 2].v, rows[quad + 3].v);
        const __m512 high23 = _mm512_unpackhi_ps(rows[quad + 2].v, rows[quad + 3].v);
        pieces[quad] = _mm512_shuffle_ps(low01, low23, 0x44);
        pieces[quad + 1] = _mm512_shuffle_ps(low01, low23, 0xee);
        pieces[quad + 2] = _mm512_shuffle_ps(high01, high23, 0x44);
        pieces[quad + 3] = _mm512_shuffle_ps(high01, high23, 0xee);
    }
    for (int column = 0; column < 4; ++column) {
        const __m512 even01 = _mm512_shuffle_f32x4(pieces[column], pieces[column + 4], 0x88);
        const __m512 odd01 = _mm512_shuffle_f32x4(pieces[column], pieces[column + 4], 0xdd);
        const __m512 even23 = _mm512_shuffle_f32x4(pieces[column + 8], pieces[column + 12], 0x88);
        const __m512 odd23 = _mm512_shuffle_f32x4(pieces[column + 8], pieces[column + 12], 0xdd);
        rows[column] = {_mm512_shuffle_f32x4(even01, even23, 0x88)};
        rows[column + 4] = {_mm512_shuffle_f32x4(odd01, odd23, 0x88)};
        rows[column + 8] = {_mm512_shuffle_f32x4(even01, even23, 0xdd)};
        rows[column + 12] = {_mm512_shuffle_f32x4(odd01, odd23, 0xdd)};
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
