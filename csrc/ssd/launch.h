// What kernels of Mamba-2's scan are given beside the problem, and who launches them.
#pragma once

#include "ssd/plan.h"

namespace mamba {

// One direction of the walk of states.cuh.
struct StateWalk {
    const void* x;  // (B, L, H, P): x, or dout for the gradient
    const void* B;  // (B, L, G, N): B, or C for the gradient
    int64_t x_batch_stride, x_len_stride, x_head_stride;
    int64_t B_batch_stride, B_len_stride, B_group_stride;
    int32_t x_vectors, B_vectors;
    const float* first;  // (B, H, P, N): state that the walk starts from, or NULL
    float* last;         // (B, H, P, N): state at its end, or NULL
    float* ends;         // (segments - 1, B, H, end_size): each segment's state at its end from zero; float32
    float* decays;       // (segments - 1, B, H): the product of its decays
    void* chunks;        // (B, heads of this launch, chunks, P, N) of T: state at each chunk's start in walking order, or NULL
};

// What a kernel lays out for those on warpgroups: products.cuh for forward, prepare_backward.cuh for backward.
struct PreparedChunks {
    void* tiles;            // (slots, G, tiles_a_chunk, steps * states) of T: B as SwizzledTile, then forward has C as
    int64_t tiles_a_chunk;  // PairedTile, backward C as SwizzledTile and B as PairedTile
    void* decays;           // (slots, H) of ChunkDecays or BackwardDecays
    int64_t decays_bytes;   // of one
};

struct StatesLaunch {
    StateWalk walks[2];   // forward, and from the end
    int64_t directions;   // 1: the first of them alone
    int64_t first_head;   // of those in each group that this launch takes
    int64_t group_heads;  // how many of each group it takes
    int64_t segments;     // parts of the walk
    int64_t chunks_a_segment;
    int64_t end_size;   // elements of a head's end, see SsdKernel::end_size
    int32_t ends_only;  // the first pass: ends and decays of all segments but the last
    PreparedChunks prepared;

    int64_t walked() const { return ends_only != 0 ? segments - 1 : segments; }
};

// Of products.cuh.
struct ProductsLaunch {
    float* products;          // (slots, G, tile, half of its columns, half of its rows, lane, 2)
    PreparedChunks prepared;  // tiles NULL: neither tiles nor decays
    int64_t slots;            // of chunks, see slot_of_sequence
    int32_t states;           // columns that are multiplied, a multiple of 32, zeros from dstate on
    int32_t B_vectors, C_vectors;
};

struct ForwardLaunch {
    int64_t segments;
    int64_t chunks_a_segment;
    int64_t end_size;       // see StatesLaunch
    const float* ends;      // (ends, B, H, end_size): the state with which a segment starts, one before it; see ends_a_segment
    const float* products;  // of products.cuh, as the next
    PreparedChunks prepared;
    int32_t x_vectors, B_vectors, C_vectors, out_vectors;  // see load_tile; not on warpgroups
};

// Of prepare_backward.cuh.
struct PrepareLaunch {
    PreparedChunks prepared;
    int64_t chunks;
    int32_t states;
    int32_t B_vectors, C_vectors;
};

struct BackwardLaunch {
    int64_t chunks;
    int64_t first_head;   // of those in each group that this launch takes
    int64_t group_heads;  // how many of each group it takes
    int64_t splits;       // blocks that share a chunk and group's heads
    int64_t row_tiles;    // parts of headdim
    int64_t parts;        // row tiles, each as often as parts of the states have a block
    const void* states;   // (B, heads of this launch, chunks, P, N) of T: before each chunk, in order
    const void* dstates;  // the same: gradient after each chunk
    float* dB;            // (splits, B, L, G, N), added to where first_head > 0
    float* dC;
    float* ddt;       // (parts, B, H, L): gradient of dt before the bias
    float* dA;        // (parts, B, chunks, H)
    float* ddt_bias;  // (parts, B, chunks, H)
    float* dD;        // (B, chunks, H, P), or NULL
    PreparedChunks prepared;
    int32_t ahead;  // the next item's tiles are on their way
    int32_t x_vectors, dout_vectors, B_vectors, C_vectors, dx_vectors, state_vectors;
};

// Kernels that know no dtype of x, compiled in cuda.cu.
cudaError_t launch_carry(const MambaSsd& p, const StatesLaunch& launch);
cudaError_t launch_prepare(const MambaSsd& p, const PrepareLaunch& launch);
cudaError_t launch_finish(const MambaSsdBackward& q, const BackwardLaunch& launch);

// All other kernels, which cuda/kernels.cu compiles once for each dtype of x.
struct SsdLaunchers {
    cudaError_t (*forward)(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace);
    cudaError_t (*backward)(const MambaSsdBackward& q, const SsdPlan& plan, const SsdWorkspace& workspace);

    template <typename T>
    static SsdLaunchers of();
};

}  // namespace mamba
