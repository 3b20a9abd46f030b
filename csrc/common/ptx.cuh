// PTX, as functions: nothing else in the library has inline assembly. tests/emulator has the same functions in plain C++, so
// that the host's compiler builds the kernels. Products of matrices: ptx_matrix.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace mamba {

// ---- math -----------------------------------------------------------------------------------------------------------

// 2^x with one special-function instruction; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x with one special-function instruction; 0 for infinity and for |x| >= 2^126.
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Sine and cosine of an angle in [-pi, pi] to 2^-20, with one special-function instruction.
__device__ __forceinline__ float sin_fast(float radians) {
    float y;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(radians));
    return y;
}
__device__ __forceinline__ float cos_fast(float radians) {
    float y;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(radians));
    return y;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_to_L2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
}

// 16 bytes to global memory. In assembly, because ptxas splits a plain uint4 store whose words become ready one by one.
__device__ __forceinline__ void st_global_v4_b32(void* address, const uint32_t* word) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(address)), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
}

// Hides how a pointer to global memory was computed: short of registers, the compiler would compute it again each time.
template <typename T>
__device__ __forceinline__ T* opaque(T* pointer) {
    asm volatile("" : "+l"(pointer));
    // Or accesses turn generic.
    __builtin_assume(__isGlobal(pointer));  // NOLINT(msvc): nvcc's own, in device code, on Windows too
    return pointer;
}

// The same for an index.
__device__ __forceinline__ int opaque(int index) {
    asm volatile("" : "+r"(index));
    return index;
}

// Declares an array of the block's dynamic shared memory.
#define MAMBA_DYNAMIC_SHARED(alignment, type, name) \
    extern __shared__ __align__(alignment)          \
    type name[]

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void st_shared_b32(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(address), "r"(value) : "memory");
}

// 16 bytes at once, as st_global_v4_b32 does.
__device__ __forceinline__ void st_shared_v4_f32(void* to, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(shared_address(to)), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}

// ---- a kernel that starts before the one ahead of it in the stream has ended (launch_programmatic_dependent)
// ---------------------

// The next kernel's blocks may take what room there is once every block of this one has come here (or ended).
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

// Waits until the kernel before this one has ended and what it wrote can be read.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// ---- asynchronous copies to shared memory (before 8.0 the thread waits for each of them) ----------------------------

// kBytes: 4, 8 or 16; both addresses must be multiples of it. Zeros where `valid` is false (then `from` is not read).
template <int kBytes>
__device__ __forceinline__ void cp_async(void* to, const void* from, bool valid) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async takes them");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const int bytes = valid ? kBytes : 0;
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(shared_address(to)), "l"(from), "r"(bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :
                     : "r"(shared_address(to)), "l"(from), "n"(kBytes), "r"(bytes)
                     : "memory");
    }
#else
    if constexpr (kBytes == 16) {
        *static_cast<uint4*>(to) = valid ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    } else if constexpr (kBytes == 8) {
        *static_cast<uint2*>(to) = valid ? *static_cast<const uint2*>(from) : make_uint2(0, 0);
    } else {
        *static_cast<uint32_t*>(to) = valid ? *static_cast<const uint32_t*>(from) : 0u;
    }
#endif
}

__device__ __forceinline__ void cp_async_commit_group() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Waits for all but the last `kPending` groups of this thread's copies.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// ---- bulk copies (9.0): addresses and sizes are multiples of 16 bytes ------------------------------------------------

// A barrier in shared memory counts the bytes of copies to come and those that have come. One thread makes it, and the block's
// others may use it after the next __syncthreads(), if fence.proxy.async came before that.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(shared_address(barrier)) : "memory");
}
// One thread says how many bytes of copies the barrier's next round has.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Waits for a round's copies. parity: 0 for the barrier's first round, 1 for the second, 0, ...
__device__ __forceinline__ void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}"
        :
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void cp_async_bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// The other way: from shared memory, what fence.proxy.async and a barrier have made visible.
__device__ __forceinline__ void cp_async_bulk_store(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\tcp.async.bulk.commit_group;"
                 :
                 : "l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
// Waits until all that this thread stores so has been read from shared memory, and for the thread's asynchronous copies.
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
}
#endif

}  // namespace mamba
