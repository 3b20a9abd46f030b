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

struct LinearKernels {
    // Outputs [begin, end) of all rows. x_floats: x as contiguous floats.
    void (*project)(const Projection& projection, const float* x_floats, int64_t begin, int64_t end);
    void (*widen)(const Projection& projection, float* x_floats);
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
