// The vector of cpu_vector.h in plain C++: lanes in an array, left to the compiler to vectorise for the baseline CPU.
#pragma once

namespace mamba {
namespace MAMBA_ISA {

constexpr int kLanes = 8;
struct Vec {
    float v[kLanes];
};

MAMBA_INLINE uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}
MAMBA_INLINE float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

MAMBA_INLINE Vec set1(float value) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) {
        r.v[i] = value;
    }
    return r;
}
MAMBA_INLINE Vec zero() {
    return set1(0.0f);
}
MAMBA_INLINE Vec add(Vec a, Vec b) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) {
        r.v[i] = a.v[i] + b.v[i];
    }
    return r;
}
MAMBA_INLINE Vec subtract(Vec a, Vec b) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) {
        r.v[i] = a.v[i] - b.v[i];
    }
    return r;
}
MAMBA_INLINE Vec multiply(Vec a, Vec b) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) {
        r.v[i] = a.v[i] * b.v[i];
    }
    return r;
}
MAMBA_INLINE Vec divide(Vec a, Vec b) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) {
        r.v[i] = a.v[i] / b.v[i];
    }
    return r;
}
// a * b + c; rounded twice here, the baseline CPU has no fused instruction
MAMBA_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return add(multiply(a, b), c);
}
// maximum and minimum give b where a or b is NaN.
MAMBA_INLINE Vec maximum(Vec a, Vec b) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) {
        r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    }
    return r;
}
MAMBA_INLINE Vec minimum(Vec a, Vec b) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) {
        r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    }
    return r;
}
// For |a| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
MAMBA_INLINE Vec round_nearest(Vec a) {
    const Vec magic = set1(12582912.0f);
    return subtract(add(a, magic), magic);
}
// a > b ? x : y in each lane
MAMBA_INLINE Vec select_greater(Vec a, Vec b, Vec x, Vec y) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) {
        r.v[i] = a.v[i] > b.v[i] ? x.v[i] : y.v[i];
    }
    return r;
}
MAMBA_INLINE float sum(Vec a) {
    float total = 0.0f;
    for (int i = 0; i < kLanes; ++i) {
        total += a.v[i];
    }
    return total;
}
MAMBA_INLINE float largest_lane(Vec a) {
    float largest = a.v[0];
    for (int i = 1; i < kLanes; ++i) {
        largest = a.v[i] > largest ? a.v[i] : largest;
    }
    return largest;
}

// The sums of kLanes vectors, each in the lane of its vector's place.
inline Vec sum_each(const Vec* rows) {
    Vec sums;
    for (int i = 0; i < kLanes; ++i) {
        sums.v[i] = sum(rows[i]);
    }
    return sums;
}

// x = whole + fraction, |fraction| <= 1/2, with x held where scale_by_power needs it: 2^-127 comes out as 0, 2^128 as infinity.
MAMBA_INLINE void split_power(Vec x, Vec& whole, Vec& fraction) {
    const Vec limited = minimum(set1(128.0f), maximum(set1(-127.0f), x));
    whole = round_nearest(limited);
    fraction = subtract(limited, whole);
}
// a * 2^whole for an integer-valued whole in [-127, 128] and a near 1
MAMBA_INLINE Vec scale_by_power(Vec a, Vec whole) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) {
        // the low bits of whole + 1.5 * 2^23 are the integer; of a NaN they are anything
        const uint32_t power = float_bits(whole.v[i] + 12582912.0f) << 23;
        const float scaled = bits_float(float_bits(a.v[i]) + power);
        r.v[i] = a.v[i] == a.v[i] ? scaled : a.v[i];
    }
    return r;
}
// w = 2^exponent * mantissa with mantissa in [sqrt(1/2), sqrt(2)); inverse_scale = 2^-exponent. For normal w > 0.
MAMBA_INLINE void split_exponent(Vec w, Vec& exponent, Vec& mantissa, Vec& inverse_scale) {
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t bits = float_bits(w.v[i]);
        const int32_t power = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
        exponent.v[i] = static_cast<float>(power);
        mantissa.v[i] = bits_float(bits - (static_cast<uint32_t>(power) << 23));
        inverse_scale.v[i] = bits_float(static_cast<uint32_t>(127 - power) << 23);
    }
}

