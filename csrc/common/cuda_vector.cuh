// Several neighbouring elements moved with one memory access and kept packed in registers until they are used.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/integers.h"

namespace mamba {

// ---- two 16-bit elements in a word -----------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t word);
template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t word) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// ---- N elements ------------------------------------------------------------------------------------------------------

// N elements as they lie in memory; N * sizeof(T) is 4, 8 or a multiple of 16 bytes, or N is 1.
template <typename T, int N>
struct Packed {
    uint32_t word[N * sizeof(T) / 4];
};
template <typename T>
struct Packed<T, 1> {
    T element;
};

template <typename T, int N>
__device__ __forceinline__ Packed<T, N> packed_zero() {
    Packed<T, N> packed;
    if constexpr (N == 1) {
        packed.element = from_float<T>(0.0f);
    } else {
#pragma unroll
        for (int i = 0; i < static_cast<int>(N * sizeof(T) / 4); ++i) {
            packed.word[i] = 0;
        }
    }
    return packed;
}

// Accesses of up to 16 bytes; the address must be a multiple of their size. packed_store is for global memory.
template <typename T, int N>
__device__ __forceinline__ Packed<T, N> packed_load(const T* address) {
    Packed<T, N> packed;
    if constexpr (N == 1) {
        packed.element = *address;
    } else if constexpr (N * sizeof(T) % 16 == 0) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(N * sizeof(T) / 16); ++i) {
            const uint4 words = reinterpret_cast<const uint4*>(address)[i];
            packed.word[4 * i] = words.x;
            packed.word[4 * i + 1] = words.y;
            packed.word[4 * i + 2] = words.z;
            packed.word[4 * i + 3] = words.w;
        }
    } else if constexpr (N * sizeof(T) == 8) {
        const uint2 words = *reinterpret_cast<const uint2*>(address);
        packed.word[0] = words.x;
        packed.word[1] = words.y;
    } else {
        static_assert(N * sizeof(T) == 4, "4, 8 or a multiple of 16 bytes");
        packed.word[0] = *reinterpret_cast<const uint32_t*>(address);
    }
    return packed;
}

template <typename T, int N>
__device__ __forceinline__ void packed_store(T* address, const Packed<T, N>& packed) {
    if constexpr (N == 1) {
        *address = packed.element;
    } else if constexpr (N * sizeof(T) % 16 == 0) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(N * sizeof(T) / 16); ++i) {
            st_global_v4_b32(reinterpret_cast<uint4*>(address) + i, packed.word + 4 * i);
        }
    } else if constexpr (N * sizeof(T) == 8) {
        *reinterpret_cast<uint2*>(address) = make_uint2(packed.word[0], packed.word[1]);
    } else {
        static_assert(N * sizeof(T) == 4, "4, 8 or a multiple of 16 bytes");
        *reinterpret_cast<uint32_t*>(address) = packed.word[0];
    }
}

// The same for 16 bytes of data that is too much to stay in the caches: it leaves them first.
template <typename T, int N>
__device__ __forceinline__ void packed_store_once(T* address, const Packed<T, N>& packed) {
    static_assert(N * sizeof(T) == 16, "one access");
    __stcs(reinterpret_cast<uint4*>(address), make_uint4(packed.word[0], packed.word[1], packed.word[2], packed.word[3]));
}

// values[0..N) from packed, and back.
template <typename T, int N>
__device__ __forceinline__ void unpack(const Packed<T, N>& packed, float* values) {
    if constexpr (N == 1) {
        values[0] = to_float(packed.element);
    } else if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            values[i] = __uint_as_float(packed.word[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const float2 pair = unpack2<T>(packed.word[i]);
            values[2 * i] = pair.x;
            values[2 * i + 1] = pair.y;
        }
    }
}

template <typename T, int N>
__device__ __forceinline__ Packed<T, N> pack(const float* values) {
    Packed<T, N> packed;
    if constexpr (N == 1) {
        packed.element = from_float<T>(values[0]);
    } else if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            packed.word[i] = __float_as_uint(values[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            packed.word[i] = pack2<T>(values[2 * i], values[2 * i + 1]);
        }
    }
    return packed;
}

// The elements in the opposite order.
template <typename T, int N>
__device__ __forceinline__ void mirror(Packed<T, N>& packed) {
    constexpr int kWords = N * sizeof(T) / 4;
    const Packed<T, N> given = packed;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        const uint32_t word = given.word[kWords - 1 - i];
        packed.word[i] = sizeof(T) == 2 ? __byte_perm(word, word, 0x1032) : word;
    }
}

// The first `left` of N elements that lie `stride` apart, and zeros after them.
template <typename T, int N>
__device__ __forceinline__ Packed<T, N> packed_gather(const T* address, int64_t stride, int64_t left) {
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        values[i] = i < left ? to_float(address[i * stride]) : 0.0f;
    }
    return pack<T, N>(values);
}
template <typename T, int N>
__device__ __forceinline__ void scatter(T* address, int64_t stride, int64_t left, const float* values) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (i < left) {
            address[i * stride] = from_float<T>(values[i]);
        }
    }
}

