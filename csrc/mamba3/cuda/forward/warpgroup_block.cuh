// What the two warpgroups of forward/warpgroup.cuh share: what a launch is told, where a block is, its shared memory.
#pragma once

#include "common/ptx_rows.cuh"
#include "mamba3/cuda/forward/rotate_rows.cuh"
#include "mamba3/cuda/forward/walk.cuh"
#include "ssd/cuda/warpgroup.cuh"

namespace mamba {

// What a walk along the chunks is for.
enum Mamba3Pass {
    kMamba3States,  // a state alone: a segment's at its end, from zero, and its decay; or for backward the state before each
                    // chunk, or from the end its gradient behind each chunk
    kMamba3Output,  // out and the final state
};

// For backward's passes. Elements of T, but for the final states and the sums.
struct Mamba3WarpgroupBackward {
    void* states;  // (slots, heads of the launch, row tiles), each a tile of 64 x kStates as the tensor cores read it
    void* dy;      // (B, L, R, heads of the launch, P)
    const void* dout;
    void* dz;                    // (B, L, H, P)
    float* dD;                   // of four ranks: (sequences, row tiles, H), as the next two
    float *dmimo_z, *dmimo_out;  // (sequences, H, R, P)
    const float* dfinal;         // of a walk from the end: (U, H, P, N), or NULL
    float* dinitial;
    int64_t dout_batch_stride, dout_len_stride, dout_head_stride;
    int64_t dy_stride;  // to the next row
    int64_t dz_step_stride;
};

struct Mamba3WarpgroupLaunch : Mamba3WalkLaunch {
    Mamba3WarpgroupBackward backward;
    int32_t part_log2;                    // steps of a part of a chunk
    int32_t vectors;                      // whether rows of q and k are 128 columns in vectors of 16 bytes
    int32_t q_step, k_step, speeds_step;  // bytes to the next step
    int32_t q_rank, k_rank;               // to the next rank
    int32_t turns_part;                   // bytes to the next part of a chunk
    int64_t values_step, turns_step;      // elements to the next chunk
    int64_t part_turns_step;
    // Runs beside the kernel ahead in the stream, which launches dependents behind its own wait, and neither reads nor writes
    // what this one writes.
    bool beside_last;
};

// Of a walk over all heads and whole sequences; size: of an element.
inline Mamba3WarpgroupLaunch mamba3_warpgroup_launch(const MambaMamba3& p, const Mamba3Chunks& chunks, int64_t size) {
    const auto bytes = [](int64_t elements, int64_t each) { return static_cast<int32_t>(elements * each); };
    Mamba3WarpgroupLaunch launch = {};
    launch.set_walk(p, chunks);
    launch.part_log2 = ceil_log2(chunks.part, 0, 6);
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

// The same walk from the end: the gradient of the state behind each chunk is the sum of dy q^T. `p` becomes the walk's; of one
// rank it finds dy by itself.
inline void mamba3_walk_from_end(MambaMamba3& p, Mamba3WarpgroupLaunch& launch) {
    launch.direction = -1;
    p.k = p.q;
    p.k_bias = p.q_bias;
    p.k_batch_stride = p.q_batch_stride;
    p.k_len_stride = p.q_len_stride;
    p.k_group_stride = p.q_group_stride;
    launch.k_step = launch.q_step;
    launch.k_rank = launch.q_rank;
    p.v = launch.backward.dy;
    p.v_len_stride = p.rank * launch.backward.dy_stride;
    p.v_batch_stride = p.seqlen * p.v_len_stride;
    p.v_head_stride = p.headdim;
}

// Rows of a chunk, columns of headdim, of a block; and what M and the products need of each row.
constexpr int kMamba3ChunkRows = 64;
using Mamba3XTile = SwizzledTile<kMamba3ChunkRows>;
constexpr int kMamba3XTile = kMamba3ChunkRows * kMamba3StateRows;

// The first arrays of Mamba3StepArray, of rows instead of steps.
constexpr int kMamba3RowValues = kMamba3Leaving + 1;
constexpr int kMamba3Adding = kMamba3Leaving;  // the weight of x k^T in the state behind the chunk, where leaving was
struct alignas(16) Mamba3ChunkValues {
    float of[kMamba3RowValues][kMamba3ChunkRows];
};

}  // namespace mamba
