// The turns before each chunk, from what prepare.cuh has left of each; and the final states but h.
#pragma once

#include "mamba3/cuda/chunks.cuh"

namespace mamba {

constexpr int kMamba3CarryThreads = 128;

// A block for each sequence and head: the turns before each chunk, from what each turns. With final states also those of the
// angles, of k and of v.
__global__ void __launch_bounds__(kMamba3CarryThreads)
    mamba3_carry_angles_before_kernel(const MambaMamba3 p, const Mamba3Chunks chunks) {
    __shared__ uint32_t last_turns[MAMBA_MAX_DSTATE / 2];
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int64_t index = blockIdx.x;  // of the sequence and head
    const int64_t head = index % p.nheads;
    const int64_t sequence_index = index / p.nheads;
    const int angles = static_cast<int>(p.nangles);
    const SequenceRange sequence = sequence_range(p, sequence_index);
    const int64_t count = ceil_div(sequence.seqlen, chunks.steps);
    const int64_t slot = slot_of_sequence(p, chunks.steps, sequence_index, sequence.begin);
    // A warp takes the next few chunks, a lane an angle of them: warps exchange what these turn.
    constexpr int kOwn = 8, kWarps = kMamba3CarryThreads / 32;
    __shared__ uint32_t turned_by[kWarps][32];
    __shared__ bool restarted[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = lane; i - lane < angles; i += 32) {
        const bool exists = i < angles;
        uint32_t turn = exists && p.angle_state != nullptr ? count_of_radians(p.angle_state[index * angles + i]) : 0u;
        uint32_t* const turns = chunks.turns + mamba3_turns_index(p, slot, head) + i;
        const int64_t pitch = p.nheads * angles;
        for (int64_t first = 0; first < count; first += kOwn * kWarps) {
            const int64_t own = first + kOwn * warp;
            uint32_t turned[kOwn];
            bool restarts[kOwn];
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                turned[j] = exists && own + j < count ? turns[(own + j) * pitch] : 0u;
                restarts[j] = false;
            }
            uint32_t sum = 0;
            bool any = false;
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                if (p.seq_idx != nullptr && own + j < count) {
                    const float* const start = mamba3_values(chunks, p.nheads, slot + own + j, head, kMamba3Start);
                    restarts[j] = __float_as_int(start[chunks.steps - 1]) >= 0;
                }
                sum = restarts[j] ? turned[j] : sum + turned[j];
                any = any || restarts[j];
            }
            turned_by[warp][lane] = sum;
            if (lane == 0) {
                restarted[warp] = any;
            }
            __syncthreads();
            uint32_t before = turn;
#pragma unroll
            for (int j = 0; j < kWarps; ++j) {
                before = j == warp ? turn : before;
                turn = restarted[j] ? turned_by[j][lane] : turn + turned_by[j][lane];
            }
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                if (exists && own + j < count) {
                    turns[(own + j) * pitch] = before;
                }
                before = restarts[j] ? turned[j] : before + turned[j];
            }
            __syncthreads();
        }
        if (exists && warp == 0) {
            last_turns[i] = turn;
            if (p.final_angle != nullptr) {
                const bool kept = count == 0 && p.angle_state != nullptr;
                p.final_angle[index * angles + i] = kept ? p.angle_state[index * angles + i] : radians_of_count(turn);
            }
        }
    }
    if (p.final_ssm == nullptr) {
        return;
    }
    __syncthreads();
    const int64_t last = sequence.begin + sequence.seqlen - 1;
    const int64_t group = head / (p.nheads / p.ngroups);
    for (int64_t i = threadIdx.x; i < p.rank * p.dstate; i += kMamba3CarryThreads) {
        const int64_t r = i / p.dstate;
        const int64_t to = ((sequence_index * p.rank + r) * p.nheads + head) * p.dstate;
        const int n = static_cast<int>(i % p.dstate);
        if (count == 0) {
            p.final_k[to + n] = p.k_state != nullptr ? p.k_state[to + n] : 0.0f;
            continue;
        }
        // n is the first or second of what angle `angle` turns.
        const int half = static_cast<int>(p.dstate / 2);
        const int angle = p.pairwise != 0 ? n / 2 : n < half ? n : n - half;
        const bool second = p.pairwise != 0 ? n % 2 != 0 : n >= half;
        const int64_t from =
            sequence.row * p.k_batch_stride + last * p.k_len_stride + r * p.k_rank_stride + group * p.k_group_stride;
        const float* const bias = p.k_bias + (head * p.rank + r) * p.dstate;
        const float own = load_as_float(p.k, from + n, p.dtype) + bias[n];
        if (angle >= angles) {
            p.final_k[to + n] = own;
            continue;
        }
        const int partner = p.pairwise != 0 ? n ^ 1 : second ? n - half : n + half;
        const float other = load_as_float(p.k, from + partner, p.dtype) + bias[partner];
        const float2 turn = cos_sin_of_turns(turns_of_count(last_turns[angle]));
        p.final_k[to + n] =
            second ? rotate_pair(make_float2(other, own), turn).y : rotate_pair(make_float2(own, other), turn).x;
    }
    for (int64_t i = threadIdx.x; i < p.headdim; i += kMamba3CarryThreads) {
        const int64_t at = sequence.row * p.v_batch_stride + last * p.v_len_stride + head * p.v_head_stride + i;
        const float kept = p.v_state != nullptr ? p.v_state[index * p.headdim + i] : 0.0f;
        p.final_v[index * p.headdim + i] = count == 0 ? kept : load_as_float(p.v, at, p.dtype);
    }
}

}  // namespace mamba
