// Small matrix products on tensor cores: C (16 x 8 a warp, float32) += A (16 x 16) B (16 x 8), with A and B in shared memory.
//
// float16 and bfloat16 go in as they are. A float32 operand is split into three bfloat16 parts whose sum it is; of the nine
// partial products the six that matter to float32 are added, so that the result is as good as float32 arithmetic.
// Compute capability 7.5 has tensor cores for float16 only: there the others are computed by the ordinary cores.
//
// In the comments g = lane / 4 and t = lane % 4. An accumulator holds (row g, columns 2t, 2t + 1), (row g + 8, the same).
#pragma once

#include "common/cuda_vector.cuh"
#include "common/ptx_matrix.cuh"

namespace mamba {

// Elements that follow each row of a tile in shared memory, so that the rows of a fragment lie in different banks.
constexpr int kTilePad = 8;

// Where an element of a tile lies, from the first on.
template <int kColumns>
struct PaddedTile {
    static constexpr int kPitch = kColumns + kTilePad;
    static __device__ __forceinline__ int at(int row, int column) { return row * kPitch + column; }
};

template <typename T>
struct OperandParts {
    static constexpr int kCount = 1;
};
template <>
struct OperandParts<float> {
    static constexpr int kCount = 3;
};

// An A fragment (16 x 16), or two neighbouring B fragments (16 x 8 each: r[0..1] and r[2..3]).
template <typename T>
struct Operand {
    uint32_t r[OperandParts<T>::kCount][4];
};

// ---- packing -------------------------------------------------------------------------------------------------------

// Puts two neighbouring elements into place i of an operand.
template <typename T>
__device__ __forceinline__ void set_pair(Operand<T>& operand, int i, float low, float high) {
    operand.r[0][i] = pack2<T>(low, high);
}
template <>
__device__ __forceinline__ void set_pair<float>(Operand<float>& operand, int i, float low, float high) {
#pragma unroll
    for (int part = 0; part < 3; ++part) {
        operand.r[part][i] = pack2<__nv_bfloat16>(low, high);
        const float2 taken = unpack2<__nv_bfloat16>(operand.r[part][i]);
        low -= taken.x;
        high -= taken.y;
    }
}

// ---- fragments from shared memory ----------------------------------------------------------------------------------

// A (m, k) = tile[m][k]; tile points at element (0, 0) of the fragment.
template <typename T>
__device__ __forceinline__ void load_a(Operand<T>& a, const T* tile, int stride, int lane) {
    ldmatrix_x4(a.r[0], tile + (lane % 16) * stride + lane / 16 * 8);
}
template <>
__device__ __forceinline__ void load_a<float>(Operand<float>& a, const float* tile, int stride, int lane) {
    const float* at = tile + lane / 4 * stride + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = *reinterpret_cast<const float2*>(at + i % 2 * 8 * stride + i / 2 * 8);
        set_pair<float>(a, i, pair.x, pair.y);
    }
}

// A (m, k) = tile[k][m].
template <typename T>
__device__ __forceinline__ void load_a_transposed(Operand<T>& a, const T* tile, int stride, int lane) {
    ldmatrix_x4_trans(a.r[0], tile + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8);
}
template <>
__device__ __forceinline__ void load_a_transposed<float>(Operand<float>& a, const float* tile, int stride, int lane) {
    const float* at = tile + lane % 4 * 2 * stride + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* element = at + i / 2 * 8 * stride + i % 2 * 8;
        set_pair<float>(a, i, element[0], element[stride]);
    }
}

// A (m, k) *= weight[k].
template <typename T>
__device__ __forceinline__ void weight_a(Operand<T>& a, const float* weight, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 w = *reinterpret_cast<const float2*>(weight + lane % 4 * 2 + i / 2 * 8);
        const float2 value = unpack2<T>(a.r[0][i]);
        a.r[0][i] = pack2<T>(value.x * w.x, value.y * w.y);
    }
}

// A (m, k) = tile[k][m] weight[k].
template <typename T>
__device__ __forceinline__ void load_a_weighted(Operand<T>& a, const T* tile, int stride, const float* weight, int lane) {
    load_a_transposed<T>(a, tile, stride, lane);
    weight_a<T>(a, weight, lane);
}
template <>
__device__ __forceinline__ void load_a_weighted<float>(Operand<float>& a, const float* tile, int stride, const float* weight,
                                                       int lane) {
    const float* at = tile + lane % 4 * 2 * stride + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 w = *reinterpret_cast<const float2*>(weight + lane % 4 * 2 + i / 2 * 8);
        const float* element = at + i / 2 * 8 * stride + i % 2 * 8;
        set_pair<float>(a, i, element[0] * w.x, element[stride] * w.y);
    }
}

// Two B fragments, B (k, n) = tile[n][k], n = 0..15.
template <typename T>
__device__ __forceinline__ void load_b(Operand<T>& b, const T* tile, int stride, int lane) {
    ldmatrix_x4(b.r[0], tile + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8);
}
template <>
__device__ __forceinline__ void load_b<float>(Operand<float>& b, const float* tile, int stride, int lane) {
    const float* at = tile + lane / 4 * stride + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = *reinterpret_cast<const float2*>(at + i / 2 * 8 * stride + i % 2 * 8);
        set_pair<float>(b, i, pair.x, pair.y);
    }
}

