// PTX of clusters, as functions: blocks that run together and reach each other's shared memory (from 9.0 on). tests/emulator
// has the same functions in plain C++.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/ptx.cuh"

namespace mamba {

// All threads of all blocks of a cluster arrive, then wait for each other. Only barriers made by mbarrier_init_cluster and what
// was read count as done behind the wait: writes of other memory need not be visible.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
#endif
}

// A barrier in shared memory for one round of what the cluster's blocks send. One thread makes it, before its block arrives at
// the cluster; after a __syncthreads() one thread says how many bytes come.
__device__ __forceinline__ void mbarrier_init_cluster(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;"
                 :
                 : "r"(shared_address(barrier))
                 : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx_cluster(uint64_t* barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}
// Writes to the same place in the shared memory of the cluster's block `rank`, and counts at its barrier.
__device__ __forceinline__ void st_async_cluster(float* place, uint64_t* barrier, uint32_t rank, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n\t.reg .b32 place, barrier;\n"
        "\tmapa.shared::cluster.u32 place, %0, %2;\n\tmapa.shared::cluster.u32 barrier, %1, %2;\n"
        "\tst.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [place], %3, [barrier];\n\t}"
        :
        : "r"(shared_address(place)), "r"(shared_address(barrier)), "r"(rank), "f"(value)
        : "memory");
#endif
}
// Waits for all that was sent to this block.
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "again:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n\t@!done bra again;\n\t}"
        :
        : "r"(shared_address(barrier))
        : "memory");
#endif
}

}  // namespace mamba