MAMBA_INLINE float to_float(float value) {
    return value;
}
MAMBA_INLINE float to_float(int8_t value) {
    return static_cast<float>(value);
}
MAMBA_INLINE float to_float(Bfloat16 value) {
    return bits_float(static_cast<uint32_t>(value.bits) << 16);
}
inline float to_float(Half value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t magnitude = value.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) {  // infinity, NaN
        return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    }
    if (magnitude < 0x400u) {  // zero, subnormal: a multiple of 2^-24
        const float size = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
        return sign != 0 ? -size : size;
    }
    return bits_float(sign | ((magnitude + 0x1c000u) << 13));
}
MAMBA_INLINE void from_float(float value, float& out) {
    out = value;
}
MAMBA_INLINE void from_float(float value, Bfloat16& out) {
    const uint32_t bits = float_bits(value);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out.bits = static_cast<uint16_t>(nan ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void from_float(float value, Half& out) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t result;
    if (magnitude > 0x7f800000u) {
        result = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // from 65520 on the nearest half is infinity
        result = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, rounded by adding 2^23 * 2^-24
        result = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        result = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    }
    out.bits = static_cast<uint16_t>(sign | result);
}

// The first count <= kLanes elements; the other lanes are zero.
template <typename T>
MAMBA_INLINE Vec load_partial(const T* data, int count) {
    Vec r = zero();
    for (int i = 0; i < count; ++i) {
        r.v[i] = to_float(data[i]);
    }
    return r;
}
template <typename T>
MAMBA_INLINE void store_partial(T* data, Vec a, int count) {
    for (int i = 0; i < count; ++i) {
        from_float(a.v[i], data[i]);
    }
}
template <typename T>
MAMBA_INLINE Vec load(const T* data) {
    return load_partial(data, kLanes);
}
template <typename T>
MAMBA_INLINE void store(T* data, Vec a) {
    store_partial(data, a, kLanes);
}

MAMBA_INLINE void load_pair(const Bfloat16* data, Vec& first, Vec& second) {
    uint32_t pairs[kLanes];
    memcpy(pairs, data, sizeof(pairs));
    for (int i = 0; i < kLanes; ++i) {
        first.v[i] = bits_float(pairs[i] << 16);
        second.v[i] = bits_float(pairs[i] & 0xffff0000u);
    }
}
MAMBA_INLINE void store_pair(Bfloat16* data, Vec first, Vec second) {
    for (int i = 0; i < kLanes; ++i) {
        from_float(first.v[i], data[2 * i]);
        from_float(second.v[i], data[2 * i + 1]);
    }
}

// Of the elements of a, then b: those at even places and those at odd ones. And the reverse.
inline void split_alternate(Vec a, Vec b, Vec& even, Vec& odd) {
    for (int i = 0; i < kLanes; ++i) {
        const Vec& from = 2 * i < kLanes ? a : b;
        even.v[i] = from.v[2 * i % kLanes];
        odd.v[i] = from.v[2 * i % kLanes + 1];
    }
}
inline void join_alternate(Vec even, Vec odd, Vec& a, Vec& b) {
    for (int i = 0; i < kLanes; ++i) {
        Vec& to = 2 * i < kLanes ? a : b;
        to.v[2 * i % kLanes] = even.v[i];
        to.v[2 * i % kLanes + 1] = odd.v[i];
    }
}

// Integer-valued lanes within 16 bits.
MAMBA_INLINE void store_integers(int16_t* data, Vec a) {
    for (int i = 0; i < kLanes; ++i) {
        data[i] = static_cast<int16_t>(a.v[i]);
    }
}

// 32 weights of int8 as 16 bits.
struct Int8Block {
    int16_t v[32];
};
MAMBA_INLINE Int8Block load_block(const int8_t* data) {
    Int8Block block;
    for (int i = 0; i < 32; ++i) {
        block.v[i] = data[i];
    }
    return block;
}
// Their products with 32 integers, summed up exactly and then rounded to a float.
MAMBA_INLINE Vec multiply_block(const Int8Block& block, const int16_t* x) {
    Vec sums = zero();
    int32_t total = 0;
    for (int i = 0; i < 32; ++i) {
        total += static_cast<int32_t>(block.v[i]) * static_cast<int32_t>(x[i]);
    }
    sums.v[0] = static_cast<float>(total);
    return sums;
}

// The matrix whose rows are rows[0..kLanes-1], transposed.
MAMBA_INLINE void transpose(Vec* rows) {
    for (int i = 0; i < kLanes; ++i) {
        for (int j = 0; j < i; ++j) {
            const float swapped = rows[i].v[j];
            rows[i].v[j] = rows[j].v[i];
            rows[j].v[i] = swapped;
        }
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
