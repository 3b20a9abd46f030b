// How Mamba-3's scan runs on CUDA: chunks, segments of the length, workspace.
#pragma once

#include "common/alignment.h"
#include "common/cuda_device.h"
#include "common/integers.h"

namespace mamba {

// The state's rows (headdim) that a forward block takes, 16 a warp.
constexpr int kMamba3StateRows = 64;

// Arrays of a chunk's steps of one head, each of Mamba3Chunks::pitch floats, one behind the other. Where a step does not exist,
// high, low and entering are the last one's, all others 0.
enum Mamba3StepArray {
    kMamba3High,  // adt log2(e), summed up from the chunk's first step on, as a float
    kMamba3Low,   // and what it lacks: between near steps the sums differ by little, however large they have grown
    kMamba3Gamma,
    kMamba3Scale,
    kMamba3Entering,  // decay of the state before the chunk, up to and with the step; 0 after a restart
    kMamba3Leaving,   // decay from the step to the chunk's last one; 0 before a restart
    kMamba3Start,     // int32_t: the first step of the step's run, -1 for a run that began before the chunk
    kMamba3Dt,
    kMamba3ForwardArrays,
    kMamba3Lambda = kMamba3ForwardArrays,  // for backward: sigmoid(trap)
    kMamba3Rest,                           // and 1 - sigmoid(trap)
    kMamba3BackwardArrays
};

// What prepare.cuh leaves in the workspace.
struct Mamba3Chunks {
    int64_t steps;  // of a chunk, 64 at most
    int64_t pitch;
    int64_t slots;         // of chunks
    int64_t arrays;        // kMamba3ForwardArrays or kMamba3BackwardArrays
    float* values;         // (slots, H, arrays, pitch)
    int64_t part, parts;   // steps of a part of a chunk, and how many a chunk has
    float* speeds;         // (B, L, H, S), or (B, L, S) without angles_of_heads: tanh(angle) / 2, turns for each unit of dt
    uint32_t* turns;       // (slots, H, S): the turn before the chunk's first step, in units of 2^-32
    uint32_t* part_turns;  // (slots, parts, H, S), if there is more than one: what the chunk turns before the part
};

// Room for `bytes` more, at a multiple of 256.
inline int64_t mamba3_reserve(int64_t& total, int64_t bytes) {
    const int64_t at = total;
    total += round_up(bytes, 256);
    return at;
}

constexpr int kMamba3MostSteps = 64;
// Of a launch: a step's rows of q and k then lie in one 16 x 16 tile on the diagonal.
constexpr int kMamba3MostRanks = 16;

// Chunks of so many steps. Pointers are offsets from the workspace's start, see place().
struct Mamba3ChunksPlan {
    Mamba3Chunks chunks;
    int64_t values, speeds, turns, part_turns;

    Mamba3ChunksPlan() : chunks(), values(0), speeds(0), turns(0), part_turns(0) {}
    // part: 0, or a power of two that steps are a multiple of.
    Mamba3ChunksPlan(const MambaMamba3& p, int64_t steps, Mamba3StepArray arrays, int64_t& bytes, int64_t part = 0)
        : Mamba3ChunksPlan() {
        chunks.steps = steps;
        chunks.part = part == 0 ? steps : part;
        chunks.parts = steps / chunks.part;
        chunks.pitch = round_up(steps, 4);
        chunks.slots = p.cu_seqlens == nullptr ? p.batch * ceil_div(p.seqlen, steps) : p.seqlen / steps + p.sequences;
        chunks.arrays = arrays;
        values = mamba3_reserve(bytes, chunks.slots * p.nheads * arrays * chunks.pitch * 4);
        speeds = mamba3_reserve(bytes, p.batch * p.seqlen * (p.angles_of_heads != 0 ? p.nheads : 1) * p.nangles * 4);
        const int64_t all_turns = chunks.slots * p.nheads * p.nangles * 4;
        turns = mamba3_reserve(bytes, all_turns);
        part_turns = mamba3_reserve(bytes, chunks.parts > 1 ? chunks.parts * all_turns : 0);
    }

    Mamba3Chunks place(void* workspace) const {
        Mamba3Chunks placed = chunks;
        char* const memory = static_cast<char*>(workspace);
        placed.values = reinterpret_cast<float*>(memory + values);
        placed.speeds = reinterpret_cast<float*>(memory + speeds);
        placed.turns = reinterpret_cast<uint32_t*>(memory + turns);
        placed.part_turns = reinterpret_cast<uint32_t*>(memory + part_turns);
        return placed;
    }
};

// Whether a stride times the steps of a chunk is an int, in bytes too.
inline bool mamba3_stride_fits(int64_t stride) {
    const int64_t most = INT32_MAX / kMamba3MostSteps;
    return -most <= stride && stride <= most;
}

// What both kinds of walks on warpgroups ask of a call: 16-bit dtypes, up to 128 states, no seq_idx. word: bytes of q and k
// that a lane reads together.
inline bool mamba3_walk_fits(const MambaMamba3& p, int64_t word) {
    const int64_t size = dtype_size(p.dtype), rank = p.rank, most = INT32_MAX / kMamba3MostSteps;
    return p.dtype != MAMBA_FLOAT32 && p.dstate <= 128 && p.dstate % 4 == 0 && p.seq_idx == nullptr && p.seqlen <= INT32_MAX &&
           rows_aligned(p.q_bias, 4, 16, p.dstate) && rows_aligned(p.k_bias, 4, 16, p.dstate) &&
           rows_aligned(p.q, size, word, p.q_batch_stride, p.q_len_stride, p.q_group_stride,
                        used_stride(rank, p.q_rank_stride)) &&
           rows_aligned(p.k, size, word, p.k_batch_stride, p.k_len_stride, p.k_group_stride,
                        used_stride(rank, p.k_rank_stride)) &&
           rows_aligned(p.v, size, 16, p.headdim, p.v_batch_stride, p.v_len_stride, p.v_head_stride) &&
           rows_aligned(p.mimo_v, 4, 16) && p.nheads * p.nangles <= most && p.nheads * kMamba3BackwardArrays <= most / 4 &&
           mamba3_stride_fits(p.v_len_stride) && mamba3_stride_fits(p.q_len_stride) && mamba3_stride_fits(p.k_len_stride) &&
           mamba3_stride_fits(used_stride(rank, p.q_rank_stride)) && mamba3_stride_fits(used_stride(rank, p.k_rank_stride));
}
// SISO: one rank of neighbouring pairs, without projections (forward/rotate_pairs.cuh).
inline bool mamba3_siso_fits(const MambaMamba3& p) {
    return p.pairwise != 0 && p.rank == 1 && p.nangles % 2 == 0 && p.mimo_v == nullptr && p.mimo_z == nullptr &&
           p.mimo_out == nullptr && mamba3_walk_fits(p, 8);
}
// MIMO: four ranks of 128 states, of whose pairs, half of dstate apart, angles turn 32 at most (forward/rotate_steps.cuh).
inline bool mamba3_mimo_fits(const MambaMamba3& p) {
    return p.pairwise == 0 && p.rank == 4 && p.dstate == 128 && p.nangles <= 32 && mamba3_walk_fits(p, 16);
}

// Steps of a part of a chunk, if the chunk has more: half a warp, or a warp, rotates the rows of one.
inline int64_t mamba3_part_steps(const MambaMamba3& p) {
    return p.rank == 1 ? 8 : 4;
}

}  // namespace mamba
