// What cross_entropy/cpu.cpp asks of cpu/kernels.cpp, once per instruction set.
#pragma once

#include "mamba_kernels.h"

namespace mamba {

struct CrossEntropyKernels {
    void (*cross_entropy)(const MambaCrossEntropy& params, int64_t begin, int64_t end);  // rows [begin, end)
};

namespace generic {
extern const CrossEntropyKernels cross_entropy_kernels;
}
namespace avx2 {
extern const CrossEntropyKernels cross_entropy_kernels;
}
namespace avx512 {
extern const CrossEntropyKernels cross_entropy_kernels;
}

}  // namespace mamba
