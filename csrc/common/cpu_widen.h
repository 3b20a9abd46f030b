// Whole rows from one dtype to another.
#pragma once

#include "common/cpu_tile.h"

namespace mamba {
namespace MAMBA_ISA {

// A row of any dtype to floats.
inline void widen_row(int32_t dtype, const void* data, int64_t offset, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const int lanes = block_lanes(count - i);
        store_lanes(MAMBA_FLOAT32, to, i, 1, lanes, load_lanes(dtype, data, offset + i, 1, lanes));
    }
}

// Rows of any dtype to contiguous rows of floats, and back.
inline void widen_rows(int32_t dtype, const void* data, int64_t row_stride, int64_t rows, int64_t count, float* to) {
    for (int64_t row = 0; row < rows; ++row) {
        widen_row(dtype, data, row * row_stride, count, to + row * count);
    }
}

inline void narrow_rows(const float* from, int64_t rows, int64_t count, int32_t dtype, void* data, int64_t row_stride) {
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < count; i += kLanes) {
            const int lanes = block_lanes(count - i);
            store_lanes(dtype, data, row * row_stride + i, 1, lanes,
                        load_lanes(MAMBA_FLOAT32, from, row * count + i, 1, lanes));
        }
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
