// Integer arithmetic of both libraries, on the host and in kernels.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define MAMBA_HOST_DEVICE __host__ __device__
#else
#define MAMBA_HOST_DEVICE
#endif

namespace mamba {

// Static: each source keeps its own, since the CPU kernels are compiled for several instruction sets (common/cpu_vector.h).

// value / divisor, rounded up; value >= 0, divisor > 0.
template <typename Value, typename Divisor>
MAMBA_HOST_DEVICE static constexpr auto ceil_div(Value value, Divisor divisor) {
    return (value + divisor - 1) / divisor;
}

// The least multiple of divisor that is at least value.
template <typename Value, typename Divisor>
MAMBA_HOST_DEVICE static constexpr auto round_up(Value value, Divisor divisor) {
    return ceil_div(value, divisor) * divisor;
}

// The logarithm of the smallest power of two that is at least count, between the limits given.
static inline int ceil_log2(int64_t count, int low, int high) {
    int log2 = low;
    while (log2 < high && (static_cast<int64_t>(1) << log2) < count) {
        ++log2;
    }
    return log2;
}

// Rows of tiles of floats are padded to whole vectors of every instruction set.
static constexpr int64_t row_pitch(int64_t columns) {
    return round_up(columns, 16);
}

}  // namespace mamba
