// PTX for accesses that tell the caches more, as functions: see ptx.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace mamba {

// 16 bits of global memory, of which the neighbours will be asked for too: 256 bytes around them come to the L2 at once.
__device__ __forceinline__ uint32_t ld_global_l2_256b_u16(const void* address) {
    uint16_t bits;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("ld.global.L2::256B.u16 %0, [%1];" : "=h"(bits) : "l"(__cvta_generic_to_global(address)) : "memory");
#else
    bits = *static_cast<const uint16_t*>(address);
#endif
    return bits;
}

}  // namespace mamba
