// The end of a Mamba-2 layer's decode step: the gated RMSNorm of each group's channels, in place, and the convolution's state
// of B and C, which every head's block has read by now.
#pragma once

#include "causal_conv1d/cuda/step.cuh"

namespace mamba {

constexpr int kFinishHeld = 8;  // elements of a group in a thread
constexpr int kFinishMaxThreads = 1024;
static_assert(2 * MAMBA_MAX_DSTATE <= kFinishMaxThreads, "a thread for each channel of B and C");

__device__ __forceinline__ float sum_over_block(float value, float* of_warp) {
    value = sum_over_warp(value);
    const int lane = static_cast<int>(threadIdx.x) & 31;
    if (lane == 0) {
        of_warp[threadIdx.x / 32] = value;
    }
    __syncthreads();
    return sum_over_warp(lane < static_cast<int>(blockDim.x) / 32 ? of_warp[lane] : 0.0f);
}

// A block takes one group of one batch entry. A group beyond kFinishHeld elements a thread is read again to be written.
__global__ void __launch_bounds__(kFinishMaxThreads) mamba2_finish_kernel(const MambaMamba2Step p) {
    __shared__ float of_warp[kFinishMaxThreads / 32];
    const int thread = static_cast<int>(threadIdx.x);
    const int threads = static_cast<int>(blockDim.x);
    const int64_t batch = blockIdx.x / p.ngroups;
    const int64_t group = blockIdx.x - batch * p.ngroups;
    const int64_t channels = p.nheads * p.headdim;
    const int64_t size = channels / p.ngroups;
    const int64_t zx = batch * p.zxBCdt_batch_stride;

    // The kernel before let this one start when zxBCdt was there; it writes neither that nor these states.
    const int n = thread < p.dstate ? thread : thread - static_cast<int>(p.dstate);
    const bool shifts = thread < 2 * p.dstate;
    const int64_t channel = channels + ((thread < p.dstate ? 0 : p.ngroups) + group) * p.dstate + n;
    ConvStepBits bits;
    if (shifts) {
        load_conv_window(p, batch, channel, p.zxBCdt, zx + channels + channel, bits);
    }
    const int64_t step = static_cast<int64_t>(threads) * kFinishHeld;
    uint32_t z_bits[kFinishHeld], weight_bits[kFinishHeld], y_bits[kFinishHeld];
    const auto load_gate = [&](int64_t tile) {
#pragma unroll
        for (int i = 0; i < kFinishHeld; ++i) {
            const int64_t element = tile + i * threads + thread;
            if (element < size) {
                z_bits[i] = load_bits(p.zxBCdt, zx + group * size + element, p.dtype);
                weight_bits[i] = load_bits(p.norm_weight, group * size + element, p.norm_weight_dtype);
            }
        }
    };
    const int64_t out = batch * p.out_batch_stride + group * size;
    const auto load_y = [&](int64_t tile) {
#pragma unroll
        for (int i = 0; i < kFinishHeld; ++i) {
            const int64_t element = tile + i * threads + thread;
            if (element < size) {
                y_bits[i] = load_bits(p.out, out + element, p.dtype);
            }
        }
    };
    // What is normalised.
    const auto value_of = [&](int i) {
        const float y = float_from_bits(y_bits[i], p.dtype);
        return p.norm_before_gate ? y : y * silu(float_from_bits(z_bits[i], p.dtype));
    };
    if (p.norm_weight != nullptr) {
        load_gate(0);
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (shifts) {
        store_conv_state(p, batch, channel, bits);
    }
    if (p.norm_weight == nullptr) {
        return;
    }
    float sum = 0.0f;
    for (int64_t tile = 0; tile < size; tile += step) {
        if (tile > 0) {
            load_gate(tile);
        }
        load_y(tile);
#pragma unroll
        for (int i = 0; i < kFinishHeld; ++i) {
            if (tile + i * threads + thread < size) {
                const float value = value_of(i);
                sum = fmaf(value, value, sum);
            }
        }
    }
    sum = sum_over_block(sum, of_warp);
    const float rstd = rsqrtf(sum / static_cast<float>(size) + p.norm_eps);
    for (int64_t tile = 0; tile < size; tile += step) {
        if (size > step) {
            load_gate(tile);
            load_y(tile);
        }
#pragma unroll
        for (int i = 0; i < kFinishHeld; ++i) {
            const int64_t element = tile + i * threads + thread;
            if (element < size) {
                float value = value_of(i) * rstd * float_from_bits(weight_bits[i], p.norm_weight_dtype);
                if (p.norm_before_gate) {
                    value *= silu(float_from_bits(z_bits[i], p.dtype));
                }
                store_from_float(p.out, out + element, p.dtype, value);
            }
        }
    }
}

inline cudaError_t launch_mamba2_finish(const MambaMamba2Step& p) {
    const int64_t held = p.norm_weight != nullptr ? ceil_div(p.nheads * p.headdim / p.ngroups, kFinishHeld) : 1;
    const int64_t wanted = held > 2 * p.dstate ? held : 2 * p.dstate;
    const int64_t threads = round_up(wanted < kFinishMaxThreads ? wanted : kFinishMaxThreads, 32);
    return launch_programmatic_dependent(mamba2_finish_kernel, static_cast<unsigned>(p.batch * p.ngroups),
                                         static_cast<unsigned>(threads), 0, p.run.stream, p);
}

}  // namespace mamba
