// What causal_conv1d/cpu.cpp asks of cpu/kernels.cpp, once per instruction set. The unit of work is a block: up to `lanes`
// neighbouring channels, over the whole length.
#pragma once

#include "causal_conv1d/parts.h"

namespace mamba {

struct ConvKernels {
    int64_t lanes;  // channels that one vector holds
    void (*forward)(const MambaCausalConv1d& params, int64_t batch, int64_t channel);
    // Adds up dweight and dbias over batch entries [batch_begin, batch_end) into part `slot`.
    void (*backward)(const ConvBackward& params, int64_t slot, int64_t batch_begin, int64_t batch_end, int64_t channel);
    void (*update)(const MambaCausalConv1dUpdate& params, int64_t batch, int64_t channel);
    void (*add_parts)(const PartSum& sum);
};

namespace generic {
extern const ConvKernels conv_kernels;
}
namespace avx2 {
extern const ConvKernels conv_kernels;
}
namespace avx512 {
extern const ConvKernels conv_kernels;
}

}  // namespace mamba
