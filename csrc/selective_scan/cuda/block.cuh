// Which channels and steps a block of the CUDA scan takes, and what the segments of the length pass on.
#pragma once

#include "selective_scan/cuda/lanes.cuh"

namespace mamba {

// The channels and the part of the length that one block takes.
struct ScanBlock {
    int64_t batch;
    int64_t group;
    int64_t index;          // this block's number within its group
    int64_t first_channel;  // global channel number
    int channels;           // how many of the block's channels exist
    int64_t segment;        // 0 <= segment < p.segments
    int64_t begin;          // first step of the segment
    int64_t end;            // its end
};

// Steps a segment: whole checkpoints.
__host__ __device__ inline int64_t segment_steps(int64_t seqlen, int64_t segments) {
    const int64_t tiles = ceil_div(seqlen, MAMBA_SCAN_CHECKPOINT);
    return ceil_div(tiles, segments) * MAMBA_SCAN_CHECKPOINT;
}

__device__ __forceinline__ ScanBlock scan_block(const MambaSelectiveScan& p, int channels_per_block, int64_t first_segment) {
    const int64_t group_channels = p.dim / p.ngroups;
    const int64_t group_blocks = ceil_div(group_channels, channels_per_block);
    ScanBlock block;
    int64_t rest = blockIdx.x;
    block.index = rest % group_blocks;
    rest /= group_blocks;
    block.group = rest % p.ngroups;
    rest /= p.ngroups;
    block.batch = rest % p.batch;
    block.segment = rest / p.batch + first_segment;
    block.first_channel = block.group * group_channels + block.index * channels_per_block;
    const int64_t left = group_channels - block.index * channels_per_block;
    block.channels = static_cast<int>(left < channels_per_block ? left : channels_per_block);
    const int64_t steps = segment_steps(p.seqlen, p.segments);
    block.begin = block.segment * steps;
    block.end = block.begin + steps < p.seqlen ? block.begin + steps : p.seqlen;
    return block;
}

// Where the step `step` of the scan and the count - 1 behind it begin in a row of memory, or in a tile that begins it.
// A block counts steps as they are scanned, whichever way it goes; only memory has them in the opposite order with `reverse`.
template <class Layout>
__device__ __forceinline__ bool is_reverse(const MambaSelectiveScan& p) {
    return Layout::kCall == ScanCall::kAny ? p.reverse != 0 : Layout::kCall == ScanCall::kMambaReverse;
}
template <class Layout>
__device__ __forceinline__ int64_t place_of(const MambaSelectiveScan& p, int64_t step, int count) {
    return is_reverse<Layout>(p) ? p.seqlen - count - step : step;
}
template <class Layout>
__device__ __forceinline__ int place_in_tile(const MambaSelectiveScan& p, int step, int count) {
    return is_reverse<Layout>(p) ? Layout::kTile - count - step : step;
}

// Whether a tensor has elements around the rows of a batch entry, as many as vectors that hold elements of these may reach to.
__device__ __forceinline__ bool has_neighbours(const void* data, int64_t batch_stride, const MambaSelectiveScan& p,
                                               const ScanBlock& block) {
    const bool begins = block.batch > 0 || reinterpret_cast<uintptr_t>(data) % 16 == 0;
    return data == nullptr || (begins && block.batch + 1 < p.batch && batch_stride >= 8);
}
template <class Layout>
__device__ __forceinline__ bool inputs_have_neighbours(const MambaSelectiveScan& p, const ScanBlock& block) {
    return has_neighbours(p.u, p.u_batch_stride, p, block) && has_neighbours(p.delta, p.delta_batch_stride, p, block) &&
           has_neighbours(p.z, p.z_batch_stride, p, block) &&
           has_neighbours(Layout::kMamba || p.variable_B ? p.B : nullptr, p.B_batch_stride, p, block) &&
           has_neighbours(Layout::kMamba || p.variable_C ? p.C : nullptr, p.C_batch_stride, p, block);
}

// What a call has, of which the layouts of Mamba's calls know that it does.
template <class Layout>
__device__ __forceinline__ bool is_gated(const MambaSelectiveScan& p) {
    return Layout::kMamba || p.z != nullptr;
}
template <class Layout>
__device__ __forceinline__ bool has_softplus(const MambaSelectiveScan& p) {
    return Layout::kMamba || p.delta_softplus != 0;
}
// Whether results are added to what is there: with reverse alone.
template <class Layout>
__device__ __forceinline__ bool adds(const MambaSelectiveScan& p) {
    return (Layout::kCall == ScanCall::kAny || Layout::kCall == ScanCall::kMambaReverse) && p.add != 0;
}

inline int64_t scan_grid(const MambaSelectiveScan& p, int channels_per_block, int64_t segments) {
    return segments * p.batch * p.ngroups * ceil_div(p.dim / p.ngroups, channels_per_block);
}

// What a segment passes on, in the workspace: the state it would end with (in backward: begin with) if it started from zero,
// and the factor by which it multiplies what it starts with. A factor below 0 stands for a restart, which passes nothing on.
__device__ __forceinline__ int64_t workspace_at(const MambaSelectiveScan& p, int64_t segment, int64_t state) {
    return segment * 2 * p.batch * p.dim * p.dstate + state;
}

// The numbers of a lane's states in the workspace, and whether they exist.
template <class Layout>
struct SegmentStates {
    int64_t state[Layout::kEach][Layout::kStates];
    bool exists[Layout::kEach][Layout::kStates];
};

// Takes a lane's states through `count` segments: segment, segment + step, ... Reads of several are under way at once.
template <class Layout>
__device__ __forceinline__ void pass_through_segments(const MambaSelectiveScan& p, Chains<Layout>& carry,
                                                      const SegmentStates<Layout>& at, int64_t segment, int step, int count) {
    constexpr int kAtOnce = 16 / Layout::kStates;
#pragma unroll
    for (int c = 0; c < Layout::kEach; ++c) {
        for (int first = 0; first < count; first += kAtOnce) {
            float value[kAtOnce][Layout::kStates], factor[kAtOnce][Layout::kStates];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    const int64_t from = workspace_at(p, segment + (first + i) * step, at.state[c][s]);
                    const bool exists = first + i < count && at.exists[c][s];
                    value[i][s] = exists ? p.workspace[from] : 0.0f;
                    factor[i][s] = exists ? p.workspace[from + p.batch * p.dim * p.dstate] : 1.0f;
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    // A carry of zero passes zero on even where the factor has overflowed, as it would step by step.
                    const bool fresh = factor[i][s] < 0.0f || carry[c][s] == 0.0f;
                    carry[c][s] = fresh ? value[i][s] : fmaf(factor[i][s], carry[c][s], value[i][s]);
                }
            }
        }
    }
}

}  // namespace mamba
