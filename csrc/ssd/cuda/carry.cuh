// Between the two passes of a walk along segments (states.cuh, states_warpgroup.cuh): from each segment's state at its end from
// zero to the state that the next one starts from.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/cuda_vector.cuh"
#include "ssd/launch.h"

namespace mamba {
namespace {

constexpr int kCarryThreads = 256;
constexpr int kCarryVector = 4;  // elements of a state that a thread takes
constexpr int kCarryAtOnce = 8;  // segments whose loads are under way together

// count: elements that exist. aligned: all of them, at a multiple of 16 bytes.
__device__ __forceinline__ Packed<float, kCarryVector> load_elements(const float* from, int count, bool aligned) {
    if (aligned) {
        return packed_load<float, kCarryVector>(from);
    }
    float values[kCarryVector];
#pragma unroll
    for (int k = 0; k < kCarryVector; ++k) {
        values[k] = k < count ? from[k] : 0.0f;
    }
    return pack<float, kCarryVector>(values);
}

__device__ __forceinline__ void store_elements(float* to, const float (&values)[kCarryVector], int count, bool aligned) {
    if (aligned) {
        packed_store<float, kCarryVector>(to, pack<float, kCarryVector>(values));
        return;
    }
#pragma unroll
    for (int k = 0; k < kCarryVector; ++k) {
        if (k < count) {
            to[k] = values[k];
        }
    }
}

__global__ void __launch_bounds__(kCarryThreads) ssd_carry_kernel(const MambaSsd p, const StatesLaunch launch) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const uint32_t state_size = static_cast<uint32_t>(launch.end_size);
    const bool aligned = state_size % kCarryVector == 0;
    const uint32_t blocks = ceil_div(state_size, kCarryThreads * kCarryVector);
    const uint32_t group_heads = static_cast<uint32_t>(launch.group_heads);
    const uint32_t heads = group_heads * static_cast<uint32_t>(p.ngroups);
    const uint32_t batches = static_cast<uint32_t>(p.batch);
    uint32_t block = blockIdx.x;
    const uint32_t element = (block % blocks * kCarryThreads + threadIdx.x) * kCarryVector;
    block /= blocks;
    const uint32_t slot = block % heads;
    block /= heads;
    const StateWalk& walk = launch.walks[block / batches];
    const int64_t head =
        static_cast<int64_t>(slot / group_heads) * (p.nheads / p.ngroups) + launch.first_head + slot % group_heads;
    if (element >= state_size) {
        return;
    }
    const int count = static_cast<int>(state_size - element);
    const int64_t row = block % batches * p.nheads + head;
    const int64_t rows = p.batch * p.nheads;  // of a segment
    float* at = walk.ends + row * state_size + element;
    const float* decay_at = walk.decays + row;
    const int64_t step = rows * state_size;
    float state[kCarryVector];
    unpack<float, kCarryVector>(load_elements(at, count, aligned), state);
    for (int left = static_cast<int>(launch.segments) - 2; left > 0; left -= kCarryAtOnce) {
        float decay[kCarryAtOnce];
        Packed<float, kCarryVector> end[kCarryAtOnce];
#pragma unroll
        for (int i = 0; i < kCarryAtOnce; ++i) {
            if (i < left) {
                decay[i] = decay_at[(i + 1) * rows];
                end[i] = load_elements(at + (i + 1) * step, count, aligned);
            }
        }
#pragma unroll
        for (int i = 0; i < kCarryAtOnce; ++i) {
            if (i < left) {
                float values[kCarryVector];
                unpack<float, kCarryVector>(end[i], values);
#pragma unroll
                for (int k = 0; k < kCarryVector; ++k) {
                    state[k] = fmaf(decay[i], state[k], values[k]);
                }
                store_elements(at + (i + 1) * step, state, count, aligned);
            }
        }
        at += kCarryAtOnce * step;
        decay_at += kCarryAtOnce * rows;
    }
}

}  // namespace

// Nothing where no segment has more than one before it.
cudaError_t launch_carry(const MambaSsd& p, const StatesLaunch& launch) {
    if (launch.segments <= 2) {
        return cudaSuccess;
    }
    const int64_t state_blocks = ceil_div(launch.end_size, kCarryThreads * kCarryVector);
    const int64_t blocks = state_blocks * launch.group_heads * p.ngroups * p.batch * launch.directions;
    return launch_programmatic_dependent(ssd_carry_kernel, blocks, kCarryThreads, 0, p.run.stream, p, launch);
}

}  // namespace mamba
