// The backward scan of channels that have one state, see one_state.cuh; backward.cuh has the formulas.
//
// A warp takes kEach channels of a tile, one after the other, from the last tile to the first, and adds up their dB and dC in
// registers; behind each tile the block adds up its warps'.
#pragma once

#include "selective_scan/cuda/one_state.cuh"
#include "selective_scan/parts.h"

namespace mamba {

template <int kWarps, int kEach>
struct OneStateBackwardShared {
    float dB[kWarps][kOneStateTile], dC[kWarps][kOneStateTile];
    // Each lane's sums of a channel.
    float dA[kEach][32 * kWarps], dD[kEach][32 * kWarps], ddelta_bias[kEach][32 * kWarps];
};

// A lane's steps of a channel.
struct OneStateSteps {
    float u[kLaneSteps], dt[kLaneSteps], dy[kLaneSteps];
    float decay[kLaneSteps];
    float h[kLaneSteps + 1];  // the states before the steps, and after the last one

    __device__ __forceinline__ void find_states(const float (&B)[kLaneSteps], float exponent, float carry) {
        float end = 0.0f;
#pragma unroll
        for (int i = 0; i < kLaneSteps; ++i) {
            decay[i] = exp2_fast(exponent * dt[i]);
            h[i + 1] = dt[i] * u[i] * B[i];
            end = fmaf(decay[i], end, h[i + 1]);
        }
        h[0] = LaneCrossing<false>(dt).pass(end, exponent, carry);
#pragma unroll
        for (int i = 0; i < kLaneSteps; ++i) {
            h[i + 1] = fmaf(decay[i], h[i], h[i + 1]);
        }
    }

    // What is passed back to the lane's last step, from what is passed back to the tile's.
    __device__ __forceinline__ float passed_back(const float (&C)[kLaneSteps], float exponent, float carry) const {
        float w = 0.0f;
#pragma unroll
        for (int i = kLaneSteps - 1; i >= 0; --i) {
            w = decay[i] * fmaf(C[i], dy[i], w);
        }
        return LaneCrossing<true>(dt).pass(w, exponent, carry);
    }

    // The gradients of u, and (in the place of dt) of dt, which are ready but for softplus; w: what is passed back to the last
    // step. Adds to those of B and C, and returns what the first step passes back.
    __device__ __forceinline__ float go_back(const float (&B)[kLaneSteps], const float (&C)[kLaneSteps], float exponent,
                                             float skip, float w, float (&dB)[kLaneSteps], float (&dC)[kLaneSteps],
                                             float (&du)[kLaneSteps], float& dA) {
        dA = 0.0f;
#pragma unroll
        for (int i = kLaneSteps - 1; i >= 0; --i) {
            const float g = fmaf(C[i], dy[i], w);
            dC[i] = fmaf(dy[i], h[i + 1], dC[i]);
            w = decay[i] * g;
            const float wh = w * h[i];
            dA = fmaf(dt[i], wh, dA);
            const float ug = u[i] * g;
            dB[i] = fmaf(dt[i], ug, dB[i]);
            du[i] = fmaf(dt[i] * B[i], g, skip * dy[i]);
            dt[i] = fmaf(ug, B[i], exponent * kLn2 * wh);
        }
        return w;
    }
};

// Adds a tile's dB and dC of the block's first `warps` warps to those of the group, or is the first to write them. matrix:
// where the group's begin.
template <class Shared>
__device__ __forceinline__ void add_up_matrices(const ScanBackward& q, const Shared& shared, int warps, int64_t first_step,
                                                int64_t matrix, bool atomic) {
    const MambaSelectiveScan& p = q.forward;
    for (int i = threadIdx.x; i < kOneStateTile; i += blockDim.x) {
        const int64_t step = first_step + i;
        if (step < p.seqlen) {
            float dB = shared.dB[0][i], dC = shared.dC[0][i];
            for (int warp = 1; warp < warps; ++warp) {
                dB += shared.dB[warp][i];
                dC += shared.dC[warp][i];
            }
            const int64_t at = matrix + (p.reverse != 0 ? p.seqlen - 1 - step : step);
            if (atomic) {
                atomicAdd(q.parts.dB + at, dB);
                atomicAdd(q.parts.dC + at, dC);
            } else {
                q.parts.dB[at] = dB;
                q.parts.dC[at] = dC;
            }
        }
    }
}

template <typename T, int kWarps, int kEach, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    selective_scan_one_state_backward_kernel(const ScanBackward q, bool quads, bool atomic) {
    __shared__ __align__(16) OneStateBackwardShared<kWarps, kEach> shared;
    const MambaSelectiveScan& p = q.forward;
    const ScanBlock block = one_state_block(p, kWarps * kEach);
    const OneStateChannels channels(p, block, kEach);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
        shared.dA[c][threadIdx.x] = shared.dD[c][threadIdx.x] = shared.ddelta_bias[c][threadIdx.x] = 0.0f;
    }
    const int64_t own = block.batch * p.dim + channels.first + lane;  // in (B, D): of channel `lane`
    float carry = lane < channels.count && q.dlast_state != nullptr ? q.dlast_state[own] : 0.0f;
    const T* const B_row = row_of(static_cast<const T*>(p.B), block.batch, p.B_batch_stride, block.group, p.B_group_stride);
    const T* const C_row = row_of(static_cast<const T*>(p.C), block.batch, p.C_batch_stride, block.group, p.C_group_stride);
    const int64_t slot = q.slots > 1 ? block.index : 0;
    const int64_t matrix = ((slot * p.batch + block.batch) * p.ngroups + block.group) * p.seqlen;  // in dB, dC

