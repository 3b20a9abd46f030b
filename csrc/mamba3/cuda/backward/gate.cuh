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

// Of eight columns of a row: from the gradient of out and z the gradient of y, and what times y is that of z.
template <typename T>
__device__ __forceinline__ void gate_piece_backward(uint4& dout_to_dy, uint4& z_to_slope) {
    const auto two = [](uint32_t& one, uint32_t& other) {
        const float2 d = unpack2<T>(one), z = unpack2<T>(other);
        const GateGradients x = gate_backward(d.x, 1.0f, z.x), y = gate_backward(d.y, 1.0f, z.y);
        one = pack2<T>(x.dy, y.dy);
        other = pack2<T>(x.dargument, y.dargument);
    };
    two(dout_to_dy.x, z_to_slope.x);
    two(dout_to_dy.y, z_to_slope.y);
    two(dout_to_dy.z, z_to_slope.z);
    two(dout_to_dy.w, z_to_slope.w);
}

}  // namespace mamba
