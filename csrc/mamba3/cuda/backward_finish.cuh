// The last kernels of Mamba-3's backward scan: what goes from chunk to chunk for angles and steps, and sums over blocks in a
// fixed order.
#pragma once

#include "mamba3/cuda/backward_chunk.cuh"

namespace mamba {

constexpr int kMamba3FinishThreads = 256;
constexpr int kMamba3FinishHeads = 32;

// A block takes a sequence and head, whose gradient of the entering state is in dssm_state: k_state, v_state, mimo_v, and the
// weight of the step before. A sequence without steps hands its gradients on.
__global__ void __launch_bounds__(kMamba3FinishThreads)
    mamba3_before_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    __shared__ float sums[kMamba3FinishThreads];
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int64_t index = blockIdx.x, sequence_index = index / p.nheads, head = index % p.nheads;
    const Mamba3Sequence sequence = mamba3_sequence(p, sequence_index);
    const int64_t k_row = p.nheads * p.dstate, k_first = (sequence_index * p.rank * p.nheads + head) * p.dstate;
    if (sequence.seqlen == 0) {
        for (int64_t i = threadIdx.x; i < p.rank * p.dstate; i += kMamba3FinishThreads) {
            const int64_t at = k_first + i / p.dstate * k_row + i % p.dstate;
            q.dk_state[at] = q.dfinal_k != nullptr ? q.dfinal_k[at] : 0.0f;
        }
        for (int64_t i = threadIdx.x; i < p.headdim; i += kMamba3FinishThreads) {
            q.dv_state[index * p.headdim + i] = q.dfinal_v != nullptr ? q.dfinal_v[index * p.headdim + i] : 0.0f;
        }
        for (int64_t i = threadIdx.x; i < p.rank * p.headdim && p.mimo_v != nullptr; i += kMamba3FinishThreads) {
            launch.at<float>(w.mimo_v)[((launch.chunks.slots + sequence_index) * p.nheads + head) * p.rank * p.headdim + i] =
                0.0f;
        }
        return;
    }
    const float nu = weight_of_step_before(p, sequence, head);
    const float* const dstate_before = q.dssm_state + index * p.headdim * p.dstate;
    const float* const v = p.v_state + index * p.headdim;
    const float* const weight = p.mimo_v != nullptr ? p.mimo_v + head * p.rank * p.headdim : nullptr;
    float dnu = 0.0f;
    for (int64_t i = threadIdx.x; i < p.rank * p.dstate; i += kMamba3FinishThreads) {
        const int64_t r = i / p.dstate, n = i % p.dstate;
        float along = 0.0f;
        for (int64_t row = 0; row < p.headdim; ++row) {
            const float x = weight != nullptr ? v[row] * weight[r * p.headdim + row] : v[row];
            along = fmaf(dstate_before[row * p.dstate + n], x, along);
        }
        const int64_t at = k_first + r * k_row + n;
        q.dk_state[at] = nu * along;
        dnu = fmaf(along, p.k_state[at], dnu);
    }
    for (int64_t row = threadIdx.x; row < p.headdim; row += kMamba3FinishThreads) {
        float dv = 0.0f;
        for (int64_t r = 0; r < p.rank; ++r) {
            float dx = 0.0f;
            for (int64_t n = 0; n < p.dstate; ++n) {
                dx = fmaf(dstate_before[row * p.dstate + n], p.k_state[k_first + r * k_row + n], dx);
            }
            dx *= nu;
            dv = weight != nullptr ? fmaf(dx, weight[r * p.headdim + row], dv) : dv + dx;
            if (weight != nullptr) {
                launch.at<float>(
                    w.mimo_v)[(((launch.chunks.slots + sequence_index) * p.nheads + head) * p.rank + r) * p.headdim + row] =
                    dx * v[row];
            }
        }
        q.dv_state[index * p.headdim + row] = dv;
    }
    sums[threadIdx.x] = dnu;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int i = 0; i < kMamba3FinishThreads; ++i) {
            total += sums[i];
        }
        launch.at<float>(w.before)[index] = total;
    }
}

