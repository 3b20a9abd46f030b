// Division by numbers that the host knows.
#pragma once

#include <cuda_runtime.h>

#include "common/integers.h"

namespace mamba {

// Division of numbers below 2^31 by one that the host knows: a product and a shift.
struct Divisor {
    uint32_t divisor, factor;
    int32_t shift;

    Divisor() = default;
    explicit Divisor(int64_t number) : divisor(static_cast<uint32_t>(number)), shift(31 + ceil_log2(number, 0, 31)) {
        factor = static_cast<uint32_t>(ceil_div(static_cast<uint64_t>(1) << shift, static_cast<uint64_t>(number)));
    }
    __device__ __forceinline__ uint32_t quotient(uint32_t value) const {
        return static_cast<uint32_t>(static_cast<uint64_t>(value) * factor >> shift);
    }
};

}  // namespace mamba
