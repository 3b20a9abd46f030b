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
    bool has_vnni;  // AVX-512 is chosen, and the CPU has VNNI beside it
};

// x as the kernels read it: rows of `pitch` numbers, a whole number of blocks of kFeatureBlock, with zeros at the end.
struct ProjectionInput {
    const float* floats;  // in the order of load_pair
    // With an int8 weight, or null: x is scales times these, a scale for each block.
    const int16_t* integers;
    // The same for VNNI: 256 times a first byte plus a second; of four elements the first bytes, then the second ones.
    const int8_t* bytes;
    const float* scales;    // (rows, pitch / kFeatureBlock)
    const int32_t* starts;  // for VNNI, of each block's products: -128 times the sum of the integers; as many
    int64_t pitch;
};

constexpr int kFeatureBlock = MAMBA_INT8_BLOCK;
constexpr int64_t kMostIntegerRows = 4;  // without VNNI: with more, widening the weight to floats is faster

// One row waits for memory whatever multiplies it.
inline bool takes_vnni(const Projection& p) {
    return p.weight_dtype == MAMBA_INT8 && p.has_vnni && p.rows > 1;
}

inline bool takes_integers(const Projection& p) {
    return p.weight_dtype == MAMBA_INT8 && (takes_vnni(p) || p.rows <= kMostIntegerRows);
}

// Rows of x with those of zeros that fill up a last tile of 8, which more than 4 take, or of 4, which 3 take.
inline int64_t input_rows(const Projection& p) {
    const int64_t rest = p.rows % 8;
    return rest > 4 ? p.rows + 8 - rest : rest == 3 ? p.rows + 1 : p.rows;
}

inline int64_t input_floats(const Projection& p) {
    const int64_t floats = input_rows(p) * ((p.features + kFeatureBlock - 1) / kFeatureBlock * kFeatureBlock);
    return takes_integers(p) ? floats + 2 * (floats / kFeatureBlock) + floats / 2 : floats;
}

struct LinearKernels {
    // x from p's, in scratch memory of input_floats(p).
    ProjectionInput (*prepare)(const Projection& p, float* scratch);
    // Outputs [begin, end) of all rows.
    void (*project)(const Projection& p, const ProjectionInput& x, int64_t begin, int64_t end);
    // Rows [begin, end) of the result.
    void (*dequantize)(const MambaDequantize& p, int64_t begin, int64_t end);
    // Rows [begin, end) of the logits.
    void (*greedy_token)(const MambaGreedyToken& p, int64_t begin, int64_t end);
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