// Two B fragments, B (k, n) = tile[k][n], n = 0..15.
template <typename T>
__device__ __forceinline__ void load_b_transposed(Operand<T>& b, const T* tile, int stride, int lane) {
    ldmatrix_x4_trans(b.r[0], tile + lane % 16 * stride + lane / 16 * 8);
}
template <>
__device__ __forceinline__ void load_b_transposed<float>(Operand<float>& b, const float* tile, int stride, int lane) {
    const float* at = tile + lane % 4 * 2 * stride + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* element = at + i % 2 * 8 * stride + i / 2 * 8;
        set_pair<float>(b, i, element[0], element[stride]);
    }
}

// Two B fragments, B (k, n) = S[n][k], from the accumulators of S's columns k = 0..7 and k = 8..15: they lie as B wants them.
template <typename T>
__device__ __forceinline__ void b_from_accumulators(Operand<T>& b, const float (&low)[4], const float (&high)[4]) {
    set_pair<T>(b, 0, low[0], low[1]);
    set_pair<T>(b, 1, high[0], high[1]);
    set_pair<T>(b, 2, low[2], low[3]);
    set_pair<T>(b, 3, high[2], high[3]);
}

// The A fragment (m, k) = S[m][k] from the accumulators of S's columns k = 0..7 and k = 8..15.
template <typename T>
__device__ __forceinline__ void a_from_accumulators(Operand<T>& a, const float (&low)[4], const float (&high)[4]) {
    set_pair<T>(a, 0, low[0], low[1]);
    set_pair<T>(a, 1, low[2], low[3]);
    set_pair<T>(a, 2, high[0], high[1]);
    set_pair<T>(a, 3, high[2], high[3]);
}

// ---- products ------------------------------------------------------------------------------------------------------

// The same sums on the ordinary cores, where there is no such instruction. A call, since the kernels hold hundreds of products.
template <typename T>
__device__ __noinline__ float4 multiply_add_emulated(float4 c, uint4 a, uint2 b) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int pair = 0; pair < 8; ++pair) {
        const int row = lane / 4 * 4 + pair % 4;     // the lane that holds these elements of A
        const int column = lane % 4 * 8 + pair % 4;  // and of B
        const uint32_t b_pair = pair < 4 ? b.x : b.y;
        const float2 top = unpack2<T>(__shfl_sync(0xffffffffu, pair < 4 ? a.x : a.z, row));
        const float2 bottom = unpack2<T>(__shfl_sync(0xffffffffu, pair < 4 ? a.y : a.w, row));
        const float2 left = unpack2<T>(__shfl_sync(0xffffffffu, b_pair, column));
        const float2 right = unpack2<T>(__shfl_sync(0xffffffffu, b_pair, column + 4));
        c.x = fmaf(top.y, left.y, fmaf(top.x, left.x, c.x));
        c.y = fmaf(top.y, right.y, fmaf(top.x, right.x, c.y));
        c.z = fmaf(bottom.y, left.y, fmaf(bottom.x, left.x, c.z));
        c.w = fmaf(bottom.y, right.y, fmaf(bottom.x, right.x, c.w));
    }
    return c;
}

template <typename T>
__device__ __forceinline__ void multiply_add_16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add_16<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    mma_m16n8k16<__half>(c, a, b0, b1);
#else
    mma_m16n8k8(c, a[0], a[1], b0);
    mma_m16n8k8(c, a[2], a[3], b1);
#endif
}

template <>
__device__ __forceinline__ void multiply_add_16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                               uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    mma_m16n8k16<__nv_bfloat16>(c, a, b0, b1);
#else
    const float4 sum = multiply_add_emulated<__nv_bfloat16>(make_float4(c[0], c[1], c[2], c[3]),
                                                            make_uint4(a[0], a[1], a[2], a[3]), make_uint2(b0, b1));
    c[0] = sum.x;
    c[1] = sum.y;
    c[2] = sum.z;
    c[3] = sum.w;
#endif
}

// c += a b, where b is fragment 0 or 1 of the two in `pair`. Every lane of the warp must come here.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const Operand<T>& a, const Operand<T>& pair, int fragment) {
    multiply_add_16<T>(c, a.r[0], pair.r[0][2 * fragment], pair.r[0][2 * fragment + 1]);
}
template <>
__device__ __forceinline__ void multiply_add<float>(float (&c)[4], const Operand<float>& a, const Operand<float>& pair,
                                                    int fragment) {
#pragma unroll
    for (int order = 2; order >= 0; --order) {  // the smallest products first
#pragma unroll
        for (int i = 0; i <= order; ++i) {
            multiply_add_16<__nv_bfloat16>(c, a.r[i], pair.r[order - i][2 * fragment], pair.r[order - i][2 * fragment + 1]);
        }
    }
}

}  // namespace mamba
