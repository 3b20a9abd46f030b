// Several neighbouring elements moved with one memory access and kept packed in registers until they are used.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/integers.h"

namespace mamba {

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
    } else if constexpr (!kIs16Bit<T>) {
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
    } else if constexpr (!kIs16Bit<T>) {
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
        packed.word[i] = kIs16Bit<T> ? __byte_perm(word, word, 0x1032) : word;
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

// N neighbours with accesses of up to 16 bytes; the address must be a multiple of their size.
template <int N>
__device__ __forceinline__ void load_vector_as_float(const void* data, int64_t index, int32_t dtype, float* values) {
    with_dtype(dtype, [&](auto of) {
        using T = typename decltype(of)::Type;
        unpack<T, N>(packed_load<T, N>(static_cast<const T*>(data) + index), values);
    });
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
        with_dtype(dtype, [&](auto of) {
            using T = typename decltype(of)::Type;
            if constexpr (N == 1 || !kIs16Bit<T>) {
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    values[i] = DtypeTraits<T>::float_of_bits(word[i]);
                }
            } else {
#pragma unroll
                for (int i = 0; i + 1 < N; i += 2) {
                    const float2 pair = unpack2<T>(word[i / 2]);
                    values[i] = pair.x;
                    values[i + 1] = pair.y;
                }
            }
        });
    }
};

}  // namespace mamba
