// Small kernels around the forward walks, of all dtypes: the states with which segments start, and the output of rows that
// wait.
#pragma once

#include "common/cuda_vector.cuh"
#include "mamba3/plan.h"

namespace mamba {

// ends[i] = the state at the end of segment i, from its own state from zero and the one before it.
constexpr int kMamba3CarryStateThreads = 256;

__global__ void __launch_bounds__(kMamba3CarryStateThreads)
    mamba3_carry_states_kernel(const MambaMamba3 p, int64_t segments, float* ends, const float* decays) {
    const int64_t size = p.headdim * p.dstate;
    const int64_t rows = p.sequences * p.nheads;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kMamba3CarryStateThreads + threadIdx.x;
    griddepcontrol_wait();
    if (index >= rows * size) {
        return;
    }
    float state = ends[index];
    for (int64_t segment = 1; segment + 1 < segments; ++segment) {
        float& end = ends[segment * rows * size + index];
        state = fmaf(decays[segment * rows + index / size], state, end);
        end = state;
    }
}

cudaError_t launch_mamba3_carry_states(const MambaMamba3& p, int64_t segments, float* ends, const float* decays) {
    if (segments <= 2) {
        return cudaSuccess;
    }
    const int64_t states = p.sequences * p.nheads * p.headdim * p.dstate;
    return launch_programmatic_dependent(mamba3_carry_states_kernel,
                                         static_cast<unsigned>(ceil_div(states, kMamba3CarryStateThreads)),
                                         kMamba3CarryStateThreads, 0, p.run.stream, p, segments, ends, decays);
}

// Where a norm goes over more than one block's columns, or the ranks take several passes, rows of y wait in the workspace
// (B, L, R, H, P): a warp makes the output of each step and head.
constexpr int kMamba3OutputThreads = 128;

__global__ void __launch_bounds__(kMamba3OutputThreads) mamba3_finish_kernel(const MambaMamba3 p, const float* rows) {
    constexpr int kEach = MAMBA_MAX_HEADDIM / 32;
    const int lane = threadIdx.x % 32;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (kMamba3OutputThreads / 32) + threadIdx.x / 32;
    if (index >= p.batch * p.seqlen * p.nheads) {
        return;
    }
    const int64_t head = index % p.nheads;
    const int64_t step = index / p.nheads % p.seqlen;
    const int64_t row = index / p.nheads / p.seqlen;
    if (p.cu_seqlens != nullptr && step >= p.cu_seqlens[p.sequences]) {
        return;
    }
    const int64_t z = row * p.z_batch_stride + step * p.z_len_stride + head * p.z_head_stride;
    const int64_t to = row * p.out_batch_stride + step * p.out_len_stride + head * p.out_head_stride;
    float out[kEach] = {};
    for (int64_t rank = 0; rank < p.rank; ++rank) {
        const float* const from = rows + (((row * p.seqlen + step) * p.rank + rank) * p.nheads + head) * p.headdim;
        const int64_t weights = (head * p.rank + rank) * p.headdim;
        float y[kEach];
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            y[i] = lane + 32 * i < p.headdim ? from[lane + 32 * i] : 0.0f;
            squares = fmaf(y[i], y[i], squares);
        }
        float rstd = 1.0f;
        if (p.norm_weight != nullptr) {
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2) {
                squares += __shfl_xor_sync(0xffffffffu, squares, distance);
            }
            rstd = rsqrtf(squares / static_cast<float>(p.headdim) + p.norm_eps);
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int column = lane + 32 * i;
            if (column < p.headdim) {
                if (p.norm_weight != nullptr) {
                    y[i] *= rstd * p.norm_weight[head * p.headdim + column];
                }
                if (p.z != nullptr) {
                    const float gate = load_as_float(p.z, z + column, p.dtype);
                    y[i] *= silu(p.mimo_z != nullptr ? gate * p.mimo_z[weights + column] : gate);
                }
                if (p.mimo_out == nullptr) {
                    store_from_float(p.out, to + rank * p.out_rank_stride + column, p.dtype, y[i]);
                } else {
                    out[i] = fmaf(y[i], p.mimo_out[weights + column], out[i]);
                }
            }
        }
    }
    if (p.mimo_out != nullptr) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (lane + 32 * i < p.headdim) {
                store_from_float(p.out, to + lane + 32 * i, p.dtype, out[i]);
            }
        }
    }
}

cudaError_t launch_mamba3_finish_rows(const MambaMamba3& p, const float* rows) {
    const int64_t count = p.batch * p.seqlen * p.nheads;
    if (count == 0) {
        return cudaSuccess;
    }
    return launch_kernel(mamba3_finish_kernel, static_cast<unsigned>(ceil_div(count, kMamba3OutputThreads / 32)),
                         kMamba3OutputThreads, 0, p.run.stream, p, rows);
}

}  // namespace mamba
