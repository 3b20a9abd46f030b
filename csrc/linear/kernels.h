// The linear layer's kernels, for few rows.
#pragma once

#include "common/kernel_table.h"
#include "mamba_kernels.h"

namespace mamba {

struct LinearKernel : KernelRow {
    bool (*takes)(const MambaLinear& p);
    int rows;     // of x that a warp works on
    int outputs;  // rows of the weight, likewise
};

inline bool has_one_row(const MambaLinear& p) {
    return p.rows == 1;
}
inline bool has_any_rows(const MambaLinear&) {
    return true;
}

inline constexpr LinearKernel kLinearKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, rows, outputs
    {{"one_row", "1 row, 16-bit", "8 outputs, all features", k16Bit, 256, 0, 75}, has_one_row, 1, 1},
    {{"four_rows", "", "4 rows, 16 outputs, all features", kAllDtypes, 256, 0, 75}, has_any_rows, 4, 2},
};
extern KernelTable linear_table;

}  // namespace mamba
