// How a problem runs: layout, segments and workspace, for the launchers that cuda/f32.cu, f16.cu and bf16.cu instantiate.
#pragma once

#include <cuda_runtime.h>

#include "mamba_kernels.h"

namespace mamba {

// Which of SsdLayouts (chunk_tile.cuh) runs: by dstate, and in backward by the shared memory that a block may have.
enum SsdLayoutIndex { kSsdSmall, kSsdMiddle, kSsdMiddleAhead, kSsdLarge, kSsdLittle };

// Shared memory a block that the backward kernels need: kSsdMiddleAhead; kSsdMiddle and kSsdSmall; the others, as all forward
// ones but those of forward_warpgroup.cuh, fit every GPU.
constexpr int kAheadShared = 166000;
constexpr int kMiddleShared = 96 * 1024;
constexpr int kEveryShared = 64 * 1024;
// With that much (9.0 and 10.x) a multiprocessor holds four forward blocks, see forward_blocks.
constexpr int kRoomyShared = 200 * 1024;

// forward_warpgroup.cuh finds the state at so many places of each segment's length: the pass that does so would not fill the
// GPU with segments as long as those of the results.
constexpr int kEndsASegment = 2;

// The layout's sizes and what follows from them.
struct SsdPlan {
    SsdLayoutIndex layout;
    bool warpgroups;  // forward runs forward_warpgroup.cuh
    int64_t steps;
    int64_t chunks;
    int64_t segments;  // parts that the walk along the length is split into, where heads are too few to fill the GPU
    int64_t chunks_a_segment;
    int64_t slots;  // of chunks, for which forward keeps what blocks share (products.cuh)
};

// Offsets in bytes. ends and decays hold one direction after the other.
struct SsdWorkspace {
    int64_t group_heads;  // heads of each group that one launch of the backward kernels takes
    int64_t splits;       // blocks that share a chunk and group's heads
    int64_t row_tiles;
    int64_t ends, decays, products, tiles, chunk_decays, states, dstates, dB, dC, ddt, dA, ddt_bias, dD;
    int64_t bytes;
};

template <typename T>
cudaError_t launch_ssd_forward(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace);
template <typename T>
cudaError_t launch_ssd_backward(const MambaSsdBackward& q, const SsdPlan& plan, const SsdWorkspace& workspace);

// Rows start at multiples of `bytes`, and so does what follows `columns` elements. An absent tensor does not object.
inline bool ssd_rows_aligned(const void* data, int64_t columns, int64_t stride_a, int64_t stride_b, int64_t stride_c,
                             int64_t element_size, int64_t bytes) {
    return data == nullptr || (reinterpret_cast<uintptr_t>(data) % bytes == 0 && columns * element_size % bytes == 0 &&
                               stride_a * element_size % bytes == 0 && stride_b * element_size % bytes == 0 &&
                               stride_c * element_size % bytes == 0);
}

inline cudaError_t allow_shared(const void* kernel, int bytes) {
    return bytes <= 48 * 1024 ? cudaSuccess : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace mamba