// The first `left` of N neighbours and zeros after them. vectors: accesses of up to 16 bytes are aligned.
template <typename T, int N>
__device__ __forceinline__ Packed<T, N> packed_load_padded(const T* address, int64_t left, bool vectors) {
    return vectors && left >= N ? packed_load<T, N>(address) : packed_gather<T, N>(address, 1, left);
}

// ---- elements whose dtype is known only at run time ------------------------------------------------------------------

__device__ __forceinline__ void store_from_float(void* data, int64_t index, int32_t dtype, float value) {
    if (dtype == MAMBA_FLOAT32) {
        static_cast<float*>(data)[index] = value;
    } else if (dtype == MAMBA_FLOAT16) {
        static_cast<__half*>(data)[index] = from_float<__half>(value);
    } else {
        static_cast<__nv_bfloat16*>(data)[index] = from_float<__nv_bfloat16>(value);
    }
}

// The same in two steps, so that several loads are under way before the first is converted: a branch on the dtype around each
// load would put them in a row.
__device__ __forceinline__ uint32_t load_bits(const void* data, int64_t index, int32_t dtype) {
    return dtype == MAMBA_FLOAT32 ? static_cast<const uint32_t*>(data)[index] : static_cast<const uint16_t*>(data)[index];
}
__device__ __forceinline__ float float_from_bits(uint32_t bits, int32_t dtype) {
    if (dtype == MAMBA_FLOAT32) {
        return __uint_as_float(bits);
    }
    return dtype == MAMBA_FLOAT16 ? unpack2<__half>(bits).x : unpack2<__nv_bfloat16>(bits).x;
}

__device__ __forceinline__ void store_bits(void* data, int64_t index, int32_t dtype, uint32_t bits) {
    if (dtype == MAMBA_FLOAT32) {
        static_cast<uint32_t*>(data)[index] = bits;
    } else {
        static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(bits);
    }
}

// N neighbours with accesses of up to 16 bytes; the address must be a multiple of their size.
template <int N>
__device__ __forceinline__ void load_vector_as_float(const void* data, int64_t index, int32_t dtype, float* values) {
    if (dtype == MAMBA_FLOAT32) {
        unpack<float, N>(packed_load<float, N>(static_cast<const float*>(data) + index), values);
    } else if (dtype == MAMBA_FLOAT16) {
        unpack<__half, N>(packed_load<__half, N>(static_cast<const __half*>(data) + index), values);
    } else {
        unpack<__nv_bfloat16, N>(packed_load<__nv_bfloat16, N>(static_cast<const __nv_bfloat16*>(data) + index), values);
    }
}

// N neighbours of a tensor whose dtype is known only at run time, in two steps, like load_bits. As they lie in memory: a
// float32 a word, or two of 16 bits; their address is a multiple of their size, or of 16. Zeros where `valid` is false.
template <int N>
struct NeighbourBits {
    uint32_t word[N];

    __device__ __forceinline__ void load(const void* data, int64_t index, int32_t dtype, bool valid) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            word[i] = 0;
        }
        if (!valid) {
            return;
        }
        if constexpr (N == 1) {
            word[0] = load_bits(data, index, dtype);
        } else if (dtype == MAMBA_FLOAT32) {
            const Packed<float, N> packed = packed_load<float, N>(static_cast<const float*>(data) + index);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                word[i] = packed.word[i];
            }
        } else {
            const Packed<__half, N> packed = packed_load<__half, N>(static_cast<const __half*>(data) + index);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                word[i] = packed.word[i];
            }
        }
    }
    // The first `left` of N elements that lie `stride` apart, and zeros after them.
    __device__ __forceinline__ void gather(const void* data, int64_t index, int64_t stride, int32_t dtype, int left) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            word[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const uint32_t bits = i < left ? load_bits(data, index + i * stride, dtype) : 0;
            if (N == 1 || dtype == MAMBA_FLOAT32) {
                word[i] = bits;
            } else {
                word[i / 2] |= bits << (i % 2 * 16);
            }
        }
    }
    __device__ __forceinline__ void to_floats(int32_t dtype, float* values) const {
        if (N == 1 || dtype == MAMBA_FLOAT32) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                values[i] = float_from_bits(word[i], dtype);
            }
        } else {
#pragma unroll
            for (int i = 0; i + 1 < N; i += 2) {
                const float2 pair = dtype == MAMBA_FLOAT16 ? unpack2<__half>(word[i / 2]) : unpack2<__nv_bfloat16>(word[i / 2]);
                values[i] = pair.x;
                values[i + 1] = pair.y;
            }
        }
    }
};

}  // namespace mamba
