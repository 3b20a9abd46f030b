// What the two warpgroups of forward_warpgroup.cuh share: what a launch is told, where a block is, its shared memory.
#pragma once

#include "common/ptx_rows.cuh"
#include "mamba3/cuda/chunks.cuh"
#include "mamba3/cuda/turn_rows.cuh"
#include "ssd/cuda/warpgroup.cuh"

namespace mamba {

// What a walk along the chunks is for.
enum Mamba3Pass {
    kMamba3Ends,      // a segment's state at its end from zero, and its decay
    kMamba3Output,    // out and the final state
    kMamba3Before,    // backward: the state before each chunk
    kMamba3GateBack,  // the same, and from the gradient of out that of the scan's rows, of z, D and projections: of
                      // neighbouring pairs rank 1 without projections, of halves rank 4 with all of them
    kMamba3After,     // from the end: the gradient of the state behind each chunk, with q for k and dy for x
};
MAMBA_HOST_DEVICE constexpr bool mamba3_finds_rows(Mamba3Pass pass) {
    return pass == kMamba3Output || pass == kMamba3GateBack;
}
MAMBA_HOST_DEVICE constexpr bool mamba3_keeps_states(Mamba3Pass pass) {
    return pass == kMamba3Before || pass == kMamba3GateBack || pass == kMamba3After;
}

// For the passes of backward. Elements of T, but for the final states and the sums.
struct Mamba3WarpgroupBackward {
    void* states;      // (slots, heads of the launch, row tiles), each a tile of 64 x kStates as the tensor cores read it
    void* dy;          // (B, L, R, heads of the launch, P)
    const void* dout;  // of kMamba3GateBack
    void* dz;          // (B, L, H, P)
    float* dD;         // (sequences, row tiles, H)
    float *dmimo_z, *dmimo_out;  // (sequences, H, R, P)
    const float* dfinal;         // of kMamba3After: (U, H, P, N), or NULL
    float* dinitial;
    int64_t dout_batch_stride, dout_len_stride, dout_head_stride;
    int64_t dy_stride;  // to the next row
    int64_t dz_step_stride;
};

struct Mamba3WarpgroupLaunch {
    Mamba3Chunks chunks;
    int64_t segments, chunks_a_segment;
    int64_t first_head, group_heads;  // of each group, that the launch takes
    float* ends;                      // as in Mamba3ForwardLaunch
    float* decays;
    Mamba3WarpgroupBackward backward;
    int32_t ranks_log2, steps_log2;       // rows of a step in a tile, steps of a chunk
    int32_t part_log2;                    // steps of a part of a chunk
    int32_t ranks;                        // that exist
    int32_t vectors;                      // whether rows of q and k are 128 columns in vectors of 16 bytes
    int32_t q_step, k_step, speeds_step;  // bytes to the next step
    int32_t q_rank, k_rank;               // to the next rank
    int32_t turns_part;                   // bytes to the next part of a chunk
    int32_t steps_at;                     // of kMamba3After: what Mamba3StepsTurner needs, in shared memory; 0 without it
    int64_t values_step, turns_step;      // elements to the next chunk
    int64_t part_turns_step;
};

// Of a walk over all heads and whole sequences; size: of an element. ranks: rows of a step in a tile.
inline Mamba3WarpgroupLaunch mamba3_warpgroup_launch(const MambaMamba3& p, const Mamba3Chunks& chunks, int64_t ranks,
                                                     int64_t size) {
    const auto bytes = [](int64_t elements, int64_t each) { return static_cast<int32_t>(elements * each); };
    Mamba3WarpgroupLaunch launch = {};
    launch.chunks = chunks;
    launch.segments = 1;
    launch.chunks_a_segment = ceil_div(p.seqlen, chunks.steps);
    launch.group_heads = p.nheads / p.ngroups;
    launch.ranks_log2 = ceil_log2(ranks, 0, 4);
    launch.steps_log2 = 6 - launch.ranks_log2;
    launch.part_log2 = ceil_log2(chunks.part, 0, 6);
    launch.ranks = static_cast<int32_t>(p.rank);
    launch.vectors = p.dstate == 128 && rows_aligned(p.q, size, 16, p.q_batch_stride, p.q_len_stride, p.q_group_stride) &&
                     rows_aligned(p.k, size, 16, p.k_batch_stride, p.k_len_stride, p.k_group_stride);
    launch.q_step = bytes(p.q_len_stride, size);
    launch.k_step = bytes(p.k_len_stride, size);
    launch.q_rank = bytes(used_stride(p.rank, p.q_rank_stride), size);
    launch.k_rank = bytes(used_stride(p.rank, p.k_rank_stride), size);
    launch.speeds_step = bytes((p.angles_of_heads != 0 ? p.nheads : 1) * p.nangles, 4);
    launch.turns_part = bytes(p.nheads * p.nangles, 4);
    launch.values_step = p.nheads * chunks.arrays * chunks.pitch;
    launch.turns_step = p.nheads * p.nangles;
    launch.part_turns_step = chunks.parts * launch.turns_step;
    return launch;
}

// Rows of a chunk, columns of headdim, of a block; and what M and the products need of each row.
constexpr int kMamba3ChunkRows = 64;
using Mamba3XTile = SwizzledTile<kMamba3ChunkRows>;
constexpr int kMamba3XTile = kMamba3ChunkRows * kMamba3StateRows;

// The first arrays of Mamba3StepArray, of rows instead of steps.
constexpr int kMamba3RowValues = kMamba3Leaving + 1;
constexpr int kMamba3Adding = kMamba3Leaving;  // what x k^T counts in the state behind the chunk, where leaving was
struct alignas(16) Mamba3ChunkValues {
    float of[kMamba3RowValues][kMamba3ChunkRows];
};

// Weights of 64 columns in shared memory. A rank's eight lanes find theirs in other banks than those of the next rank.
constexpr int kMamba3WeightPitch = kMamba3StateRows + 8;
constexpr int kMamba3RanksInShared = 4;  // of mimo_v
// There threads read eight columns each, four at a time: neighbours' lie beside each other.
MAMBA_HOST_DEVICE constexpr int place_of_mimo_v(int column) {
    return column % 8 / 4 * (kMamba3StateRows / 2) + column / 8 * 4 + column % 4;
}

// Shared memory of a block. Tiles are elements: q and k of two chunks, x of two chunks, the state before a chunk, and z, whose
// place the results take. q first; without rows there is none, nor z.
template <int kStates, Mamba3Pass kPass>
struct Mamba3WarpgroupTiles {
    static constexpr bool kRows = mamba3_finds_rows(kPass);
    static constexpr int kMatrix = kMamba3ChunkRows * kStates;
    static constexpr int kQ = kRows ? kMatrix : 0;
    static constexpr int kQK = kQ + kMatrix;
    static constexpr int kState = kPass != kMamba3Ends ? kMamba3StateRows * kStates : 0;
    static constexpr int kZ = kRows ? kMamba3XTile : 0;
    static constexpr int kXAt = 2 * kQK;
    static constexpr int kStateAt = kXAt + 2 * kMamba3XTile;
    static constexpr int kZAt = kStateAt + kState;
    static constexpr int kElements = kZAt + kZ;
    static constexpr int kValuesAt = kElements * 2;                                                // bytes
    static constexpr int kBiasesAt = kValuesAt + 2 * static_cast<int>(sizeof(Mamba3ChunkValues));  // q's and k's, of pairs
    static constexpr int kWeightsAt = kBiasesAt + 2 * kStates * 4;
    // There: with rows the norm's weight, mimo_z and mimo_out of each rank. Behind them of four ranks mimo_v; of one rank with
    // rows, for each row of two chunks, what it counts in the last row of its 16 (Mamba3PairCounts).
    static MAMBA_HOST_DEVICE constexpr int weight_rows(int ranks) { return kRows ? 1 + 2 * ranks : 0; }
    static int64_t bytes(int ranks) {
        const int rows = weight_rows(ranks) + (ranks == kMamba3RanksInShared ? ranks : 0);
        return kWeightsAt + (rows * kMamba3WeightPitch + (kRows && ranks == 1 ? 2 * kMamba3ChunkRows : 0)) * 4;
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where a block is: a head's rows of the state from row0 on, some chunks of a sequence, from the last one on if kFromEnd.
template <bool kFromEnd>
struct Mamba3Block {
    static constexpr int kDirection = kFromEnd ? -1 : 1;
    Mamba3Sequence range;
    int64_t head, group, segment, sequence;
    int64_t first_chunk, slot;  // slot: of the first chunk
    int64_t tile, tiles;        // of the states that are kept, and how many a slot has
    int64_t launch_head;        // of those that the launch takes
    int row_tile, row_tiles;
    int row0, columns;  // of headdim; may be more than 64
    int chunks;

    __device__ __forceinline__ Mamba3Block(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch) {
        const uint32_t heads = static_cast<uint32_t>(launch.group_heads * p.ngroups);
        row_tiles = static_cast<int>(ceil_div(p.headdim, kMamba3StateRows));
        uint32_t index = blockIdx.x;
        tiles = static_cast<int64_t>(heads) * row_tiles;
        tile = index % static_cast<uint32_t>(tiles);
        row_tile = static_cast<int>(index % static_cast<uint32_t>(row_tiles));
        row0 = row_tile * kMamba3StateRows;
        columns = static_cast<int>(p.headdim) - row0;
        index /= static_cast<uint32_t>(row_tiles);
        launch_head = index % heads;
        group = launch_head / launch.group_heads;
        head = group * (p.nheads / p.ngroups) + launch.first_head + launch_head % launch.group_heads;
        index /= heads;
        segment = index % static_cast<uint32_t>(launch.segments);
        sequence = index / static_cast<uint32_t>(launch.segments);
        range = mamba3_sequence(p, sequence);
        const int64_t all = ceil_div(range.seqlen, launch.chunks.steps);
        first_chunk = segment * launch.chunks_a_segment;
        const int64_t behind = first_chunk + launch.chunks_a_segment;
        const int64_t last = behind < all && p.cu_seqlens == nullptr ? behind : all;
        chunks = static_cast<int>(last > first_chunk ? last - first_chunk : 0);
        if (kFromEnd && chunks > 0) {
            first_chunk = last - 1;
        }
        slot = mamba3_slot(p, launch.chunks, sequence, range.begin) + first_chunk;
    }
    __device__ __forceinline__ int64_t first_step(const Mamba3Chunks& chunk_sizes) const {
        return range.begin + first_chunk * chunk_sizes.steps;
    }
};

#endif

}  // namespace mamba
