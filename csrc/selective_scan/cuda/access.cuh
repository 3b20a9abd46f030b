// How a lane reads and writes its steps of a row in global memory, wherever the row begins.
#pragma once

#include "common/cuda_vector.cuh"
#include "selective_scan/cuda/layout.cuh"

namespace mamba {

// How a tile's rows can be read: step by step; where its steps all exist, in vectors that begin before the elements and end
// behind them; in vectors that begin and end with them; and so that all that the tile has room for exists.
enum class Access { kSteps, kShifted, kAligned, kWhole };

template <Access kAccess_>
struct AccessIs {
    static constexpr Access kAccess = kAccess_;
};

// Calls function(AccessIs<...>{}). aligned: rows begin at multiples of 16 bytes; inside: see vectors_within.
template <class Layout, class Function>
__device__ __forceinline__ void with_access(bool aligned, bool whole, bool inside, const Function& function) {
    if constexpr (Layout::kWhole) {
        function(AccessIs<Access::kWhole>{});
    } else if (aligned && whole) {
        function(AccessIs<Access::kWhole>{});
    } else if (aligned) {
        function(AccessIs<Access::kAligned>{});
    } else if (inside) {
        function(AccessIs<Access::kShifted>{});
    } else {
        function(AccessIs<Access::kSteps>{});
    }
}

// Whether a tile is whole, and a vector on either side of it is of the same rows, or may be (`others`) of others.
template <class Layout>
__device__ __forceinline__ bool vectors_within(int64_t first_step, int64_t seqlen, bool others = false) {
    const int most = others ? 0 : 8;  // elements, of 16 bytes at least
    return first_step >= most && first_step + Layout::kTile + most <= seqlen;
}

// kCount elements from `at` on, wherever that is; zero where they do not exist. They come in vectors of 8 bytes: larger ones
// would be fewer loads, but shifted twice. What is a mask or a bit of the address here takes half as many instructions as
// selections and counts of elements.
template <typename T, int kCount>
__device__ __forceinline__ Packed<T, kCount> load_shifted(const T* at, bool exist) {
    constexpr int kWords = kCount * sizeof(T) / 4;
    constexpr int kVector = kWords < 2 ? kWords : 2;  // words
    constexpr int kElements = kVector * 4 / sizeof(T);
    const uintptr_t address = reinterpret_cast<uintptr_t>(at);
    const T* const from = reinterpret_cast<const T*>(reinterpret_cast<const char*>(at) - address % (4 * kVector));
    uint32_t word[kWords + kVector];
#pragma unroll
    for (int i = 0; i < kWords + kVector; i += kVector) {
        Packed<T, kElements> vector = packed_zero<T, kElements>();
        if (exist) {
            vector = packed_load<T, kElements>(from + i * 4 / static_cast<int>(sizeof(T)));
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            word[i + j] = vector.word[j];
        }
    }
    if constexpr (kVector == 2) {
        const int second = opaque(static_cast<int>(static_cast<uint32_t>(address) << 29) >> 31);  // all bits: they begin there
#pragma unroll
        for (int i = 0; i <= kWords; ++i) {
            word[i] = (word[i] & ~second) | (word[i + 1] & second);
        }
    }
    const uint32_t bits = static_cast<uint32_t>(address) * 8;  // the low five of this count: 0 or 16
    Packed<T, kCount> packed;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        packed.word[i] = kIs16Bit<T> ? __funnelshift_r(word[i], word[i + 1], bits) : word[i];
    }
    return packed;
}

// kCount elements from `at` on, in the order of memory. Of the steps, which lie there in the opposite order with reverse, the
// first `valid` exist (which may be negative, and but with kSteps is a multiple of kCount); the others are zero.
template <typename T, int kCount, Access kAccess>
__device__ __forceinline__ Packed<T, kCount> load_steps(const T* at, int valid, bool reverse) {
    if constexpr (kAccess == Access::kWhole) {
        return packed_load<T, kCount>(at);
    } else if constexpr (kAccess == Access::kAligned) {
        Packed<T, kCount> packed = packed_zero<T, kCount>();
        if (valid > 0) {
            packed = packed_load<T, kCount>(at);
        }
        return packed;
    } else if constexpr (kAccess == Access::kShifted) {
        return load_shifted<T, kCount>(at, valid > 0);
    } else {
        float values[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = (reverse ? kCount - 1 - i : i) < valid ? to_float(at[i]) : 0.0f;
        }
        return pack<T, kCount>(values);
    }
}

// kCount packed 16-bit elements to `at`, wherever it lies, in words where they lie at words' addresses.
template <typename T, int kCount>
__device__ __forceinline__ void store_shifted(T* at, const Packed<T, kCount>& packed) {
    constexpr int kWords = kCount / 2;
    const bool odd = reinterpret_cast<uintptr_t>(at) % 4 != 0;
    uint32_t* const words = reinterpret_cast<uint32_t*>(at + odd);
    uint16_t* const halves = reinterpret_cast<uint16_t*>(at);
    if (odd) {
        halves[0] = static_cast<uint16_t>(packed.word[0]);
        halves[kCount - 1] = static_cast<uint16_t>(packed.word[kWords - 1] >> 16);
    } else {
        words[kWords - 1] = packed.word[kWords - 1];
    }
#pragma unroll
    for (int i = 0; i < kWords - 1; ++i) {
        words[i] = __funnelshift_r(packed.word[i], packed.word[i + 1], odd ? 16 : 0);
    }
}

// Steps in the order of memory.
template <typename T, int kCount>
__device__ __forceinline__ Packed<T, kCount> pack_steps(const float* values, bool reverse) {
    Packed<T, kCount> packed = pack<T, kCount>(values);
    if (reverse) {
        mirror(packed);
    }
    return packed;
}

// The first `valid` of kCount steps to where load_steps has them from.
template <typename T, int kCount>
__device__ __forceinline__ void store_steps(T* at, int valid, bool aligned, bool reverse, const float (&values)[kCount]) {
    if (aligned) {
        if (valid > 0) {
            packed_store<T, kCount>(at, pack_steps<T, kCount>(values, reverse));
        }
        return;
    }
    if constexpr (kIs16Bit<T>) {
        if (valid >= kCount) {
            store_shifted<T, kCount>(at, pack_steps<T, kCount>(values, reverse));
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i < valid) {
            at[reverse ? kCount - 1 - i : i] = from_float<T>(values[i]);
        }
    }
}

// Adds the steps that store_steps would overwrite.
template <typename T, int kCount>
__device__ __forceinline__ void add_steps(const T* at, int valid, bool aligned, bool reverse, float (&values)[kCount]) {
    Packed<T, kCount> packed;
    if (aligned) {
        packed = load_steps<T, kCount, Access::kAligned>(at, valid, reverse);
    } else {
        packed = load_steps<T, kCount, Access::kSteps>(at, valid, reverse);
    }
    if (reverse) {
        mirror(packed);
    }
    float before[kCount];
    unpack<T, kCount>(packed, before);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        values[i] += before[i];
    }
}

}  // namespace mamba
