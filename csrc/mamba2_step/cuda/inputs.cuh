// What the kernel of a Mamba-2 layer's decode step reads beside the state, and where it keeps that.
#pragma once

#include "causal_conv1d/cuda/step.cuh"
#include "common/divisor.cuh"

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
    bool vectors;   // states are read in 16 bytes (whole tiles: always)
    bool ahead;     // few blocks: they start long before the kernel ahead has ended
    bool together;  // the parts are one cluster, and do what needs all: the norm, the convolution's state of B and C
};

// Params of a model of one dtype with four taps.
template <typename T>
struct Mamba2StepOfOneDtype : ConvolutionOfOneDtype<MambaMamba2Step, T> {
    static constexpr int32_t norm_weight_dtype = kDtype<T>;
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

// What there is once for a row, beside the convolution's part of it, as it lies in memory.
struct HeadRowBits {
    uint32_t dt, dt_bias, A, D, z, weight;
};

__device__ __forceinline__ float rounded(float value, int32_t dtype) {
    return with_dtype(dtype, [&](auto of) { return to_float(from_float<typename decltype(of)::Type>(value)); });
}

// A block's rows: they follow each other, in one head or in several of a group, of one batch entry.
template <class Params>
struct Mamba2StepBlock {
    const Params& p;
    const Mamba2StepLayout& layout;
    const Mamba2StepShared& shared;
    uint32_t part, first;  // first: of the group's rows
    int count;
    int64_t batch, group, channels, first_channel;
    int64_t zx;  // where the batch entry's row of zxBCdt begins

    __device__ __forceinline__ Mamba2StepBlock(const Params& p, const Mamba2StepLayout& layout, const Mamba2StepShared& shared)
        : p(p), layout(layout), shared(shared) {
        const uint32_t batch_group = layout.parts.quotient(blockIdx.x),
                       group_rows = layout.group_heads * layout.headdim.divisor;
        part = blockIdx.x - batch_group * layout.parts.divisor;
        batch = layout.groups.quotient(batch_group);
        group = batch_group - batch * p.ngroups;
        first = part * layout.rows;
        const int left = static_cast<int>(group_rows - first);
        count = left < layout.rows ? left : layout.rows;
        channels = p.nheads * p.headdim;
        first_channel = group * group_rows + first;
        zx = batch * p.zxBCdt_batch_stride;
    }
    __device__ __forceinline__ int64_t out() const { return batch * p.out_batch_stride + first_channel; }
    // Entry n of the group's B, then of its C.
    __device__ __forceinline__ int64_t channel_of_BC(int n) const {
        return channels + (n < p.dstate ? group * p.dstate + n : (p.ngroups + group - 1) * p.dstate + n);
    }
    __device__ __forceinline__ void load_window(int n, ConvStepBits& bits) const {
        load_conv_window(p, batch, channel_of_BC(n), p.zxBCdt, zx + channels + channel_of_BC(n), bits);
    }
    __device__ __forceinline__ ConvStepBits load_BC(int n) const {
        const int64_t channel = channel_of_BC(n);
        return load_conv_step(p, batch, channel, p.zxBCdt, zx + channels + channel);
    }
    __device__ __forceinline__ ConvStepBits load_x(int row) const {
        return load_conv_step(p, batch, first_channel + row, p.zxBCdt, zx + channels + first_channel + row);
    }
    __device__ __forceinline__ HeadRowBits load_row(int row) const {
        const uint32_t head_of_group = layout.headdim.quotient(first + row);
        const uint32_t head = static_cast<uint32_t>(group) * layout.group_heads + head_of_group;
        const uint32_t dim = first + row - head_of_group * layout.headdim.divisor;
        const int64_t channel = head * p.headdim + dim;
        HeadRowBits bits;
        bits.dt = load_bits(p.zxBCdt, zx + 2 * (channels + p.ngroups * p.dstate) + head, p.dtype);
        bits.dt_bias = load_bits(p.dt_bias, head, p.dt_bias_dtype);
        bits.A = load_bits(p.A_log, head, p.A_log_dtype);
        bits.D = load_bits(p.D, head * p.D_head_stride + dim * p.D_dim_stride, p.D_dtype);
        bits.z = load_bits(p.zxBCdt, zx + channel, p.dtype);
        bits.weight = p.norm_weight != nullptr ? load_bits(p.norm_weight, channel, p.norm_weight_dtype) : 0;
        return bits;
    }
    // Into shared memory; the convolution's state of the row's x is shifted.
    __device__ __forceinline__ void finish_row(int row, const ConvStepBits& conv, const HeadRowBits& bits) const {
        const float x = conv_step(p, conv);
        store_conv_state(p, batch, first_channel + row, conv);
        float dt = softplus(float_from_bits(bits.dt, p.dtype) + float_from_bits(bits.dt_bias, p.dt_bias_dtype));
        dt = dt < p.dt_min ? p.dt_min : dt > p.dt_max ? p.dt_max : dt;  // a NaN stays
        const float A = exp2_fast(float_from_bits(bits.A, p.A_log_dtype) * kLog2e);
        shared.decay_dt_x[row] = make_float2(exp2_fast(-dt * kLog2e * A), dt * x);
        shared.y[row] = float_from_bits(bits.D, p.D_dtype) * x;
        shared.gate[row] = silu(float_from_bits(bits.z, p.dtype));
        shared.weight[row] = float_from_bits(bits.weight, p.norm_weight_dtype);
    }
};

}  // namespace mamba
