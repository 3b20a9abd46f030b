// How the scan runs on CUDA: the choice of kernel and layout, and of segments of the length.
#pragma once

#include "common/alignment.h"
#include "common/cuda_device.h"
#include "common/integers.h"
#include "selective_scan/layouts.h"
#include "selective_scan/parts.h"

namespace mamba {

// Blocks that share one batch and group, at least 1.
inline int64_t group_blocks(const MambaSelectiveScan& p, int channels) {
    const int64_t blocks = ceil_div(p.dim / p.ngroups, channels);
    return blocks > 1 ? blocks : 1;
}

// Lengths below this are not split into segments: a second launch costs time too.
constexpr int64_t kShortestSplit = 8 * MAMBA_SCAN_CHECKPOINT;

// Segments that a length can have, none shorter than `shortest` checkpoints.
inline int64_t most_segments(const MambaSelectiveScan& p, int64_t shortest) {
    return p.seqlen < kShortestSplit ? 1 : ceil_div(p.seqlen, MAMBA_SCAN_CHECKPOINT) / shortest;
}

// Segments of the length with which there are `wanted` blocks; 1 where there are half as many anyway.
inline int64_t segments_to_fill(const MambaSelectiveScan& p, int channels, int64_t wanted, int64_t shortest) {
    const int64_t blocks = p.batch * p.ngroups * group_blocks(p, channels);
    const int64_t tiles = ceil_div(p.seqlen, MAMBA_SCAN_CHECKPOINT);
    const int64_t most = most_segments(p, shortest);
    if (blocks == 0 || 2 * blocks > wanted || most == 1) {
        return 1;
    }
    const int64_t segments = wanted / blocks < most ? wanted / blocks : most;
    const int64_t tiles_each = ceil_div(tiles, segments);
    return ceil_div(tiles, tiles_each);  // none is empty
}

// Whether the forward scan should spend more lanes on a channel: where the usual layout's blocks leave the GPU half empty, but
// those of half as many channels fill it, or the length is too short to be split.
inline bool wide_is_better(const MambaSelectiveScan& p, int64_t processors) {
    const int wide_channels = forward_channels(p.dstate, true);
    if (wide_channels == forward_channels(p.dstate, false)) {
        return false;
    }
    const int64_t blocks = p.batch * p.ngroups * group_blocks(p, forward_channels(p.dstate, false));
    if (p.dstate > Forward32::kSlice) {
        return blocks < processors && p.seqlen < kShortestSplit;
    }
    const int64_t wide_blocks = p.batch * p.ngroups * group_blocks(p, wide_channels);
    return 2 * blocks < 5 * processors && (2 * wide_blocks >= 3 * processors || p.seqlen < kShortestSplit);
}

// What the launchers call aligned: every row of every (B, D, L) tensor and of variable B and C starts at a multiple of 16
// bytes, and L is a multiple of 8.
inline bool inputs_aligned(const MambaSelectiveScan& p) {
    const int64_t size = dtype_size(p.dtype);
    const bool B = !p.variable_B || rows_aligned(p.B, size, 16, p.B_batch_stride, p.B_group_stride, p.B_dstate_stride);
    const bool C = !p.variable_C || rows_aligned(p.C, size, 16, p.C_batch_stride, p.C_group_stride, p.C_dstate_stride);
    return B && C && p.seqlen % 8 == 0 && rows_aligned(p.u, size, 16, p.u_batch_stride, p.u_dim_stride) &&
           rows_aligned(p.delta, size, 16, p.delta_batch_stride, p.delta_dim_stride) &&
           rows_aligned(p.z, size, 16, p.z_batch_stride, p.z_dim_stride) &&
           rows_aligned(p.out, size, 16, p.out_batch_stride, p.out_dim_stride);
}

// Whether the forward scan can run Forward16Many, whose blocks are whole. It has fewer instructions a state step than the
// layouts that give a block fewer channels.
inline bool takes_many_channels(const MambaSelectiveScan& p) {
    return is_usual(p) && !p.reverse && p.dstate == Forward16Many::kSlice && fills_tiles<Forward16Many>(p, inputs_aligned(p));
}

// Whether it does: there are three blocks for each multiprocessor, or, of a carried call, segments that make enough of them.
inline bool has_many_channels(const MambaSelectiveScan& p, int64_t processors) {
    const int64_t blocks = p.batch * p.ngroups * group_blocks(p, Forward16Many::kChannels);
    return takes_many_channels(p) && (p.segments == 1 ? blocks >= 3 * processors : p.carried != 0);
}

// The forward scan's layout, of those for the number of states.
inline BlockChannels forward_block(const MambaSelectiveScan& p, int64_t processors) {
    if (has_many_channels(p, processors)) {
        return BlockChannels::kMany;
    }
    return p.segments == 1 && wide_is_better(p, processors) ? BlockChannels::kFew : BlockChannels::kSome;
}

inline bool gradients_aligned(const MambaSelectiveScanBackward& q) {
    const int64_t size = dtype_size(q.forward.dtype);
    return rows_aligned(q.dout, size, 16, q.dout_batch_stride, q.dout_dim_stride) &&
           rows_aligned(q.du, size, 16, q.du_batch_stride, q.du_dim_stride) &&
           rows_aligned(q.ddelta, size, 16, q.ddelta_batch_stride, q.ddelta_dim_stride) &&
           rows_aligned(q.dz, size, 16, q.dz_batch_stride, q.dz_dim_stride);
}

// Lengths up to this are worth the pipelined forward scan however few the channels are.
constexpr int64_t kLongestNarrow = 1024;

// Channels a block of the pipelined forward scan takes where that is to run, else 0. All of its blocks run at once, for as long
// as one takes: with fewer than two thirds of the multiprocessors, segments of a long length are faster.
inline int pipeline_channels(const MambaSelectiveScan& p, const DeviceLimits& device) {
    const bool can_run = p.dstate <= 16 && p.variable_B && p.variable_C && p.seq_idx == nullptr &&
                         p.seqlen > MAMBA_SCAN_CHECKPOINT && inputs_aligned(p);
    for (const int channels : kPipelineChannels) {
        const int64_t blocks = p.batch * p.ngroups * group_blocks(p, channels);
        const bool fits =
            pipeline_takes(channels, p.dstate) &&
            pipeline_shared(channels, p.dstate <= 8 ? 8 : 16, static_cast<int>(dtype_size(p.dtype))) <= device.shared;
        if (can_run && fits && blocks <= device.processors) {
            return p.seqlen <= kLongestNarrow || 3 * blocks >= 2 * device.processors ? channels : 0;
        }
    }
    return 0;
}

// Checkpoints that a segment of the backward scan has at least (of 9 to 16 states, and in 16 bits of fewer: 2), and where twice
// as many segments run as fit the GPU at once.
constexpr int64_t kShortestBackward = 4;
constexpr int64_t kShortestInTwo = 8;

inline BackwardKind backward_kind(const MambaSelectiveScan& p, const DeviceLimits& device) {
    const bool small = device.shared < kBackwardShared;
    if (p.dstate > Backward16::kSlice) {
        if (backward16_sliced_shared(p.dstate, dtype_size(p.dtype)) <= device.shared) {
            return BackwardKind::k16Sliced;
        }
        return small ? BackwardKind::k32SmallSliced : BackwardKind::k32Sliced;
    }
    if (small) {
        return BackwardKind::k16Narrow;
    }
    if (p.dstate <= Backward8::kSlice) {
        return BackwardKind::k8;
    }
    // Fewer channels a block where there would not be two for each multiprocessor. Of float32 no more than two fit one, too few
    // for the segments of a length.
    const int64_t blocks = p.batch * p.ngroups * group_blocks(p, Backward16::kChannels);
    const int64_t most = blocks * most_segments(p, kShortestBackward);
    const bool few = most < 2 * device.processors || (dtype_size(p.dtype) == 4 && 2 * blocks <= 3 * device.processors);
    return few ? BackwardKind::k16Narrow : BackwardKind::k16;
}

// Parts of dB and dC with which no two blocks add to the same one.
inline int64_t slots_without_atomics(const MambaSelectiveScan& p, const DeviceLimits& device) {
    return group_blocks(p, backward_channels(backward_kind(p, device)));
}

// Whether blocks add to the same dB and dC, which are zero before.
inline bool adds_with_atomics(const MambaSelectiveScan& p, int64_t slots, const DeviceLimits& device) {
    return slots < slots_without_atomics(p, device);
}

// Of a call that goes on from what its segments have passed on (carried) also where one pass over the whole length would be
// faster than two: the first one is done.
inline int64_t forward_segments(const MambaSelectiveScan& p, const DeviceLimits& device) {
    if (!p.carried && (pipeline_channels(p, device) > 0 || wide_is_better(p, device.processors))) {
        return 1;
    }
    const bool many = p.carried && takes_many_channels(p);
    const int channels = many ? Forward16Many::kChannels : forward_channels(p.dstate, false);
    // So many blocks run at once on a multiprocessor.
    const int64_t at_once = p.dstate <= Forward16::kSlice ? 4 : takes_128_states(p, inputs_aligned(p)) ? 2 : 3;
    return segments_to_fill(p, channels, at_once * device.processors, 2);
}

inline int64_t backward_segments(const MambaSelectiveScan& p, const DeviceLimits& device) {
    const BackwardKind kind = backward_kind(p, device);
    const int64_t wanted = 3 * device.processors;
    const bool can_be_short =
        kind == BackwardKind::k16 || kind == BackwardKind::k16Narrow || (kind == BackwardKind::k8 && dtype_size(p.dtype) == 2);
    const int64_t shortest = can_be_short ? 2 : kShortestBackward;
    const int64_t segments = segments_to_fill(p, backward_channels(kind), wanted, shortest);
    if (segments == 1) {
        return 1;
    }
    // Twice as many, while they stay long, leave less idle at the end: a block that is done makes room for another one.
    const int64_t twice = segments_to_fill(p, backward_channels(kind), 2 * wanted, kShortestInTwo);
    return twice > segments ? twice : segments;
}

inline MambaSelectiveScanPlan make_scan_plan(const MambaSelectiveScan& p, const DeviceLimits& device, bool deterministic) {
    MambaSelectiveScanPlan plan;
    plan.forward_segments = forward_segments(p, device);
    plan.backward_segments = backward_segments(p, device);
    plan.slots = deterministic ? slots_without_atomics(p, device) : 1;
    plan.backward_workspace = scan_workspace_bytes(p, plan.backward_segments, plan.slots);
    return plan;
}

}  // namespace mamba
