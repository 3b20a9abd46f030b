// Asynchronous copies from global to shared memory: cp.async (before compute capability 8.0 the thread waits for each of them)
// and bulk copies.
#pragma once

#include "common/cuda_utils.cuh"

namespace mamba {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// kBytes: 8 or 16; both addresses must be multiples of it. Zeros where `valid` is false (then `from` is not read).
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
    static_assert(kBytes == 8 || kBytes == 16, "cp.async takes them");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const int bytes = valid ? kBytes : 0;
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(shared_address(to)), "l"(from), "r"(bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                     :
                     : "r"(shared_address(to)), "l"(from), "r"(bytes)
                     : "memory");
    }
#else
    if constexpr (kBytes == 16) {
        *static_cast<uint4*>(to) = valid ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    } else {
        *static_cast<uint2*>(to) = valid ? *static_cast<const uint2*>(from) : make_uint2(0, 0);
    }
#endif
}

__device__ __forceinline__ void end_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Waits for all but the last `kPending` groups of this thread's copies.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// ---- bulk copies (9.0): addresses and sizes are multiples of 16 bytes ------------------------------------------------

// A barrier in shared memory counts the bytes of copies to come and those that have come. One thread makes it, and the block's
// others may use it after the next __syncthreads(), if fence.proxy.async came before that.
__device__ __forceinline__ void make_barrier(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(shared_address(barrier)) : "memory");
}
// One thread says how many bytes of copies the barrier's next round has.
__device__ __forceinline__ void expect_copies(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Waits for a round's copies. parity: 0 for the barrier's first round, 1 for the second, 0, ...
__device__ __forceinline__ void wait_for_round(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}"
        :
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
#endif

}  // namespace mamba
