// The last kernels of Mamba-3's backward scan: what goes from chunk to chunk for angles and steps, and sums over blocks in a
// fixed order.
#pragma once

#include "mamba3/cuda/backward/finish_angles.cuh"
#include "mamba3/cuda/backward/matrices.cuh"

namespace mamba {

constexpr int kMamba3FinishThreads = 256;
constexpr int kMamba3FinishHeads = 32;
constexpr int kMamba3BackwardCarryThreads = 64;  // few, for more blocks

// Of a sequence and head, whose gradient of the entering state is in dssm_state: the gradients of k_state, v_state, mimo_v and
// of the weight of the step before. A sequence without steps passes its gradients on. sums: one of each thread.
__device__ __forceinline__ void find_step_before(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch,
                                                 int64_t index, float* sums) {
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int64_t sequence_index = index / p.nheads, head = index % p.nheads, slots = launch.chunks.slots;
    const SequenceRange sequence = sequence_range(p, sequence_index);
    const bool has_steps = sequence.seqlen > 0;
    const int64_t k_row = p.nheads * p.dstate, k_first = (sequence_index * p.rank * p.nheads + head) * p.dstate;
    const float nu = has_steps ? weight_of_step_before(p, sequence, head) : 0.0f;
    const float* const dstate_before = q.dssm_state + index * p.headdim * p.dstate;
    const float* const v = p.v_state + index * p.headdim;
    const float* const weight = p.mimo_v != nullptr ? p.mimo_v + head * p.rank * p.headdim : nullptr;
    float dnu = 0.0f;
    for (int64_t i = threadIdx.x; i < p.rank * p.dstate; i += kMamba3BackwardCarryThreads) {
        const int64_t r = i / p.dstate, n = i % p.dstate, at = k_first + r * k_row + n;
        float along = 0.0f;
        for (int64_t row = 0; row < p.headdim && has_steps; ++row) {
            const float x = weight != nullptr ? v[row] * weight[r * p.headdim + row] : v[row];
            along = fmaf(dstate_before[row * p.dstate + n], x, along);
        }
        q.dk_state[at] = has_steps ? nu * along : q.dfinal_k != nullptr ? q.dfinal_k[at] : 0.0f;
        dnu = fmaf(along, p.k_state[at], dnu);
    }
    for (int64_t row = threadIdx.x; row < p.headdim; row += kMamba3BackwardCarryThreads) {
        float dv = has_steps || q.dfinal_v == nullptr ? 0.0f : q.dfinal_v[index * p.headdim + row];
        for (int64_t r = 0; r < p.rank; ++r) {
            float dx = 0.0f;
            for (int64_t n = 0; n < p.dstate && has_steps; ++n) {
                dx = fmaf(dstate_before[row * p.dstate + n], p.k_state[k_first + r * k_row + n], dx);
            }
            dx *= nu;
            dv = weight != nullptr ? fmaf(dx, weight[r * p.headdim + row], dv) : dv + dx;
            if (weight != nullptr) {
                const int64_t at = (((slots + sequence_index) * p.nheads + head) * p.rank + r) * p.headdim + row;
                launch.at<float>(w.mimo_v)[at] = has_steps ? dx * v[row] : 0.0f;
            }
        }
        q.dv_state[index * p.headdim + row] = dv;
    }
    sums[threadIdx.x] = dnu;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int i = 0; i < kMamba3BackwardCarryThreads; ++i) {
            total += sums[i];
        }
        launch.at<float>(w.before)[index] = total;
    }
}

