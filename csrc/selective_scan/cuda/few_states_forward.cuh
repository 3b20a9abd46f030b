// The forward scan of channels that have few states, see few_states.cuh.
#pragma once

#include "selective_scan/cuda/few_states.cuh"

namespace mamba {

// What is on its way to a block.
template <typename T, int kWarps>
struct FewStatesForwardShared {
    WaitingSteps<T, 32 * kWarps> u, delta;
    WaitingMatrices<T> matrices;
};

template <RowAccess kAccess, typename T, int kWarps>
__device__ __forceinline__ void scan_few_states(const MambaSelectiveScan& p, const ScanBlock& block,
                                                FewStatesForwardShared<T, kWarps>& waiting) {
    const LaneSteps<kAccess> steps(p);
    const int own = threadIdx.x / 32 * 2 + channel_of_warp(), lane = channel_lane(), states = static_cast<int>(p.dstate);
    const bool exists = own < block.channels;
    const int64_t channel = block.first_channel + (exists ? own : 0);
    const auto row = [&](auto* data, int64_t batch_stride, int64_t stride) {
        return lane_row(data, block.batch, batch_stride, channel, stride, steps.place(0));
    };
    const T* u_at = row(static_cast<const T*>(p.u), p.u_batch_stride, p.u_dim_stride);
    const T* delta_at = row(static_cast<const T*>(p.delta), p.delta_batch_stride, p.delta_dim_stride);
    T* out_at = row(static_cast<T*>(p.out), p.out_batch_stride, p.out_dim_stride);
    const float bias = p.delta_bias != nullptr ? p.delta_bias[channel] : 0.0f, skip = p.D != nullptr ? p.D[channel] : 0.0f;
    // Lane n has state n's.
    const int64_t first_state = (block.batch * p.dim + channel) * states;
    const bool has_state = exists && lane < states;
    const float own_exponent = has_state ? decay_exponent(p.A[channel * states + lane]) : 0.0f;
    float own_carry = has_state && p.initial_state != nullptr ? p.initial_state[first_state + lane] : 0.0f;
    const bool keeps = p.checkpoints != nullptr && lane % (MAMBA_SCAN_CHECKPOINT / kLaneSteps) == 0;
    const int64_t tile_states = kFewStatesTile / MAMBA_SCAN_CHECKPOINT * p.dim * states;
    float* checkpoint = p.checkpoints;  // of the lane's first step
    if (keeps) {
        const int64_t index =
            block.batch * ((p.seqlen - 1) / MAMBA_SCAN_CHECKPOINT) - 1 + lane * kLaneSteps / MAMBA_SCAN_CHECKPOINT;
        checkpoint += (index * p.dim + channel) * states;
    }

    int count = exists ? steps.count(0) : 0, stage = 0;
    GroupRows<T, kAccess> matrices(p, block, steps.place(0));
    const auto fetch = [&](int first, int to_stage, int row_count) {
        waiting.u.fetch(threadIdx.x, steps, u_at, row_count);
        waiting.delta.fetch(threadIdx.x, steps, delta_at, row_count);
        matrices.fetch(waiting.matrices, to_stage, steps, first, steps.to_next_tile());
        cp_async_commit_group();
        u_at = opaque(u_at + steps.to_next_tile());
        delta_at = opaque(delta_at + steps.to_next_tile());
    };
    fetch(0, 0, count);
#pragma unroll 1
    for (int first = 0; first < steps.seqlen; first += kFewStatesTile) {
        const int next_count = exists ? steps.count(first + kFewStatesTile) : 0;
        float u[kLaneSteps], dt[kLaneSteps], y[kLaneSteps];
        cp_async_wait_group<0>();
        __syncthreads();
        steps.template unpack_steps<T>(waiting.u.read(threadIdx.x), u);
        steps.template unpack_steps<T>(waiting.delta.read(threadIdx.x), dt);
        fetch(first + kFewStatesTile, 1 - stage, next_count);
        time_steps<T>(dt, bias, p.delta_softplus != 0, count);
#pragma unroll
        for (int i = 0; i < kLaneSteps; ++i) {
            y[i] = skip * u[i];
            u[i] = opaque_value(dt[i] * u[i]);
        }
        const LaneCrossing<false> crossing(dt);
        const int keeps_here = opaque(static_cast<int>(keeps && count > 0 && first + lane > 0));
#pragma unroll 1
        for (int n = 0; n < states; ++n) {
            float x[kLaneSteps], C[kLaneSteps], decay[kLaneSteps];
            steps.template unpack_steps<T>(waiting.matrices.B[stage][n].read(lane), x);
            const float exponent = of_channel_lane(own_exponent, n), carry = of_channel_lane(own_carry, n);
            float h = crossing.begin(carry);
#pragma unroll
            for (int i = 0; i < kLaneSteps; ++i) {
                decay[i] = exp2_fast(exponent * dt[i]);
                x[i] *= u[i];
                h = fmaf(decay[i], h, x[i]);
            }
            const float passed = crossing.pass(h, exponent);
            h = crossing.reach(passed, carry);
            const float end = crossing.end(passed);
            own_carry = lane == n ? end : own_carry;
            if (keeps_here != 0) {
                checkpoint[n] = h;
            }
            steps.template unpack_steps<T>(waiting.matrices.C[stage][n].read(lane), C);
#pragma unroll
            for (int i = 0; i < kLaneSteps; ++i) {
                h = fmaf(decay[i], h, x[i]);
                y[i] = fmaf(C[i], h, y[i]);
            }
        }
        if (p.add != 0) {
            steps.add(static_cast<const T*>(out_at), count, y);
        }
        steps.store(out_at, count, y);
        out_at = opaque(out_at + steps.to_next_tile());
        checkpoint += tile_states;
        count = next_count;
        stage = 1 - stage;
    }
    if (p.last_state != nullptr && has_state) {
        p.last_state[first_state + lane] = own_carry;
    }
}

template <typename T, int kWarps, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    selective_scan_few_states_forward_kernel(const MambaSelectiveScan p, bool quads) {
    static_assert(kWarps >= kMostFewStates, "a warp fetches a state's B and C");
    __shared__ FewStatesForwardShared<T, kWarps> waiting;
    const ScanBlock block = few_states_block(p, 2 * kWarps);
    if (!quads) {
        scan_few_states<RowAccess::kElements, T, kWarps>(p, block, waiting);
    } else if (p.reverse != 0) {
        scan_few_states<RowAccess::kQuadsReverse, T, kWarps>(p, block, waiting);
    } else {
        scan_few_states<RowAccess::kQuads, T, kWarps>(p, block, waiting);
    }
}

template <typename T, int kWarps, int kBlocks>
cudaError_t launch_few_states_forward(const MambaSelectiveScan& p) {
    return launch_kernel(selective_scan_few_states_forward_kernel<T, kWarps, kBlocks>, scan_grid(p, 2 * kWarps, 1), 32 * kWarps,
                         0, p.run.stream, p, inputs_in_quads(p));
}

}  // namespace mamba
