// The functions of csrc/common/ptx_hints.cuh in plain C++.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace mamba {

inline uint32_t ld_global_l2_256b_u16(const void* address) {
    return *static_cast<const uint16_t*>(address);
}

}  // namespace mamba