// What the steps of each chunk's last run get from later chunks, of an angle of a sequence and head, through all chunks from
// the last one on. In double: over a long sequence sums of floats lose what is small.
__device__ __forceinline__ void carry_angle(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch, int64_t index) {
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int64_t of_sequence = p.nheads * p.nangles;
    const int64_t sequence_index = index / of_sequence, own = index % of_sequence, head = own / p.nangles;
    const SequenceRange sequence = sequence_range(p, sequence_index);
    const int64_t first = slot_of_sequence(p, launch.chunks.steps, sequence_index, sequence.begin);
    const float* const totals = launch.at<const float>(w.angle_totals) + own;
    float* const carry = launch.at<float>(w.angle_carry) + own;
    double sum = q.dfinal_angle != nullptr ? static_cast<double>(q.dfinal_angle[index]) : 0.0;
    constexpr int kAhead = 8;
    for (int64_t last = first + ceil_div(sequence.seqlen, launch.chunks.steps) - 1; last >= first; last -= kAhead) {
        double total[kAhead];
        bool restarts[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            total[j] = last - j >= first ? totals[(last - j) * of_sequence] : 0.0f;
            restarts[j] = false;
        }
        if (p.seq_idx != nullptr) {
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                restarts[j] = last - j >= first && __float_as_int(mamba3_values(launch.chunks, p.nheads, last - j, head,
                                                                                kMamba3Start)[launch.chunks.steps - 1]) >= 0;
            }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            if (last - j >= first) {
                carry[(last - j) * of_sequence] = static_cast<float>(sum);
                sum = (restarts[j] ? 0.0 : sum) + total[j];
            }
        }
    }
    if (q.dangle_state != nullptr) {
        q.dangle_state[index] = static_cast<float>(sum);
    }
}

// The first blocks take a sequence and head with a given state each, the others an angle a thread.
__global__ void __launch_bounds__(kMamba3BackwardCarryThreads)
    mamba3_backward_carry_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    __shared__ float sums[kMamba3BackwardCarryThreads];
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int64_t all = q.forward.sequences * q.forward.nheads, given = q.forward.ssm_state != nullptr ? all : 0;
    const int64_t block = blockIdx.x;
    if (block < given) {
        find_step_before(q, launch, block, sums);
        return;
    }
    const int64_t index = (block - given) * kMamba3BackwardCarryThreads + threadIdx.x;
    if (index < all * q.forward.nangles) {
        carry_angle(q, launch, index);
    }
}

constexpr int kMamba3FinishSteps = kMamba3MostSteps / (kMamba3FinishThreads / 32);  // of a warp

// A block takes kMamba3FinishHeads heads of a chunk, a lane each, and a warp some of its steps: adt, dt and trap.
__global__ void __launch_bounds__(kMamba3FinishThreads, 3)
    mamba3_finish_steps_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int64_t head_blocks = ceil_div(p.nheads, kMamba3FinishHeads);
    const int64_t slot = blockIdx.x / head_blocks, first_head = blockIdx.x % head_blocks * kMamba3FinishHeads;
    const Mamba3Chunk chunk = find_chunk(p, launch.chunks, slot);
    if (chunk.steps == 0) {
        return;
    }
    const int pitch = static_cast<int>(launch.chunks.pitch);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_step = kMamba3FinishSteps * warp;
    const int64_t head = first_head + lane, all_steps = p.batch * p.seqlen;
    if (head >= p.nheads) {
        return;
    }
    const float* const values = mamba3_values(launch.chunks, p.nheads, slot, head, kMamba3High) + first_step;
    const float* const start = mamba3_values(launch.chunks, p.nheads, slot, head, kMamba3Start);
    const bool restarts = p.seq_idx != nullptr;
    const int64_t own_step = chunk.row * p.seqlen + chunk.first + first_step;
    const int64_t tile_terms = all_steps * p.nheads;
    constexpr int kTogether = 4;  // on their way before the first is used
    float before = 0.0f;          // what the first step hands to the one before it
    for (int64_t tile = 0; tile < launch.plan.row_tiles; ++tile) {
        const float4* const terms = launch.at<const float4>(w.step_terms) + tile * tile_terms + own_step * p.nheads + head;
        before += first_step < chunk.steps && chunk.index + first_step > 0 ? (terms - p.nheads)->y : 0.0f;
    }
