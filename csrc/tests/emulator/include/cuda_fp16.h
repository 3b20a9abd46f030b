// float16 as csrc uses it: stored, and converted to float and back.
#pragma once

#include <cuda_runtime.h>
#include <immintrin.h>

struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};
inline float __half2float(__half value) {
    return _cvtsh_ss(value.bits);
}
inline __half __float2half_rn(float value) {
    return {static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))};
}
inline float2 __half22float2(__half2 pair) {
    return {__half2float(pair.x), __half2float(pair.y)};
}
inline __half2 __floats2half2_rn(float x, float y) {
    return {__float2half_rn(x), __float2half_rn(y)};
}
