// What mamba2_step/cpu.cpp asks of cpu/kernels.cpp, once per instruction set.
#pragma once

#include "mamba_kernels.h"

namespace mamba {

struct Mamba2StepKernels {
    // All as floats: zxBCdt's rows, its dt ready to be used, and A (H).
    void (*begin)(const MambaMamba2Step& params, float* rows, float* A);
    // The output, from contiguous rows of floats.
    void (*end)(const MambaMamba2Step& params, const float* rows);
};

namespace generic {
extern const Mamba2StepKernels mamba2_step_kernels;
}
namespace avx2 {
extern const Mamba2StepKernels mamba2_step_kernels;
}
namespace avx512 {
extern const Mamba2StepKernels mamba2_step_kernels;
}

}  // namespace mamba
