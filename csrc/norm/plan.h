// How the norm's CUDA kernels cut a problem into blocks.
#pragma once

#include "common/alignment.h"
#include "common/cuda_device.h"
#include "common/integers.h"

namespace mamba {

constexpr int kNormElements = 16;  // of a row in one thread: 1024 threads hold 16384
constexpr int kNormScalars = 4;    // the same where elements are accessed one by one
constexpr int kNormBlock = 256;    // threads that short rows share
constexpr int kNormMaxThreads = 1024;
constexpr int kNormGatedThreads = 512;  // of the gated RMSNorm's own kernel
// Backward has one block a multiprocessor: its threads take 128 registers each, its rows and sums most of shared memory.
constexpr int kNormBackwardThreads = 512;
constexpr int kNormRowsAhead = 3;  // that it copies to shared memory, at most

enum class NormGate { kNone, kBefore, kAfter, kAny };  // where silu(z) is multiplied: before or after the norm

inline MAMBA_HOST_DEVICE NormGate norm_gate(const MambaNorm& p) {
    return p.z == nullptr ? NormGate::kNone : (p.norm_before_gate ? NormGate::kAfter : NormGate::kBefore);
}

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

// vector: elements of an access; max_threads: of a row; block_threads: that short rows share. Tensors that are not aligned for
// vectors take the layout as it is.
inline NormLayout norm_layout(const MambaNorm& p, int64_t vector, int max_threads, int block_threads) {
    const int64_t elements = p.group_size % vector == 0 ? kNormElements : kNormScalars;
    const int64_t wanted = ceil_div(p.group_size, elements);
    NormLayout layout;
    if (wanted <= 32) {
        layout.lanes = 1 << ceil_log2(wanted, 0, 5);
    } else {
        layout.lanes = static_cast<int>(round_up(wanted < max_threads ? wanted : max_threads, 32));
    }
    layout.block_rows = layout.lanes < block_threads ? block_threads / layout.lanes : 1;
    layout.looped = wanted > max_threads;
    return layout;
}

// Shared memory of a block that is not planned here, with what CUDA keeps for itself.
constexpr int64_t kOtherShared = 2048;

// Shares a block's memory out: to the sums, then to as many copies of its rows as fit.
inline void share_memory(NormBackwardPlan& plan, int64_t group_size, int64_t memory) {
    const int64_t elements = plan.layout.block_rows * group_size;
    const int64_t sum_bytes = round_up(plan.sums * elements * static_cast<int64_t>(sizeof(float)), 16);
    plan.sum_bytes = sum_bytes <= memory ? sum_bytes : 0;
    const int64_t fit = plan.sum_bytes > 0 ? (memory - sum_bytes) / (plan.layout.block_rows * plan.row_bytes) : 0;
    plan.rows_ahead = static_cast<int>(fit < kNormRowsAhead ? fit : kNormRowsAhead);
}

inline NormBackwardPlan norm_backward_plan(const MambaNorm& p) {
    NormBackwardPlan plan;
    plan.layout = norm_layout(p, 16 / dtype_size(p.other_dtype), kNormBackwardThreads, kNormBackwardThreads);
    plan.sums = p.bias != nullptr ? 2 : 1;
    // dout, and x and z, or residual_out and dresidual_out
    plan.row_bytes = round_up(p.group_size * (dtype_size(p.dtype) + 2 * dtype_size(p.other_dtype)), 16);
    const DeviceLimits limits(p.run.device);
    plan.error = limits.error;
    share_memory(plan, p.group_size, limits.shared - kOtherShared);
    // With one row ahead nothing is on its way while that row is computed: rather fewer rows at a time, in whole warps. So
    // the sums of several rows are always in shared memory: a block's part of the workspace has a place for those of one.
    const int warp_rows = plan.layout.lanes < 32 ? 32 / plan.layout.lanes : 1;
    while (plan.rows_ahead < 2 && plan.layout.block_rows > warp_rows) {
        plan.layout.block_rows -= warp_rows;
        share_memory(plan, p.group_size, limits.shared - kOtherShared);
    }
    plan.layout.looped = plan.layout.looped || plan.rows_ahead == 0;
    const int64_t wanted = limits.processors / p.ngroups;  // one block a multiprocessor
    const int64_t most = ceil_div(p.rows, plan.layout.block_rows);
    plan.slots = wanted < most ? wanted : most;
    plan.slots = plan.slots > 1 ? plan.slots : 1;
    const bool direct = plan.slots == 1 && plan.sum_bytes > 0;
    const int64_t width = p.ngroups * p.group_size;
    plan.workspace_bytes = direct ? 0 : plan.slots * plan.sums * width * static_cast<int64_t>(sizeof(float));
    return plan;
}

// ---- what the rows of kernels.h ask ---------------------------------------------------------------------------------

// Whether vectors of `vector` elements of every row of a tensor are aligned.
inline bool norm_rows_aligned(const void* data, int64_t rows, int64_t row_stride, int64_t element_size, int64_t vector) {
    const int64_t bytes = element_size * vector < 16 ? element_size * vector : 16;
    return rows_aligned(data, element_size, bytes, used_stride(rows, row_stride));
}

// Whether the forward tensors allow vectors of so many elements.
inline bool norm_is_aligned(const MambaNorm& p, int64_t vector) {
    const int64_t size = dtype_size(p.dtype), other = dtype_size(p.other_dtype);
    return p.group_size % vector == 0 && norm_rows_aligned(p.x, p.rows, p.x_row_stride, size, vector) &&
           norm_rows_aligned(p.out, p.rows, p.out_row_stride, size, vector) &&
           norm_rows_aligned(p.residual, p.rows, p.residual_row_stride, other, vector) &&
           norm_rows_aligned(p.residual_out, p.rows, p.residual_out_row_stride, other, vector) &&
           norm_rows_aligned(p.z, p.rows, p.z_row_stride, other, vector) &&
           norm_rows_aligned(p.weight, 1, 0, dtype_size(p.weight_dtype), vector) &&
           norm_rows_aligned(p.bias, 1, 0, dtype_size(p.bias_dtype), vector);
}

inline bool norm_backward_is_aligned(const MambaNormBackward& q, int64_t vector) {
    const MambaNorm& p = q.forward;
    const int64_t size = dtype_size(p.dtype), other = dtype_size(p.other_dtype);
    return norm_is_aligned(p, vector) && norm_rows_aligned(q.dout, p.rows, q.dout_row_stride, size, vector) &&
           norm_rows_aligned(q.dx, p.rows, q.dx_row_stride, size, vector) &&
           norm_rows_aligned(q.dresidual_out, p.rows, q.dresidual_out_row_stride, other, vector) &&
           norm_rows_aligned(q.dresidual, p.rows, q.dresidual_row_stride, other, vector) &&
           norm_rows_aligned(q.dz, p.rows, q.dz_row_stride, other, vector);
}

// Whether a residual or z is float32 beside an x of 16 bits.
inline bool has_float32_beside(const MambaNorm& p) {
    const bool alone = p.residual == nullptr && p.residual_out == nullptr && p.z == nullptr;
    return !alone && p.dtype != MAMBA_FLOAT32 && p.other_dtype == MAMBA_FLOAT32;
}
inline bool has_float32_beside(const MambaNormBackward& q) {
    const MambaNorm& p = q.forward;
    const bool alone = p.residual_out == nullptr && p.z == nullptr && q.dresidual_out == nullptr && q.dresidual == nullptr;
    return !alone && p.dtype != MAMBA_FLOAT32 && p.other_dtype == MAMBA_FLOAT32;
}

inline bool has_vectors(const MambaNorm& p, const NormLayout& layout) {
    return !layout.looped && norm_is_aligned(p, 16 / dtype_size(p.dtype));
}
inline bool takes_vectors(const MambaNorm& p, const NormLayout& layout) {
    return !has_float32_beside(p) && has_vectors(p, layout);
}
inline bool takes_vectors_float32(const MambaNorm& p, const NormLayout& layout) {
    return has_float32_beside(p) && has_vectors(p, layout);
}
inline bool takes_gated_rms_norm(const MambaNorm& p, const NormLayout& layout) {
    return norm_gate(p) == NormGate::kBefore && p.is_rms_norm && p.ngroups == 1 && p.bias == nullptr &&
           layout.lanes * layout.block_rows <= kNormGatedThreads && takes_vectors(p, layout);
}
inline bool takes_any_norm(const MambaNorm&, const NormLayout&) {
    return true;
}

inline bool takes_tiles(const MambaNormBackward& q, const NormBackwardPlan&) {
    return !has_float32_beside(q) && norm_backward_is_aligned(q, 16 / dtype_size(q.forward.dtype));
}
inline bool takes_no_gate(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    return norm_gate(q.forward) == NormGate::kNone && !plan.layout.looped && takes_tiles(q, plan);
}
inline bool takes_no_gate_float32(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    return norm_gate(q.forward) == NormGate::kNone && !plan.layout.looped && has_float32_beside(q) &&
           norm_backward_is_aligned(q, 16 / dtype_size(MAMBA_FLOAT32));
}
inline bool takes_gate_before_norm(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    return norm_gate(q.forward) == NormGate::kBefore && !plan.layout.looped && takes_tiles(q, plan);
}
inline bool takes_any_norm_backward(const MambaNormBackward&, const NormBackwardPlan&) {
    return true;
}

inline bool takes_any_swiglu(const MambaSwiglu&) {
    return true;
}

}  // namespace mamba
