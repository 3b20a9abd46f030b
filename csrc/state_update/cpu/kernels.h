// What state_update/cpu.cpp asks of cpu/kernels.cpp, once per instruction set.
#pragma once

#include "mamba_kernels.h"

namespace mamba {

struct StateUpdateKernels {
    int64_t lanes;  // a unit of work is a block: that many neighbouring rows (of headdim) of one head
    // Blocks [begin, end) of all heads of all batch entries: block = (batch * nheads + head) * blocks_per_head + part.
    void (*update)(const MambaSelectiveStateUpdate& params, int64_t begin, int64_t end);
};

namespace generic {
extern const StateUpdateKernels state_update_kernels;
}
namespace avx2 {
extern const StateUpdateKernels state_update_kernels;
}
namespace avx512 {
extern const StateUpdateKernels state_update_kernels;
}

}  // namespace mamba
