// What both kernels of a Mamba layer's decode step know about their call when they are compiled.
#pragma once

#include "causal_conv1d/cuda/step.cuh"

namespace mamba {

// Params of a call whose activations, states and convolution have one dtype.
template <typename T>
struct MambaStepOfOneDtype : ConvolutionOfOneDtype<MambaMambaStep, T> {
    static constexpr int32_t state_dtype = kDtype<T>;
};
template <class Params>
constexpr bool kIsOneDtype = true;
template <>
inline constexpr bool kIsOneDtype<MambaMambaStep> = false;

}  // namespace mamba
