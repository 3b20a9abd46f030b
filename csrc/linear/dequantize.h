// Which row of an int8 weight becomes which row of numbers: the same in both libraries.
#pragma once

#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {

// Of the weight, the row that is to be `row` of the result. static: mamba_cpu compiles it once per instruction set.
static MAMBA_HOST_DEVICE inline int64_t dequantized_row(const MambaDequantize& p, int64_t row) {
    if (p.indices == nullptr) {
        return row;
    }
    return p.index_bytes == 8 ? static_cast<const int64_t*>(p.indices)[row] : static_cast<const int32_t*>(p.indices)[row];
}
static MAMBA_HOST_DEVICE inline bool has_weight_row(const MambaDequantize& p, int64_t index) {
    return index >= 0 && index < p.weight_rows;
}

}  // namespace mamba
