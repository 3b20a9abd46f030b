// PTX for products of matrices of 16-bit elements, as functions: see ptx.cuh. In the comments g = lane / 4 and t = lane % 4. A
// pair is two neighbouring elements of a row, in one register.
#pragma once

#include "common/dtypes.cuh"
#include "common/ptx.cuh"

namespace mamba {

// ---- a warp ---------------------------------------------------------------------------------------------------------

// Four matrices of 8 x 8: lane i points at row i % 8 of matrix i / 8. r[m]: the pair (row g, columns 2t, 2t + 1) of matrix m.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c (16 x 8) += a (16 x 16) b (16 x 8). c: (row g, columns 2t, 2t + 1), (row g + 8, the same). a: the pairs (row g, column 2t),
// (row g + 8, column 2t), (row g, column 2t + 8), (row g + 8, column 2t + 8). b0, b1: rows (2t, 2t + 1) and (2t + 8, 2t + 9) of
// column g. From 8.0 on.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kDtype<T> == MAMBA_FLOAT16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        static_assert(kDtype<T> == MAMBA_BFLOAT16, "tensor cores take float16 and bfloat16");
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
            "%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// The same with float16 for eight columns of a and eight rows of b, which 7.5 has.
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The opposite of ldmatrix_x4_trans.
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// The opposite of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// ---- a warpgroup ----------------------------------------------------------------------------------------------------

// The compiler must neither compute these registers later nor use them sooner.
__device__ __forceinline__ void fence_registers(float (&r)[4]) {
    asm volatile("" : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]) : : "memory");
}
__device__ __forceinline__ void fence_registers(uint32_t (&r)[4]) {
    asm volatile("" : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]) : : "memory");
}

// The instruction's text, and its accumulators: operands %0 to %15, %31 or %63.
#define MAMBA_C_32(c) MAMBA_C_16(c, 0), MAMBA_C_16(c, 2)
#define MAMBA_C_64(c) MAMBA_C_16(c, 0), MAMBA_C_16(c, 2), MAMBA_C_16(c, 4), MAMBA_C_16(c, 6)
#define MAMBA_C_16(c, i)                                                                                                 \
    "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]), "+f"(c[i + 1][0]), "+f"(c[i + 1][1]), "+f"(c[i + 1][2]), \
        "+f"(c[i + 1][3])
#define MAMBA_NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MAMBA_NAMES_64                                                                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
    "%26, %27, %28, %29, %30, %31"
