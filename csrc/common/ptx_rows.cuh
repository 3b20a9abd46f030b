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

// As store_shared, of eight bytes that others read behind a barrier: other accesses may change places with it.
__device__ __forceinline__ void store_shared_8_bytes(uint32_t address, uint2 value) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" : : "r"(address), "r"(value.x), "r"(value.y));
}

// As copy_async, of four bytes.
__device__ __forceinline__ void copy_async_4_bytes(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(shared_address(to)), "l"(from) : "memory");
}

}  // namespace mamba
