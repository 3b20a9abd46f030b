// Products of a warpgroup (four warps, 128 threads) on Hopper's tensor cores: C (64 x N, float32) += A (64 x 16) B (16 x N). A
// and C are in registers, 16 rows a warp, laid out as in tensor_core.cuh; B stays in shared memory, from where the tensor cores
// read it once for all four warps. PTX calls this wgmma. It exists in machine code for 9.0a, which is what GPUs of 9.0 run.
#pragma once

#include "ssd/cuda/tensor_core.cuh"

namespace mamba {

// A tile of 16-bit elements as the warpgroup reads it: blocks of kRows x 64, in each of whose rows the eight pieces of 16 bytes
// change places by the row ("128-byte swizzle"). It starts at a multiple of 1024 bytes.
template <int kRows>
struct SwizzledTile {
    static constexpr int kRowBytes = 128;
    static __device__ __forceinline__ int at(int row, int column) {
        return column / 64 * (kRows * 64) + row / 8 * 512 + row % 8 * 64 + (column / 8 ^ row) % 8 * 8 + column % 8;
    }
};

// The steps of C and M lie in another order in their tiles: the eight groups of eight as 0, 7, 1, 6, 2, 5, 3, 4. Of the rows of
// M, which end at the diagonal, each warp so has a short and a long group, together as many columns as any other warp.
constexpr int kStepGroups = 8;
__host__ __device__ constexpr int place_of_group(int group) {
    return group < kStepGroups / 2 ? 2 * group : 2 * kStepGroups - 1 - 2 * group;
}
__host__ __device__ constexpr int group_at_place(int place) {
    return place % 2 == 0 ? place / 2 : kStepGroups - 1 - place / 2;
}

// A SwizzledTile whose rows are steps in that order.
struct PairedTile {
    static constexpr int kRowBytes = SwizzledTile<8 * kStepGroups>::kRowBytes;
    static __device__ __forceinline__ int at(int row, int column) {
        return SwizzledTile<8 * kStepGroups>::at(8 * place_of_group(row / 8) + row % 8, column);
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// How the tensor cores are told of a SwizzledTile, from the element at `tile` on.
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile, int bytes_between_blocks) {
    const uint64_t swizzle = 1;                         // 128 bytes
    const uint64_t eight_rows = 1024 / 16;              // units of 16 bytes, as all of these
    const uint64_t blocks = bytes_between_blocks / 16;  // counts for a B that lies as rows of k
    return swizzle << 62 | eight_rows << 32 | blocks << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

// Products run by themselves after they are begun: the compiler must neither compute their registers later nor use them sooner.
template <int kCount>
__device__ __forceinline__ void hold(float (&values)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        asm volatile("" : "+f"(values[i][0]), "+f"(values[i][1]), "+f"(values[i][2]), "+f"(values[i][3]) : : "memory");
    }
}
template <typename T, int kCount>
__device__ __forceinline__ void hold(Operand<T> (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        uint32_t(&r)[4] = values[i].r[0];
        asm volatile("" : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]) : : "memory");
    }
}

template <typename T>
constexpr bool kIsHalf = false;
template <>
constexpr bool kIsHalf<__half> = true;

// The instruction's text, and its accumulators: operands %0 to %31 or %63.
#define MAMBA_C_64(c) MAMBA_C_16(c, 0), MAMBA_C_16(c, 2), MAMBA_C_16(c, 4), MAMBA_C_16(c, 6)
#define MAMBA_C_16(c, i)                                                                                                 \
    "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]), "+f"(c[i + 1][0]), "+f"(c[i + 1][1]), "+f"(c[i + 1][2]), \
        "+f"(c[i + 1][3])
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
template <int kRowsOfK, typename T>
__device__ __forceinline__ void begin_product(float (&c)[8][4], const Operand<T>& operand, uint64_t b) {
    const uint32_t(&a)[4] = operand.r[0];
    if constexpr (kIsHalf<T>) {
        asm volatile(MAMBA_WGMMA("64", "f16", MAMBA_NAMES_64, "{%32, %33, %34, %35}, %36, p, 1, 1, %37")
                     : MAMBA_C_64(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRowsOfK)
                     : "memory");
    } else {
        asm volatile(MAMBA_WGMMA("64", "bf16", MAMBA_NAMES_64, "{%32, %33, %34, %35}, %36, p, 1, 1, %37")
                     : MAMBA_C_64(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRowsOfK)
                     : "memory");
    }
}
template <int kRowsOfK, typename T>
__device__ __forceinline__ void begin_product(float (&c)[16][4], const Operand<T>& operand, uint64_t b) {
    const uint32_t(&a)[4] = operand.r[0];
    if constexpr (kIsHalf<T>) {
        asm volatile(MAMBA_WGMMA("128", "f16", MAMBA_NAMES_128, "{%64, %65, %66, %67}, %68, p, 1, 1, %69")
                     : MAMBA_C_64(c), MAMBA_C_16(c, 8), MAMBA_C_16(c, 10), MAMBA_C_16(c, 12), MAMBA_C_16(c, 14)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRowsOfK)
                     : "memory");
    } else {
        asm volatile(MAMBA_WGMMA("128", "bf16", MAMBA_NAMES_128, "{%64, %65, %66, %67}, %68, p, 1, 1, %69")
                     : MAMBA_C_64(c), MAMBA_C_16(c, 8), MAMBA_C_16(c, 10), MAMBA_C_16(c, 12), MAMBA_C_16(c, 14)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kRowsOfK)
                     : "memory");
    }
}

#undef MAMBA_WGMMA
#undef MAMBA_NAMES_128
#undef MAMBA_NAMES_64
#undef MAMBA_C_16
#undef MAMBA_C_64

// Around products: fence_products() before the first that takes registers written since the last one, commit_products() after
// the last of some; wait_for_products<n>() until all but the n latest commits are done. All four warps must come here.
__device__ __forceinline__ void fence_products() {
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// What this thread has put into tiles is visible to the tensor cores after the block's next barrier.
__device__ __forceinline__ void show_to_warpgroup() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(address), "r"(value) : "memory");
}

// The opposite of load_matrices_transposed.
__device__ __forceinline__ void store_matrices_transposed(void* row, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

#endif

}  // namespace mamba
