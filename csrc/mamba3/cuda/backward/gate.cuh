// Backward through the gate, out = y silu(z), of one element: what the general kernel and those on warpgroups share.
#pragma once

#include "common/cuda_vector.cuh"

namespace mamba {

struct GateGradients {
    float value;      // silu(argument)
    float dy;         // d silu
    float dargument;  // d y silu'
};

// d: the gradient of the gated row. argument: z times its weight.
__device__ __forceinline__ GateGradients gate_backward(float d, float y, float argument) {
    const float part = sigmoid(argument), value = argument * part;
    return {value, d * value, d * y * fmaf(value, 1.0f - part, part)};
}

}  // namespace mamba
