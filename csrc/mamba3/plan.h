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
    int64_t slots;    // of chunks
    int64_t arrays;   // kMamba3ForwardArrays or kMamba3BackwardArrays
    float* values;    // (slots, H, arrays, pitch)
    float* speeds;    // (B, L, H, S), or (B, L, S) without angles_of_heads: tanh(angle) / 2, turns for each unit of dt
    uint32_t* turns;  // (slots, H, S): the turn before the chunk's first step, in units of 2^-32
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
    int64_t values, speeds, turns;

    Mamba3ChunksPlan() : chunks(), values(0), speeds(0), turns(0) {}
    Mamba3ChunksPlan(const MambaMamba3& p, int64_t steps, Mamba3StepArray arrays, int64_t& bytes) : Mamba3ChunksPlan() {
        chunks.steps = steps;
        chunks.pitch = round_up(steps, 4);
        chunks.slots = p.cu_seqlens == nullptr ? p.batch * ceil_div(p.seqlen, steps) : p.seqlen / steps + p.sequences;
        chunks.arrays = arrays;
        values = mamba3_reserve(bytes, chunks.slots * p.nheads * arrays * chunks.pitch * 4);
        speeds = mamba3_reserve(bytes, p.batch * p.seqlen * (p.angles_of_heads != 0 ? p.nheads : 1) * p.nangles * 4);
        turns = mamba3_reserve(bytes, chunks.slots * p.nheads * p.nangles * 4);
    }

    Mamba3Chunks place(void* workspace) const {
        Mamba3Chunks placed = chunks;
        char* const memory = static_cast<char*>(workspace);
        placed.values = reinterpret_cast<float*>(memory + values);
        placed.speeds = reinterpret_cast<float*>(memory + speeds);
        placed.turns = reinterpret_cast<uint32_t*>(memory + turns);
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

// With that much a multiprocessor holds four forward blocks of up to 128 states.
constexpr int kMamba3RoomyShared = 200 * 1024;

// What a forward call needs besides its tensors.
struct Mamba3Forward {
    Mamba3LayoutIndex layout;
    int64_t ranks;    // rows of a step in a tile: a power of two that divides a tile of 16, or one launch does not take all
    int64_t passes;   // parts of the rank that a launch takes, of q and of k: passes^2 launches
    bool rows_apart;  // the scan leaves its rows in the workspace as float32, another kernel makes the output of them
    int64_t segments, chunks_a_segment;  // parts that the walk along the length is split into
    Mamba3ChunksPlan chunks;
    int64_t ends, decays, rows;  // offsets; see forward.cuh
    int64_t bytes;
    cudaError_t error;

    explicit Mamba3Forward(const MambaMamba3& p)
        : layout(mamba3_layout_index(p)), segments(1), ends(0), decays(0), rows(0), bytes(0), error(cudaSuccess) {
        const DeviceLimits device(p.run.device);
        error = device.error;
        const int64_t most = p.dtype == MAMBA_FLOAT32 ? mamba3_rows<float>(layout) : mamba3_rows<__half>(layout);
        passes = ceil_div(p.rank, kMamba3MostRanks);
        ranks = int64_t{1} << ceil_log2(ceil_div(p.rank, passes), 0, 4);
        chunks = Mamba3ChunksPlan(p, most / ranks, kMamba3ForwardArrays, bytes);
        rows_apart = passes > 1 || (p.norm_weight != nullptr && p.headdim > kMamba3StateRows);
        const int64_t steps = p.batch * p.seqlen;
        rows = mamba3_reserve(bytes, rows_apart ? steps * p.rank * p.nheads * p.headdim * 4 : 0);
        plan_segments(p, device);
    }

 private:
    // Splits the length where there are less than half of the blocks that the GPU has room for.
    void plan_segments(const MambaMamba3& p, const DeviceLimits& device) {
        const int64_t all = ceil_div(p.seqlen, chunks.chunks.steps);
        const int64_t blocks = p.batch * p.nheads * ceil_div(p.headdim, kMamba3StateRows);
        const int64_t wanted = (layout != kMamba3Large && device.shared >= kMamba3RoomyShared ? 4 : 2) * device.processors;
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