// A thread takes an angle of a sequence and head through all chunks from the last one on: what the steps of each chunk's last
// run get from later chunks. In double: over a long sequence sums of floats lose what is small.
__global__ void __launch_bounds__(kMamba3FinishThreads)
    mamba3_carry_angles_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int64_t of_sequence = p.nheads * p.nangles, slots = launch.chunks.slots;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kMamba3FinishThreads + threadIdx.x;
    if (index >= p.sequences * of_sequence) {
        return;
    }
    const int64_t sequence_index = index / of_sequence, own = index % of_sequence;
    const Mamba3Sequence sequence = mamba3_sequence(p, sequence_index);
    const int64_t first = mamba3_slot(p, launch.chunks, sequence_index, sequence.begin);
    const float* const totals = launch.at<const float>(w.angle_totals);
    double sum = q.dfinal_angle != nullptr ? static_cast<double>(q.dfinal_angle[index]) : 0.0;
#pragma unroll 4
    for (int64_t slot = first + ceil_div(sequence.seqlen, launch.chunks.steps) - 1; slot >= first; --slot) {
        launch.at<float>(w.angle_carry)[slot * of_sequence + own] = static_cast<float>(sum);
        const int start = __float_as_int(
            mamba3_values(launch.chunks, p.nheads, slot, own / p.nangles, kMamba3Start)[launch.chunks.steps - 1]);
        sum = start < 0 ? sum : 0.0;
        for (int64_t tile = 0; tile < launch.plan.row_tiles; ++tile) {
            sum += static_cast<double>(totals[(tile * slots + slot) * of_sequence + own]);
        }
    }
    if (q.dangle_state != nullptr) {
        q.dangle_state[index] = static_cast<float>(sum);
    }
}

// A block takes kMamba3FinishHeads heads of a chunk, a lane each: adt, dt and trap.
__global__ void __launch_bounds__(kMamba3FinishThreads)
    mamba3_finish_steps_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    __shared__ float carry[kMamba3FinishHeads * (MAMBA_MAX_DSTATE / 2 + 1)];
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int64_t head_blocks = ceil_div(p.nheads, kMamba3FinishHeads);
    const int64_t slot = blockIdx.x / head_blocks, first_head = blockIdx.x % head_blocks * kMamba3FinishHeads;
    const Mamba3Chunk chunk = find_chunk(p, launch.chunks, slot);
    if (chunk.steps == 0) {
        return;
    }
    const int angles = static_cast<int>(p.nangles), pitch = angles + 1 - angles % 2;
    for (int i = threadIdx.x; i < kMamba3FinishHeads * angles; i += kMamba3FinishThreads) {
        const int64_t head = first_head + i / angles;
        carry[i / angles * pitch + i % angles] =
            head < p.nheads ? launch.at<const float>(w.angle_carry)[(slot * p.nheads + head) * angles + i % angles] : 0.0f;
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const int64_t head = first_head + lane, all_steps = p.batch * p.seqlen;
    if (head >= p.nheads) {
        return;
    }
    const float* const start = mamba3_values(launch.chunks, p.nheads, slot, head, kMamba3Start);
    const int last_run = __float_as_int(start[launch.chunks.steps - 1]);
    for (int t = threadIdx.x / 32; t < chunk.steps; t += kMamba3FinishThreads / 32) {
        const int64_t step = chunk.row * p.seqlen + chunk.first + t;
        const int run = __float_as_int(start[t]);
        const bool first = chunk.index == 0 && t == 0;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float before =
            first && p.ssm_state != nullptr ? launch.at<const float>(w.before)[chunk.sequence * p.nheads + head] : 0.0f;
        for (int64_t tile = 0; tile < launch.plan.row_tiles; ++tile) {
            const float4* const terms = launch.at<const float4>(w.step_terms) + (tile * all_steps + step) * p.nheads + head;
            const float4 term = *terms;
            sum = make_float4(sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w);
            before += first || run == t ? 0.0f : (terms - p.nheads)->y;
        }
        if (run == last_run) {
            const float* const speeds = launch.chunks.speeds + mamba3_speeds_index(p, chunk.row, chunk.first + t, head);
            float turned = 0.0f;
            for (int i = 0; i < angles; ++i) {
                turned = fmaf(speeds[i], carry[lane * pitch + i], turned);
            }
            sum.w = fmaf(6.28318531f, turned, sum.w);
        }
        const float lambda = mamba3_values(launch.chunks, p.nheads, slot, head, kMamba3Lambda)[t];
        const float rest = mamba3_values(launch.chunks, p.nheads, slot, head, kMamba3Rest)[t];
        const float dt = mamba3_values(launch.chunks, p.nheads, slot, head, kMamba3Dt)[t];
        const float own = sum.y + sum.z;
        const int64_t at = step * p.nheads + head;
        store_from_float(q.dadt, at, p.adt_dtype, sum.x);
        store_from_float(q.ddt, at, p.dt_dtype, fmaf(lambda, own, fmaf(rest, before, sum.w)));
        store_from_float(q.dtrap, step * q.dtrap_step_stride + head, p.trap_dtype, lambda * rest * dt * (own - before));
    }
}

