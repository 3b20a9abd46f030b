// The linear layer's kernels, for few rows.
#pragma once

#include "common/kernel_table.h"
#include "mamba_kernels.h"

namespace mamba {

struct LinearKernel : KernelRow {
    bool (*takes)(const MambaLinear& p);
    bool takes_int8;  // as the weight's dtype, and no other
    int rows;         // of x that a warp works on
    int outputs;      // rows of the weight, likewise
};

inline bool has_int8_one_row(const MambaLinear& p) {
    return p.weight_dtype == MAMBA_INT8 && p.rows == 1;
}
inline bool has_int8(const MambaLinear& p) {
    return p.weight_dtype == MAMBA_INT8;
}
inline bool has_one_row(const MambaLinear& p) {
    return p.weight_dtype != MAMBA_INT8 && p.rows == 1;
}
inline bool has_any_rows(const MambaLinear& p) {
    return p.weight_dtype != MAMBA_INT8;
}

inline constexpr LinearKernel kLinearKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, takes_int8, rows, outputs
    {{"int8_one_row", "int8 weight, 1 row", "8 outputs, all features", kAllDtypes, 256, 0, 75}, has_int8_one_row, true, 1, 1},
    {{"int8_four_rows", "int8 weight", "4 rows, 16 outputs, all features", kAllDtypes, 256, 0, 75}, has_int8, true, 4, 2},
    {{"one_row", "1 row, 16-bit", "8 outputs, all features", k16Bit, 256, 0, 75}, has_one_row, false, 1, 1},
    {{"four_rows", "", "4 rows, 16 outputs, all features", kAllDtypes, 256, 0, 75}, has_any_rows, false, 4, 2},
};
extern KernelTable linear_table;

}  // namespace mamba
