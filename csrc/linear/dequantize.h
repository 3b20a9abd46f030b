// Which row of an int8 weight becomes which row of numbers: the same in both libraries.
#pragma once

#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {

// Of the weight, the row that is `row` of the result; -1: the index is of none. static: mamba_cpu compiles it once per
// instruction set.
static MAMBA_HOST_DEVICE inline int64_t dequantized_row(const MambaDequantize& p, int64_t row) {
    if (p.indices == nullptr) {
        return row;
    }
    const int64_t index =
        p.index_bytes == 8 ? static_cast<const int64_t*>(p.indices)[row] : static_cast<const int32_t*>(p.indices)[row];
    return index >= 0 && index < p.weight_rows ? index : -1;
}

}  // namespace mamba
