// A walk along the chunks of a head's state, 64 rows a block: which blocks there are, and where each is.
#pragma once

#include "mamba3/cuda/chunks.cuh"

namespace mamba {

struct Mamba3WalkLaunch {
    Mamba3Chunks chunks;
    int64_t segments, chunks_a_segment;
    int64_t first_head, group_heads;  // of each group, that the launch takes
    float* ends;                      // (segments - 1, U, H, P, N): the state with which a segment starts, one before it
    float* decays;                    // (segments - 1, U, H): the decay over the segment before
    int32_t direction;                // 1, or -1 from the end: then k and v of the params are q and dy

    // All heads and whole sequences.
    void set_walk(const MambaMamba3& p, const Mamba3Chunks& placed) {
        chunks = placed;
        segments = 1;
        chunks_a_segment = ceil_div(p.seqlen, chunks.steps);
        first_head = 0;
        group_heads = p.nheads / p.ngroups;
        direction = 1;
    }
    int64_t blocks(const MambaMamba3& p) const {
        return ceil_div(p.headdim, kMamba3StateRows) * group_heads * p.ngroups * segments * p.sequences;
    }
};

// Where a block is: a head's rows of the state from row0 on, some chunks of a sequence in the walk's direction.
struct Mamba3Block {
    SequenceRange range;
    int64_t head, group, segment, sequence;
    int64_t first_chunk, slot;  // slot: of the first chunk
    int64_t tile, tiles;        // of the states that are kept, and how many a slot has
    int64_t launch_head;        // of those that the launch takes
    int row_tile, row_tiles;
    int row0, columns;  // of headdim; may be more than 64
    int chunks;

    __device__ __forceinline__ Mamba3Block(const MambaMamba3& p, const Mamba3WalkLaunch& walk) {
        const uint32_t heads = static_cast<uint32_t>(walk.group_heads * p.ngroups);
        row_tiles = static_cast<int>(ceil_div(p.headdim, kMamba3StateRows));
        uint32_t index = blockIdx.x;
        tiles = static_cast<int64_t>(heads) * row_tiles;
        tile = index % static_cast<uint32_t>(tiles);
        row_tile = static_cast<int>(index % static_cast<uint32_t>(row_tiles));
        row0 = row_tile * kMamba3StateRows;
        columns = static_cast<int>(p.headdim) - row0;
        index /= static_cast<uint32_t>(row_tiles);
        launch_head = index % heads;
        group = launch_head / walk.group_heads;
        head = group * (p.nheads / p.ngroups) + walk.first_head + launch_head % walk.group_heads;
        index /= heads;
        segment = index % static_cast<uint32_t>(walk.segments);
        sequence = index / static_cast<uint32_t>(walk.segments);
        range = sequence_range(p, sequence);
        const int64_t all = ceil_div(range.seqlen, walk.chunks.steps);
        first_chunk = segment * walk.chunks_a_segment;
        const int64_t behind = first_chunk + walk.chunks_a_segment;
        const int64_t last = behind < all && p.cu_seqlens == nullptr ? behind : all;
        chunks = static_cast<int>(last > first_chunk ? last - first_chunk : 0);
        if (walk.direction < 0 && chunks > 0) {
            first_chunk = last - 1;
        }
        slot = slot_of_sequence(p, walk.chunks.steps, sequence, range.begin) + first_chunk;
    }
    __device__ __forceinline__ int64_t first_step(const Mamba3Chunks& chunk_sizes) const {
        return range.begin + first_chunk * chunk_sizes.steps;
    }
    // Of the head's states (U, H, P, N) from the block's first row on.
    __device__ __forceinline__ int64_t state_index(const MambaMamba3& p) const {
        return ((sequence * p.nheads + head) * p.headdim + row0) * p.dstate;
    }
    // The ends of segments before the block's.
    __device__ __forceinline__ float* end_of(const MambaMamba3& p, const Mamba3WalkLaunch& walk, int64_t of_segment) const {
        return walk.ends + of_segment * p.sequences * p.nheads * p.headdim * p.dstate + state_index(p);
    }
    __device__ __forceinline__ void store_decay(const MambaMamba3& p, const Mamba3WalkLaunch& walk, float decay) const {
        if (threadIdx.x == 0 && row0 == 0) {
            walk.decays[(segment * p.sequences + sequence) * p.nheads + head] = decay;
        }
    }
};

}  // namespace mamba
