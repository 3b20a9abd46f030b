// What both forward kernels (forward.cuh, forward_warpgroup.cuh) have in common: which part of the problem a block takes.
#pragma once

#include "ssd/cuda/states.cuh"
#include "ssd/launch.h"

namespace mamba {

// 64 rows of one head's state, over one segment of one entry of the batch. Pointers are to the segment's sequence.
template <typename T, int kSteps>
struct ForwardBlock {
    int64_t batch, head, group, segment;
    int64_t begin, seqlen;  // of the sequence; begin counts from the tensors' row
    int64_t first_chunk, last_chunk;
    int row0, rows;  // rows from row0 on that exist; may be more than kForwardRows
    const T* x;
    const T* B;
    const T* C;
    const T* z;
    T* out;
    const int32_t* seq_idx;
    StepSize size;
    float A;
    int64_t state_index;  // of this block's first row in (B, H, P, N)

    __device__ __forceinline__ int chunks() const { return static_cast<int>(last_chunk - first_chunk); }
    // The state before the first segment, or NULL, and what there is before another one. ends: how many the first pass has
    // left a segment.
    __device__ __forceinline__ const float* first(const MambaSsd& p) const {
        return p.initial_state == nullptr ? nullptr : p.initial_state + state_index;
    }
    __device__ __forceinline__ const float* end_before(const MambaSsd& p, const ForwardLaunch& launch, int ends) const {
        return launch.ends + (((segment * ends - 1) * p.batch + batch) * p.nheads + head) * launch.end_size;
    }

    __device__ __forceinline__ ForwardBlock(const MambaSsd& p, const ForwardLaunch& launch) {
        const uint32_t row_tiles = static_cast<uint32_t>(ceil_div(p.headdim, kForwardRows));
        const uint32_t heads = static_cast<uint32_t>(p.nheads);
        const uint32_t segments = static_cast<uint32_t>(launch.segments);
        uint32_t index = blockIdx.x;
        row0 = static_cast<int>(index % row_tiles) * kForwardRows;
        rows = static_cast<int>(p.headdim) - row0;
        index /= row_tiles;
        head = index % heads;
        group = index % heads / (heads / static_cast<uint32_t>(p.ngroups));
        index /= heads;
        segment = index % segments;
        batch = index / segments;

        const SequenceRange range = sequence_range(p, batch);
        begin = range.begin;
        seqlen = range.seqlen;
        const int64_t chunks = ceil_div(seqlen, kSteps);
        first_chunk = segment * launch.chunks_a_segment;
        last_chunk = first_chunk + launch.chunks_a_segment;
        last_chunk = last_chunk < chunks ? last_chunk : chunks;

        x = static_cast<const T*>(p.x) + range.row * p.x_batch_stride + begin * p.x_len_stride + head * p.x_head_stride + row0;
        B = static_cast<const T*>(p.B) + range.row * p.B_batch_stride + begin * p.B_len_stride + group * p.B_group_stride;
        C = static_cast<const T*>(p.C) + range.row * p.C_batch_stride + begin * p.C_len_stride + group * p.C_group_stride;
        z = p.z == nullptr ? nullptr
                           : static_cast<const T*>(p.z) + range.row * p.z_batch_stride + begin * p.z_len_stride +
                                 head * p.z_head_stride + row0;
        out = static_cast<T*>(p.out) + range.row * p.out_batch_stride + begin * p.out_len_stride + head * p.out_head_stride +
              row0;
        seq_idx = p.seq_idx == nullptr ? nullptr : p.seq_idx + range.row * p.seqlen + begin;
        size = step_size(p, range.row, begin, head);
        A = head_A(p, head);
        state_index = ((batch * p.nheads + head) * p.headdim + row0) * p.dstate;
    }
};

}  // namespace mamba