// A block takes a chunk, a thread an angle of a step (and of a head, where these have their own).
__global__ void __launch_bounds__(kMamba3FinishThreads)
    mamba3_finish_angles_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int64_t slot = blockIdx.x;
    const Mamba3Chunk chunk = find_chunk(p, launch.chunks, slot);
    const bool of_heads = p.angles_of_heads != 0;
    const int64_t angles = p.nangles, entries = of_heads ? p.nheads * angles : angles;
    const int64_t parts = of_heads ? launch.plan.row_tiles : launch.plan.splits * p.ngroups;
    const int64_t all_steps = p.batch * p.seqlen, first = chunk.row * p.seqlen + chunk.first;
    const float* const carry = launch.at<const float>(w.angle_carry) + slot * p.nheads * angles;
    for (int64_t i = threadIdx.x; i < chunk.steps * entries; i += kMamba3FinishThreads) {
        const int64_t t = i / entries, entry = i % entries, angle = entry % angles;
        float sum = 0.0f;
        for (int64_t part = 0; part < parts; ++part) {
            sum += launch.at<const float>(w.dangles)[(part * all_steps + first + t) * entries + entry];
        }
        const int64_t head = of_heads ? entry / angles : 0;
        const float* const start = mamba3_values(launch.chunks, p.nheads, slot, head, kMamba3Start);
        if (__float_as_int(start[t]) == __float_as_int(start[launch.chunks.steps - 1])) {
            const float speed = launch.chunks.speeds[mamba3_speeds_index(p, chunk.row, chunk.first + t, head) + angle];
            const float* const dt = mamba3_values(launch.chunks, p.nheads, slot, head, kMamba3Dt) + t;
            const int64_t next = launch.chunks.arrays * launch.chunks.pitch;  // head's dt
            float later = 0.0f;
#pragma unroll 8
            for (int64_t h = 0; h < (of_heads ? 1 : p.nheads); ++h) {
                later = fmaf(dt[h * next], carry[(head + h) * angles + angle], later);
            }
            sum = fmaf((1.0f - 4.0f * speed * speed) * 3.14159265f, later, sum);
        }
        store_from_float(q.dangles, (first + t) * q.dangle_step_stride + entry, p.angle_dtype, sum);
    }
}

inline cudaError_t launch_mamba3_finish(const MambaMamba3Backward& q, const Mamba3BackwardPlan& plan) {
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardLaunch launch = mamba3_backward_launch(q, plan);
    const int64_t slots = launch.chunks.slots;
    constexpr int kThreads = kMamba3FinishThreads;
    cudaError_t error = cudaSuccess;
    if (p.ssm_state != nullptr) {
        error = launch_mamba3(mamba3_before_kernel, p.sequences * p.nheads, 1, kThreads, 0, q, launch);
    }
    if (error == cudaSuccess) {
        const int64_t angles = p.sequences * p.nheads * p.nangles;
        error = launch_mamba3(mamba3_carry_angles_kernel, ceil_div(angles, kThreads), 1, kThreads, 0, q, launch);
    }
    if (error == cudaSuccess) {
        const int64_t blocks = slots * ceil_div(p.nheads, kMamba3FinishHeads);
        error = launch_mamba3(mamba3_finish_steps_kernel, blocks, 1, kThreads, 0, q, launch);
    }
    if (error == cudaSuccess && p.nangles > 0) {
        error = launch_mamba3(mamba3_finish_angles_kernel, slots, 1, kThreads, 0, q, launch);
    }
    return error;
}

}  // namespace mamba
