// Where the steps of Mamba-3's scan lie, and what prepare.cuh leaves of them for the kernels.
//
// Time goes in chunks of one sequence. Within one, with cs the sum of adt from its first step on, gamma = lambda dt, scale =
// gamma + (1 - lambda) dt of the next step, and R rows of q, k and x a step,
//     y_t = exp(cs_t) H q_t + sum_{s < t} exp(cs_t - cs_s) scale_s (q_t . k_s) x_s + gamma_t (q_t . k_t) x_t
//     H' = exp(cs_last) H + sum_s exp(cs_last - cs_s) scale_s x_s k_s^T
// where H is the state before the chunk, which has the chunk's first (1 - lambda) dt in it already. Where seq_idx changes, the
// states restart: a run of steps sees itself only.
#pragma once

#include "common/cuda_vector.cuh"
#include "common/sequences.cuh"
#include "mamba3/plan.h"

namespace mamba {

// ---- sequences and chunks --------------------------------------------------------------------------------------------

// Which chunk a slot holds, if any.
struct Mamba3SlotChunk {
    SequenceRange sequence;
    int64_t sequence_index;
    int64_t first;  // step of the sequence
    int steps;      // 0: the slot is empty
};
__device__ __forceinline__ Mamba3SlotChunk mamba3_chunk_of_slot(const MambaMamba3& p, const Mamba3Chunks& chunks,
                                                                int64_t slot) {
    const int64_t sequence = sequence_of_slot(p, chunks.steps, p.sequences, slot);
    Mamba3SlotChunk found;
    found.sequence = sequence_range(p, sequence);
    found.sequence_index = sequence;
    found.first = (slot - slot_of_sequence(p, chunks.steps, sequence, found.sequence.begin)) * chunks.steps;
    const int64_t left = found.sequence.seqlen - found.first;
    found.steps = static_cast<int>(found.first < 0 || left < 0 ? 0 : left < chunks.steps ? left : chunks.steps);
    return found;
}

// The array of a chunk's steps of one head.
__device__ __forceinline__ float* mamba3_values(const Mamba3Chunks& chunks, int64_t nheads, int64_t slot, int64_t head,
                                                Mamba3StepArray array) {
    return chunks.values + ((slot * nheads + head) * chunks.arrays + array) * chunks.pitch;
}
// The speeds of a step, entry i for angle i.
__device__ __forceinline__ int64_t mamba3_speeds_index(const MambaMamba3& p, int64_t row, int64_t step, int64_t head) {
    const int64_t index = row * p.seqlen + step;
    return (p.angles_of_heads != 0 ? index * p.nheads + head : index) * p.nangles;
}

// The turns before a chunk, and what it turns before one of its parts, entry i for angle i.
__device__ __forceinline__ int64_t mamba3_turns_index(const MambaMamba3& p, int64_t slot, int64_t head) {
    return (slot * p.nheads + head) * p.nangles;
}
__device__ __forceinline__ int64_t mamba3_part_turns_index(const MambaMamba3& p, const Mamba3Chunks& chunks, int64_t slot,
                                                           int64_t part, int64_t head) {
    return mamba3_turns_index(p, slot * chunks.parts + part, head);
}

// ---- turns -----------------------------------------------------------------------------------------------------------

// What a step turns, less whole turns. NaN where nothing finite comes out.
__device__ __forceinline__ float turn_of_step(float speed, float dt) {
    const float turns = speed * dt;
    return (turns - rintf(turns)) + fmaf(speed, dt, -turns);
}

// A number of turns in [-1/2, 1/2] in units of 2^-32: sums of these lose nothing, in any order. 0 for NaN.
__device__ __forceinline__ uint32_t count_of_turns(float turns) {
    return static_cast<uint32_t>(__float2int_rn(turns * 4294967296.0f));
}
__device__ __forceinline__ uint32_t count_of_radians(float radians) {
    const double turns = static_cast<double>(radians) * 0.15915494309189535;
    return count_of_turns(static_cast<float>(turns - rint(turns)));
}
// In [0, 2 pi).
__device__ __forceinline__ float radians_of_count(uint32_t count) {
    const float radians = static_cast<float>(static_cast<double>(count) * 1.4629180792671596e-9);
    return radians < 6.28318530f ? radians : 0.0f;
}
// In [-1/2, 1/2].
__device__ __forceinline__ float turns_of_count(uint32_t count) {
    return static_cast<float>(static_cast<int32_t>(count)) * 2.3283064365386963e-10f;
}

// Cosine and sine of a number of turns.
__device__ __forceinline__ float2 cos_sin_of_turns(float turns) {
    float sin, cos;
    sincospif(2.0f * turns, &sin, &cos);
    return make_float2(cos, sin);
}
// A sum of turns, one step on, and its cosine and sine by the special functions: for 16-bit factors.
__device__ __forceinline__ float2 cos_sin_after_step(float& turns, float speed, float dt) {
    const float sum = fmaf(speed, dt, turns);
    turns = sum - rintf(sum);
    return make_float2(cos_fast(turns * 6.2831853f), sin_fast(turns * 6.2831853f));
}

// The rotator of q and k: a pair of entries by an angle; with the head's bias.
__device__ __forceinline__ float2 rotate_pair(float2 pair, float2 cos_sin) {
    return make_float2(fmaf(pair.x, cos_sin.x, -(pair.y * cos_sin.y)), fmaf(pair.x, cos_sin.y, pair.y * cos_sin.x));
}
__device__ __forceinline__ float2 rotate_pair(float2 pair, float2 bias, float2 cos_sin) {
    return rotate_pair(make_float2(pair.x + bias.x, pair.y + bias.y), cos_sin);
}

}  // namespace mamba
