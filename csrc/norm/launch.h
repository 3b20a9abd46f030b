// What cuda.cu calls; the kernels are compiled in one file a dtype of x.
#pragma once

#include "common/cuda_utils.cuh"

namespace mamba {

constexpr int kNormElements = 16;  // of a row in one thread: 1024 threads hold 16384
constexpr int kNormScalars = 4;    // the same where elements are accessed one by one
constexpr int kNormBlock = 256;    // threads that short rows share
constexpr int kNormMaxThreads = 1024;
// Backward has one block a multiprocessor: its threads take 128 registers each, its rows and sums most of shared memory.
constexpr int kNormBackwardThreads = 512;
constexpr int kNormRowsAhead = 3;  // that it copies to shared memory, at most

// How the kernels cut a problem into blocks of (lanes, block_rows) threads. A row here is one group of a row.
struct NormLayout {
    int lanes;       // threads of a row: a power of two up to 32, or a multiple of 32
    int block_rows;  // rows of a block
    bool looped;     // a row is longer than its threads can hold: it is read again for each step of the computation
};

// Backward: each block walks its rows and adds dweight and dbias up in shared memory, or if that is too small in its part of
// the workspace. With a workspace a second kernel adds the blocks' sums up, without one they are the gradients.
struct NormBackwardPlan {
    NormLayout layout;
    int64_t slots;            // blocks of one group
    int64_t sums;             // 1, with bias 2
    int64_t sum_bytes;        // of shared memory for the sums, 0: they are in the workspace
    int64_t row_bytes;        // of shared memory for the copy of a row
    int rows_ahead;           // copies for each row of a block; 0: too wide, rows are read where they are
    int64_t workspace_bytes;  // (sums, slots, N) floats
    cudaError_t error;
};

// One set of launchers a dtype of x, instantiated in cuda/f32.cu, f16.cu and bf16.cu.
template <typename T>
cudaError_t launch_norm_forward(const MambaNorm& params, const NormLayout& layout);
template <typename T>
cudaError_t launch_norm_backward(const MambaNormBackward& params, const NormBackwardPlan& plan);
template <typename T>
cudaError_t launch_swiglu(const MambaSwiglu& params, bool backward);

}  // namespace mamba
