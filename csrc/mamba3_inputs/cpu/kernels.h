// What mamba3_inputs/cpu.cpp asks of cpu/kernels.cpp, once per instruction set.
#pragma once

#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {

// Backward adds the parameters' gradients up over parts of the rows: not more than this, whatever the number of threads, so
// that results do not depend on it.
constexpr int64_t kMamba3InputsParts = 32;

// A part's sums in the workspace, in floats: of both weights, then of dt_bias.
inline int64_t mamba3_inputs_sums(const MambaMamba3Inputs& p) {
    return 2 * p.dstate + p.nheads;
}

struct Mamba3InputsKernels {
    // Rows [begin, end).
    void (*forward)(const MambaMamba3Inputs& params, int64_t begin, int64_t end);
    // The same; sums gets those of the rows.
    void (*backward)(const MambaMamba3InputsBackward& params, int64_t begin, int64_t end, float* sums);
    // The parameters' gradients from the sums of so many parts.
    void (*add_parts)(const MambaMamba3InputsBackward& params, int64_t parts);
};

namespace generic {
extern const Mamba3InputsKernels mamba3_inputs_kernels;
}
namespace avx2 {
extern const Mamba3InputsKernels mamba3_inputs_kernels;
}
namespace avx512 {
extern const Mamba3InputsKernels mamba3_inputs_kernels;
}

}  // namespace mamba
