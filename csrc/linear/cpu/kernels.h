// What linear/cpu.cpp asks of cpu/kernels.cpp, once per instruction set.
#pragma once

#include "mamba_kernels.h"

namespace mamba {

// out[r][o] = weight[o] . x[r] + bias[o].
struct Projection {
    const void* weight;  // (outputs, features) contiguous
    const void* scales;  // of an int8 weight
    const void* x;
    const void* bias;  // optional
    void* out;
    int64_t rows, features, outputs, x_stride, out_stride;
    int32_t weight_dtype, x_dtype, bias_dtype, out_dtype;
};

// x as the kernels read it: rows of `pitch` numbers, a whole number of blocks of kFeatureBlock, with zeros at the end.
struct ProjectionInput {
    const float* floats;      // in the order of load_pair
    const int16_t* integers;  // with an int8 weight, or null: x is scales times these, a scale for each block
    const float* scales;      // (rows, pitch / kFeatureBlock)
    int64_t pitch;
};

constexpr int kFeatureBlock = MAMBA_INT8_BLOCK;
constexpr int64_t kMostIntegerRows = 4;  // with more, widening the weight to floats is faster

inline int64_t input_floats(const Projection& p) {
    const int64_t floats = p.rows * ((p.features + kFeatureBlock - 1) / kFeatureBlock * kFeatureBlock);
    return p.weight_dtype == MAMBA_INT8 && p.rows <= kMostIntegerRows ? floats + floats / kFeatureBlock + floats / 2 : floats;
}

struct LinearKernels {
    // x from p's, in scratch memory of input_floats(p).
    ProjectionInput (*prepare)(const Projection& p, float* scratch);
    // Outputs [begin, end) of all rows.
    void (*project)(const Projection& p, const ProjectionInput& x, int64_t begin, int64_t end);
};

namespace generic {
extern const LinearKernels linear_kernels;
}
namespace avx2 {
extern const LinearKernels linear_kernels;
}
namespace avx512 {
extern const LinearKernels linear_kernels;
}

}  // namespace mamba
