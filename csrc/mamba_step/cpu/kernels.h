// What mamba_step/cpu.cpp asks of cpu/kernels.cpp, once per instruction set.
#pragma once

#include "mamba_kernels.h"

namespace mamba {

struct MambaStepKernels {
    // xz's rows and A (D, N), as floats.
    void (*begin)(const MambaMambaStep& params, float* rows, float* A);
    // The output, from contiguous rows of floats.
    void (*end)(const MambaMambaStep& params, const float* rows);
};

namespace generic {
extern const MambaStepKernels mamba_step_kernels;
}
namespace avx2 {
extern const MambaStepKernels mamba_step_kernels;
}
namespace avx512 {
extern const MambaStepKernels mamba_step_kernels;
}

}  // namespace mamba