    for (int64_t first = p.seqlen > 0 ? (p.seqlen - 1) / kOneStateTile * kOneStateTile : -1; first >= 0;
         first -= kOneStateTile) {
        const LaneSteps steps(p, first, quads);
        const int64_t to_next_tile = p.reverse != 0 ? kOneStateTile : -kOneStateTile;
        // The states before the tile, of channel `lane`.
        const float* from = p.initial_state != nullptr ? p.initial_state + own : nullptr;
        if (first > 0) {
            const int64_t index = block.batch * ((p.seqlen - 1) / MAMBA_SCAN_CHECKPOINT) + first / MAMBA_SCAN_CHECKPOINT - 1;
            from = p.checkpoints + index * p.dim + channels.first + lane;
        }
        const float start = from != nullptr && lane < channels.count ? *from : 0.0f;
        float B[kLaneSteps], C[kLaneSteps], dB[kLaneSteps] = {}, dC[kLaneSteps] = {};
        steps.load(B_row, B);
        steps.load(C_row, C);
        for (int c = 0; c < channels.count; ++c) {
            const auto row = [&](auto* data, int64_t batch_stride, int64_t dim_stride) {
                return row_of(data, block.batch, batch_stride, channels.first + c, dim_stride);
            };
            const float exponent = channels.of(channels.exponent, c), bias = channels.of(channels.bias, c);
            const float skip = channels.of(channels.skip, c);
            const T* const delta = row(static_cast<const T*>(p.delta), p.delta_batch_stride, p.delta_dim_stride);
            const T* const u = row(static_cast<const T*>(p.u), p.u_batch_stride, p.u_dim_stride);
            const T* const dout = row(static_cast<const T*>(q.dout), q.dout_batch_stride, q.dout_dim_stride);
            OneStateSteps at;
            steps.load(delta, at.dt);
            steps.load(u, at.u);
            steps.load(dout, at.dy);
            const bool last_channel = c + 1 == channels.count;
            if (!last_channel || first > 0) {
                prefetch_next(delta, delta - c * p.delta_dim_stride, p.delta_dim_stride, last_channel, steps, to_next_tile);
                prefetch_next(u, u - c * p.u_dim_stride, p.u_dim_stride, last_channel, steps, to_next_tile);
                prefetch_next(dout, dout - c * q.dout_dim_stride, q.dout_dim_stride, last_channel, steps, to_next_tile);
            }
            time_steps<T>(at.dt, bias, p.delta_softplus != 0, steps.valid);
            at.find_states(B, exponent, channels.of(start, c));
            if (p.out != nullptr) {
                T* const out = row(static_cast<T*>(p.out), p.out_batch_stride, p.out_dim_stride);
                float y[kLaneSteps];
#pragma unroll
                for (int i = 0; i < kLaneSteps; ++i) {
                    y[i] = fmaf(C[i], at.h[i + 1], skip * at.u[i]);
                }
                if (p.add != 0) {
                    steps.add(static_cast<const T*>(out), y);
                }
                steps.store(out, y);
            }
            float D_sum = 0.0f, bias_sum = 0.0f, dA, du[kLaneSteps];
#pragma unroll
            for (int i = 0; i < kLaneSteps; ++i) {
                D_sum = fmaf(at.dy[i], at.u[i], D_sum);
            }
            float w = at.passed_back(C, exponent, channels.of(carry, c));
            w = at.go_back(B, C, exponent, skip, w, dB, dC, du, dA);
            w = channels.of(w, 0);
            carry = lane == c ? w : carry;
            steps.store(row(static_cast<T*>(q.du), q.du_batch_stride, q.du_dim_stride), du);
            if (p.delta_softplus != 0) {
                float raw[kLaneSteps];
                steps.load(delta, raw);  // again: registers are scarce
#pragma unroll
                for (int i = 0; i < kLaneSteps; ++i) {
                    at.dt[i] *= sigmoid(raw[i] + bias);
                }
            }
#pragma unroll
            for (int i = 0; i < kLaneSteps; ++i) {
                bias_sum += i < steps.valid ? at.dt[i] : 0.0f;
            }
            steps.store(row(static_cast<T*>(q.ddelta), q.ddelta_batch_stride, q.ddelta_dim_stride), at.dt);
            shared.dA[c][threadIdx.x] += dA;
            shared.dD[c][threadIdx.x] += D_sum;
            shared.ddelta_bias[c][threadIdx.x] += bias_sum;
        }
        write_row(shared.dB[warp] + lane * kLaneSteps, dB);
        write_row(shared.dC[warp] + lane * kLaneSteps, dC);
        __syncthreads();
        add_up_matrices(q, shared, (block.channels + kEach - 1) / kEach, first, matrix, atomic);
        __syncthreads();  // before the next tile's
    }

    for (int c = 0; c < channels.count; ++c) {
        const int64_t part = block.batch * p.dim + channels.first + c;
        const auto put = [&](float* to, float sum) {
            sum = sum_over_warp(sum);
            if (to != nullptr && lane == 0) {
                to[part] = sum;
            }
        };
        put(q.parts.dA, shared.dA[c][threadIdx.x]);
        put(q.parts.dD, shared.dD[c][threadIdx.x]);
        put(q.parts.ddelta_bias, shared.ddelta_bias[c][threadIdx.x]);
    }
    if (q.dinitial_state != nullptr && lane < channels.count) {
        q.dinitial_state[own] = carry;
    }
}

template <typename T, int kWarps, int kEach, int kBlocks>
cudaError_t launch_one_state_backward(const ScanBackward& q) {
    const MambaSelectiveScan& p = q.forward;
    const bool atomic = q.slots == 1 && p.dim / p.ngroups > kWarps * kEach;
    return launch_kernel(selective_scan_one_state_backward_kernel<T, kWarps, kEach, kBlocks>, scan_grid(p, kWarps * kEach, 1),
                         32 * kWarps, 0, p.run.stream, q, inputs_in_quads(p) && gradients_in_quads(q), atomic);
}

}  // namespace mamba
