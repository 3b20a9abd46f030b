// How Mamba-3's scan runs on CUDA: chunks, segments of the length, workspace.
#pragma once

#include "common/alignment.h"
#include "common/cuda_device.h"
#include "common/integers.h"
#include "mamba3/layouts.h"

namespace mamba {

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

// Chunks of so many steps. Pointers are offsets from the workspace's start, see mamba3_place.
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

enum Mamba3LayoutIndex { kMamba3Small, kMamba3Middle, kMamba3Large };

inline Mamba3LayoutIndex mamba3_layout_index(const MambaMamba3& p) {
    return p.dstate <= 64 ? kMamba3Small : p.dstate <= 128 ? kMamba3Middle : kMamba3Large;
}

template <typename T>
int64_t mamba3_rows(Mamba3LayoutIndex layout) {
    using Layouts = Mamba3Layouts<T>;
    return layout == kMamba3Small    ? Layouts::Small::kRows
           : layout == kMamba3Middle ? Layouts::Middle::kRows
                                     : Layouts::Large::kRows;
}

// Whether a stride times the steps of a chunk is an int, in bytes too.
inline bool mamba3_stride_fits(int64_t stride) {
    const int64_t most = INT32_MAX / kMamba3MostSteps;
    return -most <= stride && stride <= most;
}

// What both kinds of walks on warpgroups ask of a call: 16-bit dtypes, up to 128 states, no seq_idx. word: bytes of q and k that
// a lane reads together.
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
// SISO: one rank of neighbouring pairs, without projections (turn_pairs_warpgroup.cuh).
inline bool mamba3_siso_fits(const MambaMamba3& p) {
    return p.pairwise != 0 && p.rank == 1 && p.nangles % 2 == 0 && p.mimo_v == nullptr && p.mimo_z == nullptr &&
           p.mimo_out == nullptr && mamba3_walk_fits(p, 8);
}
// MIMO: four ranks of 128 states, of whose pairs, half of dstate apart, angles turn 32 at most (turn_steps_warpgroup.cuh).
inline bool mamba3_mimo_fits(const MambaMamba3& p) {
    return p.pairwise == 0 && p.rank == 4 && p.dstate == 128 && p.nangles <= 32 && mamba3_walk_fits(p, 16);
}
// Steps of a part of a chunk, if the chunk has more: half a warp, or a warp, rotates the rows of one.
inline int64_t mamba3_part_steps(const MambaMamba3& p) {
    return p.rank == 1 ? 8 : 4;
}

// Whether the device has what the kernels on warpgroups need: 9.0 is the only one.
inline cudaError_t mamba3_has_warpgroups(const MambaMamba3& p, bool* has) {
    *has = false;
#ifdef MAMBA_WARPGROUPS
    int major = 0;
    const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, p.run.device);
    *has = error == cudaSuccess && major == 9;
    return error;
#else
    static_cast<void>(p);
    return cudaSuccess;
#endif
}

// Whether a forward call runs on warpgroups: SISO, whose norm is over one block's columns, or MIMO with gate and output projection
// and without norm.
inline cudaError_t choose_mamba3_warpgroups(const MambaMamba3& p, bool* warpgroups) {
    const int64_t size = dtype_size(p.dtype);
    const cudaError_t error = mamba3_has_warpgroups(p, warpgroups);
    const bool siso = mamba3_siso_fits(p) && (p.norm_weight == nullptr || p.headdim <= kMamba3StateRows);
    const bool mimo = mamba3_mimo_fits(p) && p.z != nullptr && p.mimo_out != nullptr && p.norm_weight == nullptr &&
                      mamba3_stride_fits(p.z_len_stride) && mamba3_stride_fits(p.out_len_stride);
    *warpgroups = *warpgroups && (siso || mimo) && rows_aligned(p.z, size, 16, p.z_batch_stride, p.z_len_stride, p.z_head_stride) &&
                  rows_aligned(p.out, size, 16, p.out_batch_stride, p.out_len_stride, p.out_head_stride);
    return error;
}

// With that much a multiprocessor holds four forward blocks of up to 128 states.
constexpr int kMamba3RoomyShared = 200 * 1024;

// What a forward call needs besides its tensors.
struct Mamba3Forward {
    Mamba3LayoutIndex layout;
    int64_t ranks;    // rows of a step in a tile: a power of two that divides a tile of 16, or one launch does not take all
    bool warpgroups;  // runs forward_warpgroup.cuh
    int64_t passes;   // parts of the rank that a launch takes, of q and of k: passes^2 launches
    bool rows_apart;  // the scan leaves its rows in the workspace as float32, another kernel makes the output of them
    int64_t segments, chunks_a_segment;  // parts that the walk along the length is split into
    Mamba3ChunksPlan chunks;
    int64_t ends, decays, rows;  // offsets; see forward.cuh
    int64_t bytes;
    cudaError_t error;

    explicit Mamba3Forward(const MambaMamba3& p)
        : layout(mamba3_layout_index(p)),
          warpgroups(false),
          segments(1),
          ends(0),
          decays(0),
          rows(0),
          bytes(0),
          error(cudaSuccess) {
        const DeviceLimits device(p.run.device);
        error = device.error;
        if (error == cudaSuccess) {
            error = choose_mamba3_warpgroups(p, &warpgroups);
        }
        const int64_t most = p.dtype == MAMBA_FLOAT32 ? mamba3_rows<float>(layout) : mamba3_rows<__half>(layout);
        passes = ceil_div(p.rank, kMamba3MostRanks);
        ranks = int64_t{1} << ceil_log2(ceil_div(p.rank, passes), 0, 4);
        const int64_t steps = most / ranks;
        const int64_t part = warpgroups && steps > mamba3_part_steps(p) ? mamba3_part_steps(p) : 0;
        chunks = Mamba3ChunksPlan(p, steps, kMamba3ForwardArrays, bytes, part);
        rows_apart = passes > 1 || (p.norm_weight != nullptr && p.headdim > kMamba3StateRows);
        const int64_t all_rows = p.batch * p.seqlen * p.rank;
        rows = mamba3_reserve(bytes, rows_apart ? all_rows * p.nheads * p.headdim * 4 : 0);
        plan_segments(p, device);
    }

 private:
    // Splits the length where there are less than half of the blocks that the GPU has room for.
    void plan_segments(const MambaMamba3& p, const DeviceLimits& device) {
        const int64_t all = ceil_div(p.seqlen, chunks.chunks.steps);
        const int64_t blocks = p.batch * p.nheads * ceil_div(p.headdim, kMamba3StateRows);
        const int64_t wanted =
            (layout != kMamba3Large && device.shared >= kMamba3RoomyShared && !warpgroups ? 4 : 2) * device.processors;
        if (p.cu_seqlens == nullptr && passes == 1 && blocks > 0 && 2 * blocks <= wanted) {
            const int64_t most = all / 8;
            const int64_t fit = wanted / blocks < most ? wanted / blocks : most;
            segments = fit > 1 ? fit : 1;
        }
        chunks_a_segment = ceil_div(all, segments);
        if (chunks_a_segment > 0) {
            segments = ceil_div(all, chunks_a_segment);  // none is empty
        }
        ends = mamba3_reserve(bytes, (segments - 1) * p.batch * p.nheads * p.headdim * p.dstate * 4);
        decays = mamba3_reserve(bytes, (segments - 1) * p.batch * p.nheads * 4);
    }
};

}  // namespace mamba
