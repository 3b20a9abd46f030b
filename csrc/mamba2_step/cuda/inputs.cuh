// What the kernel of a Mamba-2 layer's decode step reads beside the state, and where it keeps that.
#pragma once

#include "causal_conv1d/cuda/step.cuh"
#include "common/divisor.cuh"
#include "state_update/cuda/ring.cuh"

namespace mamba {

constexpr int kStepThreads = 256;
constexpr int kStepWarps = kStepThreads / 32;
constexpr int kStepDepth = 3;  // tiles of states that a warp has on their way
constexpr int kMostParts = 8;  // blocks in a cluster that every GPU with clusters takes

// How the launcher shares out the rows of a group's heads, which follow each other: `parts` blocks of `rows` each.
struct Mamba2StepLayout {
    Divisor parts, groups, headdim;
    int32_t lanes_log2;  // lanes that share a row of the state
    int32_t rows;
    int32_t warp_tiles;  // of rows
    uint32_t group_heads;
    bool ahead;     // few blocks: they start long before the kernel ahead has ended
    bool together;  // the parts are one cluster, and do what needs all of them: the norm, the state of the convolution of B and
                    // C
};

template <typename T>
struct UsualMamba2Step : UsualConvolution<MambaMamba2Step, T> {
    static constexpr int32_t norm_weight_dtype = kDtype<T>;

    static bool fits(const MambaMamba2Step& p) {
        return UsualConvolution<MambaMamba2Step, T>::fits(p) &&
               (p.norm_weight == nullptr || p.norm_weight_dtype == norm_weight_dtype);
    }
};

// Floats of shared memory behind the states: those of each row, B and C, sums.
struct Mamba2StepShared {
    float2* decay_dt_x;
    float *y, *gate, *weight, *BC, *sums, *cluster_sums;

    __device__ __forceinline__ Mamba2StepShared(unsigned char* first, int rows, int dstate)
        : decay_dt_x(reinterpret_cast<float2*>(first)),
          y(reinterpret_cast<float*>(decay_dt_x + rows)),
          gate(y + rows),
          weight(gate + rows),
          BC(weight + rows),
          sums(BC + 2 * dstate),
          cluster_sums(sums + kStepWarps) {}
    static int64_t bytes(int64_t rows, int64_t dstate) {
        return (5 * rows + 2 * dstate + kStepWarps + kMostParts) * static_cast<int64_t>(sizeof(float));
    }
};

// What there is once for a row, beside the convolution's part of it.
struct HeadRowBits {
    uint32_t dt, dt_bias, A, D, z, weight;
};

template <class Params>
__device__ __forceinline__ HeadRowBits load_row(const Params& p, int64_t zx, uint32_t head, uint32_t dim) {
    const int64_t channels = p.nheads * p.headdim, channel = head * p.headdim + dim;
    HeadRowBits bits;
    bits.dt = load_bits(p.zxBCdt, zx + 2 * (channels + p.ngroups * p.dstate) + head, p.dtype);
    bits.dt_bias = load_bits(p.dt_bias, head, p.dt_bias_dtype);
    bits.A = load_bits(p.A_log, head, p.A_log_dtype);
    bits.D = load_bits(p.D, head * p.D_head_stride + dim * p.D_dim_stride, p.D_dtype);
    bits.z = load_bits(p.zxBCdt, zx + channel, p.dtype);
    bits.weight = p.norm_weight != nullptr ? load_bits(p.norm_weight, channel, p.norm_weight_dtype) : 0;
    return bits;
}

__device__ __forceinline__ float rounded(float value, int32_t dtype) {
    if (dtype == MAMBA_FLOAT32) {
        return value;
    }
    return dtype == MAMBA_FLOAT16 ? to_float(from_float<__half>(value)) : to_float(from_float<__nv_bfloat16>(value));
}

}  // namespace mamba
