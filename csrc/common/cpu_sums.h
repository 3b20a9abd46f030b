// The sums of part_sums.h on the CPU.
#pragma once

#include "common/cpu_tile.h"
#include "common/part_sums.h"

namespace mamba {
namespace MAMBA_ISA {

inline void add_parts(const PartSum& p) {
    for (int64_t row = 0; row < p.rows; ++row) {
        const int64_t inner = row % p.inner, outer = row / p.inner;
        const int64_t to = outer / p.middle * p.outer_stride + outer % p.middle * p.middle_stride + inner * p.inner_stride;
        for (int64_t column = 0; column < p.row; column += kLanes) {
            const int lanes = block_lanes(p.row - column);
            Vec sum = zero();
            for (int64_t part = 0; part < p.count; ++part) {
                const float* from = p.parts + (part * p.rows + row) * p.row + column;
                sum = sum + (lanes == kLanes ? load(from) : load_partial(from, lanes));
            }
            store_lanes(p.dtype, p.sum, to + column, 1, lanes, sum);
        }
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
