// The convolution inside a layer's decode step: which calls have kernels of their own (cuda/step.cuh).
#pragma once

#include "mamba_kernels.h"

namespace mamba {

constexpr int32_t kConvStepTaps = 4;

// Whether input, state, weight and bias have one dtype, four taps and a state of four. Params: MambaMamba2Step, MambaMambaStep.
template <class Params>
bool has_conv_of_one_dtype(const Params& p) {
    return p.width == kConvStepTaps && p.state_len == kConvStepTaps && p.conv_state_dtype == p.dtype &&
           p.conv_weight_dtype == p.dtype && (p.conv_bias == nullptr || p.conv_bias_dtype == p.dtype);
}

}  // namespace mamba