#pragma unroll
    for (int begin = 0; begin < kMamba3FinishSteps && first_step + begin < chunk.steps; begin += kTogether) {
        float lambda[kTogether], rest[kTogether], dt[kTogether];
        unpack<float, kTogether>(packed_load<float, kTogether>(values + kMamba3Lambda * pitch + begin), lambda);
        unpack<float, kTogether>(packed_load<float, kTogether>(values + kMamba3Rest * pitch + begin), rest);
        unpack<float, kTogether>(packed_load<float, kTogether>(values + kMamba3Dt * pitch + begin), dt);
        float4 sum[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            sum[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        for (int64_t tile = 0; tile < launch.plan.row_tiles; ++tile) {
            const float4* const terms =
                launch.at<const float4>(w.step_terms) + tile * tile_terms + (own_step + begin) * p.nheads + head;
            float4 term[kTogether];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const bool exists = first_step + begin + j < chunk.steps;
                term[j] = exists ? terms[j * p.nheads] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                sum[j] = make_float4(sum[j].x + term[j].x, sum[j].y + term[j].y, sum[j].z + term[j].z, sum[j].w + term[j].w);
            }
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int t = first_step + begin + j;
            if (t >= chunk.steps) {
                return;
            }
            const int run = restarts ? __float_as_int(start[t]) : -1;
            if (chunk.index == 0 && t == 0) {
                before = p.ssm_state != nullptr ? launch.at<const float>(w.before)[chunk.sequence * p.nheads + head] : 0.0f;
            } else if (run == t) {
                before = 0.0f;
            }
            const float own = sum[j].y + sum[j].z;
            const int64_t step = own_step + begin + j, at = step * p.nheads + head;
            float turned = 0.0f;
            for (int64_t part = 0; 32 * part < p.nangles; ++part) {
                turned += launch.at<const float>(w.turned)[part * tile_terms + at];
            }
            store_from_float(q.dadt, at, p.adt_dtype, sum[j].x);
            store_from_float(q.ddt, at, p.dt_dtype, fmaf(lambda[j], own, fmaf(rest[j], before, turned)));
            store_from_float(q.dtrap, step * q.dtrap_step_stride + head, p.trap_dtype,
                             lambda[j] * rest[j] * dt[j] * (own - before));
            before = sum[j].y;
        }
    }
}

inline cudaError_t launch_mamba3_finish(const MambaMamba3Backward& q, const Mamba3BackwardPlan& plan) {
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardLaunch launch = mamba3_backward_launch(q, plan);
    const int64_t slots = launch.chunks.slots;
    cudaError_t error = cudaSuccess;
    if (!plan.whole) {
        error = launch_mamba3(mamba3_finish_matrices_kernel, slots * p.ngroups, 2, kMamba3MatricesThreads, 0, q, launch);
    }
    if (error == cudaSuccess) {
        const int64_t heads = p.sequences * p.nheads, blocks = ceil_div(heads * p.nangles, kMamba3BackwardCarryThreads);
        error = launch_mamba3(mamba3_backward_carry_kernel, blocks + (p.ssm_state != nullptr ? heads : 0), 1,
                              kMamba3BackwardCarryThreads, 0, q, launch);
    }
    if (error == cudaSuccess && p.nangles > 0) {
        error = launch_mamba3(mamba3_finish_angles_kernel, slots, static_cast<unsigned>(ceil_div(p.nangles, 32)),
                              kMamba3AnglesThreads, 0, q, launch);
    }
    if (error == cudaSuccess) {
        const int64_t blocks = slots * ceil_div(p.nheads, kMamba3FinishHeads);
        error = launch_mamba3(mamba3_finish_steps_kernel, blocks, 1, kMamba3FinishThreads, 0, q, launch);
    }
    return error;
}

}  // namespace mamba
