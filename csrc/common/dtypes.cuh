// The element types of tensors as kernels know them: a struct each. A dtype more is one more here, in with_dtype and
// launchers_of (cuda_device.h), with its code (mamba_types.h), name (check.cpp), set (kernel_table.h) and file
// (CMakeLists.txt).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "mamba_kernels.h"

namespace mamba {

// bits: an element as it lies in memory, in the lower half of a word if it has 16. A pair is two of 16 bits, the first one in
// the lower half.
template <typename T>
struct DtypeTraits;

template <>
struct DtypeTraits<float> {
    static constexpr int32_t kCode = MAMBA_FLOAT32;

    static __device__ __forceinline__ float to_float(float value) { return value; }
    static __device__ __forceinline__ float from_float(float value) { return value; }
    static __device__ __forceinline__ float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
};

template <>
struct DtypeTraits<__half> {
    static constexpr int32_t kCode = MAMBA_FLOAT16;

    static __device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
    static __device__ __forceinline__ __half from_float(float value) { return __float2half_rn(value); }
    static __device__ __forceinline__ float float_of_bits(uint32_t bits) { return unpack2(bits).x; }
    static __device__ __forceinline__ float2 unpack2(uint32_t pair) {
        return __half22float2(*reinterpret_cast<const __half2*>(&pair));
    }
    static __device__ __forceinline__ uint32_t pack2(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
};

template <>
struct DtypeTraits<__nv_bfloat16> {
    static constexpr int32_t kCode = MAMBA_BFLOAT16;

    static __device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
    static __device__ __forceinline__ __nv_bfloat16 from_float(float value) { return __float2bfloat16_rn(value); }
    static __device__ __forceinline__ float float_of_bits(uint32_t bits) { return unpack2(bits).x; }
    static __device__ __forceinline__ float2 unpack2(uint32_t pair) {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
    static __device__ __forceinline__ uint32_t pack2(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
};

template <typename T>
constexpr int32_t kDtype = DtypeTraits<T>::kCode;
template <typename T>
constexpr bool kIs16Bit = sizeof(T) == 2;

template <typename T>
__device__ __forceinline__ float to_float(T value) {
    return DtypeTraits<T>::to_float(value);
}
template <typename T>
__device__ __forceinline__ T from_float(float value) {
    return DtypeTraits<T>::from_float(value);
}
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t pair) {
    return DtypeTraits<T>::unpack2(pair);
}
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
    return DtypeTraits<T>::pack2(low, high);
}

// ---- dtypes known only at run time (weights, biases, single-step inputs) --------------------------------------------

template <typename T>
struct OfDtype {
    using Type = T;
};

// visit(OfDtype<T>()), where T is what the code stands for.
template <class Visit>
__device__ __forceinline__ auto with_dtype(int32_t dtype, const Visit& visit) {
    if (dtype == MAMBA_FLOAT32) {
        return visit(OfDtype<float>());
    }
    if (dtype == MAMBA_FLOAT16) {
        return visit(OfDtype<__half>());
    }
    return visit(OfDtype<__nv_bfloat16>());
}

__device__ __forceinline__ float load_as_float(const void* data, int64_t index, int32_t dtype) {
    return with_dtype(dtype, [&](auto of) {
        using T = typename decltype(of)::Type;
        return to_float(static_cast<const T*>(data)[index]);
    });
}
__device__ __forceinline__ void store_from_float(void* data, int64_t index, int32_t dtype, float value) {
    with_dtype(dtype, [&](auto of) {
        using T = typename decltype(of)::Type;
        static_cast<T*>(data)[index] = from_float<T>(value);
    });
}

// load_as_float in two steps, so that several loads are under way before the first is converted: a branch on the dtype around
// each load would put them in a row.
__device__ __forceinline__ uint32_t load_bits(const void* data, int64_t index, int32_t dtype) {
    return dtype == MAMBA_FLOAT32 ? static_cast<const uint32_t*>(data)[index] : static_cast<const uint16_t*>(data)[index];
}
__device__ __forceinline__ float float_from_bits(uint32_t bits, int32_t dtype) {
    return with_dtype(dtype, [&](auto of) { return DtypeTraits<typename decltype(of)::Type>::float_of_bits(bits); });
}
__device__ __forceinline__ void store_bits(void* data, int64_t index, int32_t dtype, uint32_t bits) {
    if (dtype == MAMBA_FLOAT32) {
        static_cast<uint32_t*>(data)[index] = bits;
    } else {
        static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(bits);
    }
}

}  // namespace mamba
