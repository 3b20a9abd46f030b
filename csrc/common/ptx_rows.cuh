// PTX for rows on their way between memory, registers and shared memory, as functions: see ptx.cuh.
#pragma once

#include "common/ptx.cuh"

namespace mamba {

// Row `index` of rows that lie `stride` bytes apart, in one multiplication: the compiler would keep sums of pointers.
__device__ __forceinline__ const char* row_at(const char* rows, int index, int stride) {
    const char* row;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(row) : "r"(index), "r"(stride), "l"(rows));
    __builtin_assume(__isGlobal(row));  // NOLINT(msvc): nvcc's own, in device code, on Windows too
    return row;
}

// As st_shared_b32, of eight bytes that others read behind a barrier: other accesses may change places with it.
__device__ __forceinline__ void st_shared_v2_b32(uint32_t address, uint2 value) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" : : "r"(address), "r"(value.x), "r"(value.y));
}

// The same in the other direction.
__device__ __forceinline__ uint2 ld_shared_v2_b32(uint32_t address) {
    uint2 value;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
    return value;
}

// As cp_async, of eight or sixteen bytes.
template <int kBytes>
__device__ __forceinline__ void cp_async_shared(uint32_t to, const void* from) {
    static_assert(kBytes == 8 || kBytes == 16, "cp.async takes them");
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" : : "r"(to), "l"(from) : "memory");
    }
}

// As cp_async, of four bytes.
__device__ __forceinline__ void cp_async_4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(shared_address(to)), "l"(from) : "memory");
}

}  // namespace mamba