#define MAMBA_NAMES_128                                                                                                     \
    MAMBA_NAMES_64                                                                                                          \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
    "%55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MAMBA_WGMMA(columns, type, c_names, rest)                                                                      \
    "{\n\t.reg .pred p;\n\tsetp.eq.b32 p, 0, 0;\n\twgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type \
    " {" c_names "}, " rest ";\n\t}"

// Begins c += a B. kRowsOfK: B (k, n) = tile[k][n], else B (k, n) = tile[n][k].
template <typename T, int kRowsOfK>
__device__ __forceinline__ void wgmma(float (&c)[4][4], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (kDtype<T> == MAMBA_FLOAT16) {
        asm volatile(MAMBA_WGMMA("32", "f16", MAMBA_NAMES_32, "{%16, %17, %18, %19}, %20, p, 1, 1, %21")
                     : MAMBA_C_32(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRowsOfK)
                     : "memory");
    } else {
        static_assert(kDtype<T> == MAMBA_BFLOAT16, "tensor cores take float16 and bfloat16");
        asm volatile(MAMBA_WGMMA("32", "bf16", MAMBA_NAMES_32, "{%16, %17, %18, %19}, %20, p, 1, 1, %21")
                     : MAMBA_C_32(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRowsOfK)
                     : "memory");
    }
}
template <typename T, int kRowsOfK>
__device__ __forceinline__ void wgmma(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (kDtype<T> == MAMBA_FLOAT16) {
        asm volatile(MAMBA_WGMMA("64", "f16", MAMBA_NAMES_64, "{%32, %33, %34, %35}, %36, p, 1, 1, %37")
                     : MAMBA_C_64(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRowsOfK)
                     : "memory");
    } else {
        static_assert(kDtype<T> == MAMBA_BFLOAT16, "tensor cores take float16 and bfloat16");
        asm volatile(MAMBA_WGMMA("64", "bf16", MAMBA_NAMES_64, "{%32, %33, %34, %35}, %36, p, 1, 1, %37")
                     : MAMBA_C_64(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRowsOfK)
                     : "memory");
    }
}
template <typename T, int kRowsOfK>
__device__ __forceinline__ void wgmma(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (kDtype<T> == MAMBA_FLOAT16) {
        asm volatile(MAMBA_WGMMA("128", "f16", MAMBA_NAMES_128, "{%64, %65, %66, %67}, %68, p, 1, 1, %69")
                     : MAMBA_C_64(c), MAMBA_C_16(c, 8), MAMBA_C_16(c, 10), MAMBA_C_16(c, 12), MAMBA_C_16(c, 14)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRowsOfK)
                     : "memory");
    } else {
        static_assert(kDtype<T> == MAMBA_BFLOAT16, "tensor cores take float16 and bfloat16");
        asm volatile(MAMBA_WGMMA("128", "bf16", MAMBA_NAMES_128, "{%64, %65, %66, %67}, %68, p, 1, 1, %69")
                     : MAMBA_C_64(c), MAMBA_C_16(c, 8), MAMBA_C_16(c, 10), MAMBA_C_16(c, 12), MAMBA_C_16(c, 14)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRowsOfK)
                     : "memory");
    }
}

// The same with a in shared memory: A (m, k) = tile[m][k].
template <typename T, int kRowsOfK>
__device__ __forceinline__ void wgmma(float (&c)[4][4], uint64_t a, uint64_t b) {
    if constexpr (kDtype<T> == MAMBA_FLOAT16) {
        asm volatile(MAMBA_WGMMA("32", "f16", MAMBA_NAMES_32, "%16, %17, p, 1, 1, 0, %18")
                     : MAMBA_C_32(c)
                     : "l"(a), "l"(b), "n"(kRowsOfK)
                     : "memory");
    } else {
        static_assert(kDtype<T> == MAMBA_BFLOAT16, "tensor cores take float16 and bfloat16");
        asm volatile(MAMBA_WGMMA("32", "bf16", MAMBA_NAMES_32, "%16, %17, p, 1, 1, 0, %18")
                     : MAMBA_C_32(c)
                     : "l"(a), "l"(b), "n"(kRowsOfK)
                     : "memory");
    }
}
template <typename T, int kRowsOfK>
__device__ __forceinline__ void wgmma(float (&c)[8][4], uint64_t a, uint64_t b) {
    if constexpr (kDtype<T> == MAMBA_FLOAT16) {
        asm volatile(MAMBA_WGMMA("64", "f16", MAMBA_NAMES_64, "%32, %33, p, 1, 1, 0, %34")
                     : MAMBA_C_64(c)
                     : "l"(a), "l"(b), "n"(kRowsOfK)
                     : "memory");
    } else {
        static_assert(kDtype<T> == MAMBA_BFLOAT16, "tensor cores take float16 and bfloat16");
        asm volatile(MAMBA_WGMMA("64", "bf16", MAMBA_NAMES_64, "%32, %33, p, 1, 1, 0, %34")
                     : MAMBA_C_64(c)
                     : "l"(a), "l"(b), "n"(kRowsOfK)
                     : "memory");
    }
}

