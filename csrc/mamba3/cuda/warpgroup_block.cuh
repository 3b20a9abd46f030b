// What the two warpgroups of forward_warpgroup.cuh share: what a launch is told, where a block is, its shared memory.
#pragma once

#include "mamba3/cuda/chunks.cuh"
#include "mamba3/cuda/turn_rows.cuh"
#include "ssd/cuda/warpgroup.cuh"

namespace mamba {

struct Mamba3WarpgroupLaunch {
    Mamba3Chunks chunks;
    int64_t segments, chunks_a_segment;
    float* ends;  // as in Mamba3ForwardLaunch
    float* decays;
    int32_t ranks_log2, steps_log2;       // rows of a step in a tile, steps of a chunk
    int32_t ranks;                        // that exist
    int32_t q_step, k_step, speeds_step;  // bytes to the next step
    int32_t q_rank, k_rank;               // to the next rank
    int32_t turns_part;                   // bytes to the next part of a chunk
    int64_t values_step, turns_step;      // elements to the next chunk
};

// Rows of a chunk, columns of headdim, of a block; and what M and the products need of each row.
constexpr int kMamba3ChunkRows = 64;
using Mamba3XTile = SwizzledTile<kMamba3ChunkRows>;
constexpr int kMamba3XTile = kMamba3ChunkRows * kMamba3StateRows;

struct alignas(16) Mamba3ChunkValues {
    float high[kMamba3ChunkRows], low[kMamba3ChunkRows], gamma[kMamba3ChunkRows], scale[kMamba3ChunkRows];
    float entering[kMamba3ChunkRows];
    float adding[kMamba3ChunkRows];  // what x k^T counts in the state behind the chunk
    float carry[4];                  // the state's, once
};

// Shared memory of a block. Tiles are elements: q and k of two chunks, x of two chunks, the state before a chunk, and z, whose
// place the results take. q first; without results there is none, nor a state.
template <int kStates, bool kResults>
struct Mamba3WarpgroupTiles {
    static constexpr int kMatrix = kMamba3ChunkRows * kStates;
    static constexpr int kQ = kResults ? kMatrix : 0;
    static constexpr int kQK = kQ + kMatrix;
    static constexpr int kState = kResults ? kMamba3StateRows * kStates : 0;
    static constexpr int kZ = kResults ? kMamba3XTile : 0;
    static constexpr int kXAt = 2 * kQK;
    static constexpr int kStateAt = kXAt + 2 * kMamba3XTile;
    static constexpr int kZAt = kStateAt + kState;
    static constexpr int kElements = kZAt + kZ;
    static constexpr int kValuesAt = kElements * 2;  // bytes
    static constexpr int kWeightsAt = kValuesAt + 2 * static_cast<int>(sizeof(Mamba3ChunkValues));
    // Behind them: the norm's weight, then mimo_z and mimo_out of each rank.
    static int64_t bytes(int64_t ranks) { return kWeightsAt + (kResults ? (1 + 2 * ranks) * kMamba3StateRows * 4 : 0); }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where a block is: a head's rows of the state from row0 on, some chunks of a sequence.
struct Mamba3Block {
    Mamba3Sequence range;
    int64_t head, group, segment, sequence;
    int64_t first_chunk, slot;  // slot: of the first chunk
    int row0, columns;          // of headdim; may be more than 64
    int chunks;

    __device__ __forceinline__ Mamba3Block(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch) {
        const uint32_t row_tiles = static_cast<uint32_t>(ceil_div(p.headdim, kMamba3StateRows));
        uint32_t index = blockIdx.x;
        row0 = static_cast<int>(index % row_tiles) * kMamba3StateRows;
        columns = static_cast<int>(p.headdim) - row0;
        index /= row_tiles;
        head = index % static_cast<uint32_t>(p.nheads);
        group = head / (p.nheads / p.ngroups);
        index /= static_cast<uint32_t>(p.nheads);
        segment = index % static_cast<uint32_t>(launch.segments);
        sequence = index / static_cast<uint32_t>(launch.segments);
        range = mamba3_sequence(p, sequence);
        const int64_t all = ceil_div(range.seqlen, launch.chunks.steps);
        first_chunk = segment * launch.chunks_a_segment;
        const int64_t behind = first_chunk + launch.chunks_a_segment;
        const int64_t last = behind < all && p.cu_seqlens == nullptr ? behind : all;
        chunks = static_cast<int>(last > first_chunk ? last - first_chunk : 0);
        slot = mamba3_slot(p, launch.chunks, sequence, range.begin) + first_chunk;
    }
    __device__ __forceinline__ int64_t first_step(const Mamba3Chunks& chunk_sizes) const {
        return range.begin + first_chunk * chunk_sizes.steps;
    }
};

#endif

}  // namespace mamba
