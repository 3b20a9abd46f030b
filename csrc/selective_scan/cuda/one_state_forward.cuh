// The forward scan of channels that have one state, see one_state.cuh.
#pragma once

#include "selective_scan/cuda/one_state.cuh"

namespace mamba {

template <typename T, int kWarps, int kEach, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    selective_scan_one_state_forward_kernel(const MambaSelectiveScan p, bool quads) {
    const ScanBlock block = one_state_block(p, kWarps * kEach);
    const OneStateChannels channels(p, block, kEach);
    const int lane = threadIdx.x % 32;
    const T* const B_row = row_of(static_cast<const T*>(p.B), block.batch, p.B_batch_stride, block.group, p.B_group_stride);
    const T* const C_row = row_of(static_cast<const T*>(p.C), block.batch, p.C_batch_stride, block.group, p.C_group_stride);
    const T* const first_u = row_of(static_cast<const T*>(p.u), block.batch, p.u_batch_stride, channels.first, p.u_dim_stride);
    const T* const first_delta =
        row_of(static_cast<const T*>(p.delta), block.batch, p.delta_batch_stride, channels.first, p.delta_dim_stride);
    T* const first_out = row_of(static_cast<T*>(p.out), block.batch, p.out_batch_stride, channels.first, p.out_dim_stride);
    const int64_t own = block.batch * p.dim + channels.first + lane;  // in (B, D): of channel `lane`
    float carry = lane < channels.count && p.initial_state != nullptr ? p.initial_state[own] : 0.0f;
    float* checkpoint = p.checkpoints;  // of the tile's first step
    if (checkpoint != nullptr) {
        checkpoint += (block.batch * ((p.seqlen - 1) / MAMBA_SCAN_CHECKPOINT) - 1) * p.dim + channels.first;
    }

    for (int64_t first = 0; first < p.seqlen; first += kOneStateTile) {
        const LaneSteps steps(p, first, quads);
        float B[kLaneSteps], C[kLaneSteps];
        steps.load(B_row, B);
        steps.load(C_row, C);
        const T *u_row = first_u, *delta_row = first_delta;
        T* out_row = first_out;
        for (int c = 0; c < channels.count; ++c) {
            const float exponent = channels.of(channels.exponent, c), skip = channels.of(channels.skip, c);
            float u[kLaneSteps], dt[kLaneSteps], y[kLaneSteps], decay[kLaneSteps];
            steps.load(delta_row, dt);
            steps.load(u_row, u);
            time_steps<T>(dt, channels.of(channels.bias, c), p.delta_softplus != 0, steps.valid);
            float h = 0.0f;
#pragma unroll
            for (int i = 0; i < kLaneSteps; ++i) {
                decay[i] = exp2_fast(exponent * dt[i]);
                y[i] = skip * u[i];
                u[i] *= dt[i] * B[i];
                h = fmaf(decay[i], h, u[i]);
            }
            h = LaneCrossing<false>(dt).pass(h, exponent, channels.of(carry, c));
            if (checkpoint != nullptr && lane % (MAMBA_SCAN_CHECKPOINT / kLaneSteps) == 0 && steps.valid > 0 &&
                first + lane > 0) {
                checkpoint[lane / (MAMBA_SCAN_CHECKPOINT / kLaneSteps) * p.dim + c] = h;
            }
#pragma unroll
            for (int i = 0; i < kLaneSteps; ++i) {
                h = fmaf(decay[i], h, u[i]);
                y[i] = fmaf(C[i], h, y[i]);
            }
            h = channels.of(h, 31);
            carry = lane == c ? h : carry;
            if (p.add != 0) {
                steps.add(static_cast<const T*>(out_row), y);
            }
            steps.store(out_row, y);
            u_row += p.u_dim_stride;
            delta_row += p.delta_dim_stride;
            out_row += p.out_dim_stride;
        }
        if (checkpoint != nullptr) {
            checkpoint += kOneStateTile / MAMBA_SCAN_CHECKPOINT * p.dim;
        }
    }
    if (p.last_state != nullptr && lane < channels.count) {
        p.last_state[own] = carry;
    }
}

template <typename T, int kWarps, int kEach, int kBlocks>
cudaError_t launch_one_state_forward(const MambaSelectiveScan& p) {
    return launch_kernel(selective_scan_one_state_forward_kernel<T, kWarps, kEach, kBlocks>, scan_grid(p, kWarps * kEach, 1),
                         32 * kWarps, 0, p.run.stream, p, inputs_in_quads(p));
}

}  // namespace mamba