// The same, A (m, k) = tile[k][m].
template <typename T, int kRowsOfK>
__device__ __forceinline__ void wgmma_transposed(float (&c)[4][4], uint64_t a, uint64_t b) {
    if constexpr (kDtype<T> == MAMBA_FLOAT16) {
        asm volatile(MAMBA_WGMMA("32", "f16", MAMBA_NAMES_32, "%16, %17, p, 1, 1, 1, %18")
                     : MAMBA_C_32(c)
                     : "l"(a), "l"(b), "n"(kRowsOfK)
                     : "memory");
    } else {
        static_assert(kDtype<T> == MAMBA_BFLOAT16, "tensor cores take float16 and bfloat16");
        asm volatile(MAMBA_WGMMA("32", "bf16", MAMBA_NAMES_32, "%16, %17, p, 1, 1, 1, %18")
                     : MAMBA_C_32(c)
                     : "l"(a), "l"(b), "n"(kRowsOfK)
                     : "memory");
    }
}
template <typename T, int kRowsOfK>
__device__ __forceinline__ void wgmma_transposed(float (&c)[8][4], uint64_t a, uint64_t b) {
    if constexpr (kDtype<T> == MAMBA_FLOAT16) {
        asm volatile(MAMBA_WGMMA("64", "f16", MAMBA_NAMES_64, "%32, %33, p, 1, 1, 1, %34")
                     : MAMBA_C_64(c)
                     : "l"(a), "l"(b), "n"(kRowsOfK)
                     : "memory");
    } else {
        static_assert(kDtype<T> == MAMBA_BFLOAT16, "tensor cores take float16 and bfloat16");
        asm volatile(MAMBA_WGMMA("64", "bf16", MAMBA_NAMES_64, "%32, %33, p, 1, 1, 1, %34")
                     : MAMBA_C_64(c)
                     : "l"(a), "l"(b), "n"(kRowsOfK)
                     : "memory");
    }
}
template <typename T, int kRowsOfK>
__device__ __forceinline__ void wgmma_transposed(float (&c)[16][4], uint64_t a, uint64_t b) {
    if constexpr (kDtype<T> == MAMBA_FLOAT16) {
        asm volatile(MAMBA_WGMMA("128", "f16", MAMBA_NAMES_128, "%64, %65, p, 1, 1, 1, %66")
                     : MAMBA_C_64(c), MAMBA_C_16(c, 8), MAMBA_C_16(c, 10), MAMBA_C_16(c, 12), MAMBA_C_16(c, 14)
                     : "l"(a), "l"(b), "n"(kRowsOfK)
                     : "memory");
    } else {
        static_assert(kDtype<T> == MAMBA_BFLOAT16, "tensor cores take float16 and bfloat16");
        asm volatile(MAMBA_WGMMA("128", "bf16", MAMBA_NAMES_128, "%64, %65, p, 1, 1, 1, %66")
                     : MAMBA_C_64(c), MAMBA_C_16(c, 8), MAMBA_C_16(c, 10), MAMBA_C_16(c, 12), MAMBA_C_16(c, 14)
                     : "l"(a), "l"(b), "n"(kRowsOfK)
                     : "memory");
    }
}

#undef MAMBA_WGMMA
#undef MAMBA_NAMES_128
#undef MAMBA_NAMES_64
#undef MAMBA_NAMES_32
#undef MAMBA_C_16
#undef MAMBA_C_64
#undef MAMBA_C_32

// Around products: wgmma_fence() before the first that takes registers written since the last one, wgmma_commit_group() after
// the last of some; wgmma_wait_group<n>() until all but the n latest commits are done. All four warps must come here.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// From here on the warpgroup's threads may use so many registers: at most, or at least, as many as they were launched with.
// Those who take registers wait until others have given as many. A multiple of 8.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters) : "memory");
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters) : "memory");
}

// Waits for the other threads of the block's first warpgroup, none of another.
__device__ __forceinline__ void warpgroup_barrier_sync() {
    asm volatile("barrier.sync.aligned 1, 128;" : : : "memory");
}

// A value of which all of a warp's lanes have the same, into a uniform register.
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
    uint32_t same;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(same) : "r"(value));
    return same;
}

// What this thread has put into tiles is visible to the tensor cores after the block's next barrier.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

#endif

}  // namespace mamba
