// q and k of a head for the general kernels of Mamba-3's backward scan: the group's rows with the head's bias, rotated, once
// for all of these kernels.
#pragma once

#include "mamba3/cuda/backward/chunk.cuh"

namespace mamba {

// Cosine and sine of a count of turns, to float32's precision: series in the distance to the nearest quarter.
__device__ __forceinline__ float2 cos_sin_of_count(uint32_t turn) {
    const uint32_t quarter = (turn + 0x20000000u) >> 30;
    const float x = static_cast<float>(static_cast<int32_t>(turn - (quarter << 30))) * 1.46291808e-9f;  // 2 pi / 2^32
    const float z = x * x;
    float s = fmaf(2.7557319e-6f, z, -1.9841270e-4f);
    s = fmaf(s, z, 8.3333333e-3f);
    s = fmaf(s, z, -1.6666667e-1f);
    s = fmaf(x * z, s, x);
    float c = fmaf(-2.7557319e-7f, z, 2.4801587e-5f);
    c = fmaf(c, z, -1.3888889e-3f);
    c = fmaf(c, z, 4.1666667e-2f);
    c = fmaf(c, z, -0.5f);
    c = fmaf(c, z, 1.0f);
    const float cos = quarter % 2 != 0 ? s : c, sin = quarter % 2 != 0 ? c : s;
    return make_float2(quarter == 1 || quarter == 2 ? -cos : cos, quarter >= 2 ? -sin : sin);
}

// A block takes a chunk of a head, a thread two columns of the tiles, which lie at w.q, w.k as the other kernels load them. The
// cosines and sines of its steps stay for the gradients, which are rotated back.
__global__ void __launch_bounds__(MAMBA_MAX_DSTATE / 2)
    mamba3_rotate_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const Mamba3Chunks& chunks = launch.chunks;
    const int64_t heads = launch.group_heads * p.ngroups, launch_head = blockIdx.x % heads, slot = blockIdx.x / heads;
    const int64_t head = head_of_launch(p, launch, launch_head), group = launch_head / launch.group_heads;
    const Mamba3Chunk chunk = find_chunk(p, chunks, slot);
    const int rank = static_cast<int>(p.rank), dstate = static_cast<int>(p.dstate), angles = static_cast<int>(p.nangles);
    const int pair = static_cast<int>(threadIdx.x);
    if (2 * pair >= dstate) {
        return;
    }
    const bool both = 2 * pair + 1 < dstate, rotates = pair < angles;
    const int a = element_of_column(p, 2 * pair), b = both ? element_of_column(p, 2 * pair + 1) : a;
    const int64_t q_rows = chunk.row * p.q_batch_stride + chunk.first * p.q_len_stride + group * p.q_group_stride;
    const int64_t k_rows = chunk.row * p.k_batch_stride + chunk.first * p.k_len_stride + group * p.k_group_stride;
    const float* const q_bias = p.q_bias + head * rank * dstate;
    const float* const k_bias = p.k_bias + head * rank * dstate;
    const float* const dts = mamba3_values(chunks, p.nheads, slot, head, kMamba3Dt);
    const float* const starts = mamba3_values(chunks, p.nheads, slot, head, kMamba3Start);
    const Mamba3Speeds speeds = speeds_of(p, launch, chunk, head);
    const int64_t to = rotated_rows(p, launch, slot, launch_head) + 2 * pair;
    float2* const cos_sins = launch.at<float2>(w.cos_sin) + cos_sin_index(p, launch, slot, launch_head);
    uint32_t turn = rotates ? chunks.turns[mamba3_turns_index(p, slot, head) + pair] : 0;
#pragma unroll 2
    for (int t = 0; t < chunk.steps; ++t) {
        float2 cos_sin = make_float2(1.0f, 0.0f);
        if (rotates) {
            const uint32_t add = count_of_turns(turn_of_step(speeds.first[t * speeds.stride + pair], dts[t]));
            turn = __float_as_int(starts[t]) == t ? add : turn + add;
            cos_sin = cos_sin_of_count(turn);
            cos_sins[t * angles + pair] = cos_sin;
        }
#pragma unroll 1
        for (int r = 0; r < rank; ++r) {
            const int64_t q_row = q_rows + t * p.q_len_stride + r * p.q_rank_stride;
            const int64_t k_row = k_rows + t * p.k_len_stride + r * p.k_rank_stride;
            const uint32_t bits[2][2] = {{load_bits(p.q, q_row + a, p.dtype), load_bits(p.q, q_row + b, p.dtype)},
                                         {load_bits(p.k, k_row + a, p.dtype), load_bits(p.k, k_row + b, p.dtype)}};
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float* const bias = (m == 0 ? q_bias : k_bias) + r * dstate;
                void* const rows = launch.at<void>(m == 0 ? w.q : w.k);
                const float x = float_from_bits(bits[m][0], p.dtype) + bias[a];
                const float y = both ? float_from_bits(bits[m][1], p.dtype) + bias[b] : 0.0f;
                const int64_t at = to + (t * rank + r) * dstate;
                store_from_float(rows, at, p.dtype, x * cos_sin.x - y * cos_sin.y);
                if (both) {
                    store_from_float(rows, at + 1, p.dtype, x * cos_sin.y + y * cos_sin.x);
                }
            }
        }
    }
}

inline cudaError_t launch_mamba3_rotate(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch) {
    const int threads = static_cast<int>(round_up(ceil_div(q.forward.dstate, 2), 32));
    return launch_mamba3(mamba3_rotate_kernel, launch.chunks.slots * launch.group_heads * q.forward.ngroups, 1, threads, 0, q,
                         launch);
}

}  // namespace mamba
