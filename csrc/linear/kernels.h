// The linear layer's kernels, for few rows, what dequantises its weights, and greedy decoding's choice.
#pragma once

#include "common/alignment.h"
#include "common/kernel_table.h"
#include "mamba_kernels.h"

namespace mamba {

struct LinearKernel : KernelRow {
    bool (*takes)(const MambaLinear& p);
    bool takes_int8;  // as the weight's dtype, and no other
    int rows;         // of x that a warp works on
    int outputs;      // rows of the weight, likewise
};

constexpr int kMostInt8Row = 8192;  // features of the row in shared memory
constexpr int64_t kMostInt8Outputs = 1 << 30;

inline bool has_int8_one_row(const MambaLinear& p) {
    return p.weight_dtype == MAMBA_INT8 && p.rows == 1 && p.out_features <= kMostInt8Outputs && p.in_features % 16 == 0 &&
           p.in_features <= kMostInt8Row && pointer_is_aligned(p.weight, 16) && pointer_is_aligned(p.x, 16);
}
inline bool has_int8(const MambaLinear& p) {
    return p.weight_dtype == MAMBA_INT8 && p.norm_weight == nullptr;
}
inline bool has_one_row(const MambaLinear& p) {
    return p.weight_dtype != MAMBA_INT8 && p.rows == 1;
}
inline bool has_any_rows(const MambaLinear& p) {
    return p.weight_dtype != MAMBA_INT8;
}

inline constexpr LinearKernel kLinearKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, takes_int8, rows, outputs
    {{"int8_one_row", "int8 weight, 1 row of a multiple of 16 and at most 8192 features, 16-byte rows",
      "8 or 16 outputs at a time, all features", kAllDtypes, 256, kMostInt8Row * 4, 75},
     has_int8_one_row,
     true,
     1,
     1},
    {{"int8_four_rows", "int8 weight", "4 rows, 16 outputs, all features", kAllDtypes, 256, 0, 75}, has_int8, true, 4, 2},
    {{"one_row", "1 row, 16-bit", "8 outputs, all features", k16Bit, 256, 0, 75}, has_one_row, false, 1, 1},
    {{"four_rows", "", "4 rows, 16 outputs, all features", kAllDtypes, 256, 0, 75}, has_any_rows, false, 4, 2},
};
extern KernelTable linear_table;

constexpr int kDequantizeThreads = 256;

struct DequantizeKernel : KernelRow {
    bool (*takes)(const MambaDequantize& p);
};

inline bool takes_any_dequantize(const MambaDequantize&) {
    return true;
}

inline constexpr DequantizeKernel kDequantizeKernels[] = {
    // name, needs, shape, dtypes (of out, one kernel for all), threads, shared bytes, architecture; takes
    {{"row", "", "a row", kAllDtypes, kDequantizeThreads, 0, 75}, takes_any_dequantize},
};
extern KernelTable dequantize_table;

constexpr int kGreedyThreads = 512;
constexpr int kGreedyBlocks = 8;  // in a cluster that every GPU with clusters takes

struct GreedyTokenKernel : KernelRow {
    bool (*takes)(const MambaGreedyToken& p);
};

inline bool takes_any_greedy_token(const MambaGreedyToken&) {
    return true;
}

inline constexpr GreedyTokenKernel kGreedyTokenKernels[] = {
    // name, needs, shape, dtypes (one kernel for all), threads, shared bytes, architecture; takes
    {{"row", "", "an eighth of a row; before 9.0 a row", kAllDtypes, kGreedyThreads, 0, 75}, takes_any_greedy_token},
};
extern KernelTable greedy_token_table;

}  // namespace mamba
