// The functions of csrc/common/ptx_hints.cuh in plain C++.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace mamba {

inline uint32_t load_16_bits_of_many(const void* address) {
    return *static_cast<const uint16_t*>(address);
}

}  // namespace mamba
