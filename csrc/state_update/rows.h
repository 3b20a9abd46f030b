// How rows of states lie over a warp's lanes: what the host decides about cuda/rows.cuh.
#pragma once

#include "common/alignment.h"
#include "common/integers.h"

namespace mamba {

// Lanes that share a row, as a logarithm, where a lane has `vectors` of 16 bytes of each of `rows`. A row has at least as many
// lanes as a lane has rows.
inline int state_lanes_log2(int64_t dstate, int32_t state_dtype, int rows, int vectors) {
    const int64_t states = vectors * 16 / dtype_size(state_dtype);
    return ceil_log2(ceil_div(dstate, states), ceil_log2(rows, 0, 5), 5);
}

// Whether tiles of `rows` rows a lane, one vector of each, fill a head's states: each is then one run of memory.
inline bool has_whole_tiles(int64_t headdim, int64_t dstate, int64_t dim_stride, int32_t state_dtype, int rows) {
    const int lanes_log2 = state_lanes_log2(dstate, state_dtype, rows, 1);
    return dstate == (16 / dtype_size(state_dtype)) << lanes_log2 && headdim % (rows << (5 - lanes_log2)) == 0 &&
           dim_stride == dstate;
}

}  // namespace mamba
