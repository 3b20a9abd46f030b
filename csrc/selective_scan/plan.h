// How the scan runs on CUDA: which kernel of kernels.h, and in how many segments of the length.
#pragma once

#include "selective_scan/kernels.h"
#include "selective_scan/parts.h"

namespace mamba {

// The row of kScanForwardKernels.
inline int forward_kernel(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device) {
    return choose_kernel(scan_forward_table, kScanForwardKernels, device.major, p.dtype, p, aligned, device);
}

// Likewise for a call in segments: it finds what they pass on.
inline int forward_carry_kernel(const MambaSelectiveScan& params, bool aligned, const DeviceLimits& device) {
    MambaSelectiveScan p = params;
    p.segments = 2;  // or more
    p.carried = 0;
    return forward_kernel(p, aligned, device);
}

// The row of kScanBackwardKernels.
inline int backward_kernel(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device) {
    return choose_kernel(scan_backward_table, kScanBackwardKernels, device.major, p.dtype, p, aligned, device);
}

// Segments of the length with which there are `wanted` blocks; 1 where there are half as many anyway.
inline int64_t segments_to_fill(const MambaSelectiveScan& p, int channels, int64_t wanted, int64_t shortest) {
    const int64_t blocks = scan_blocks(p, channels);
    const int64_t tiles = ceil_div(p.seqlen, MAMBA_SCAN_CHECKPOINT);
    const int64_t most = most_segments(p, shortest);
    if (blocks == 0 || 2 * blocks > wanted || most == 1) {
        return 1;
    }
    const int64_t segments = wanted / blocks < most ? wanted / blocks : most;
    const int64_t tiles_each = ceil_div(tiles, segments);
    return ceil_div(tiles, tiles_each);  // none is empty
}

// As many as blocks run at once, unless one pass over the whole length is faster than two: where a row takes the call only
// without segments. A call that goes on from what its segments have passed on (carried) has done the first pass.
inline int64_t forward_segments(const MambaSelectiveScan& params, const DeviceLimits& device) {
    const bool aligned = inputs_aligned(params);
    MambaSelectiveScan p = params;
    p.segments = 1;
    const int whole = forward_kernel(p, aligned, device);
    p.segments = 2;  // or more
    const int split = forward_kernel(p, aligned, device);
    if (!p.carried && whole != split) {
        return 1;
    }
    const ScanWalk& walk = kScanForwardKernels[split].walk;
    return segments_to_fill(p, walk.channels(), static_cast<int64_t>(walk.blocks) * device.processors, 2);
}

// Checkpoints that a segment of the backward scan has at least where twice as many run as fit the GPU at once.
constexpr int64_t kShortestInTwo = 8;

inline int64_t backward_segments(const MambaSelectiveScan& p, int kernel, const DeviceLimits& device) {
    const ScanWalk& walk = kScanBackwardKernels[kernel].walk;
    const int64_t wanted = 3 * device.processors;
    const int64_t segments = segments_to_fill(p, walk.channels(), wanted, walk.sliced ? 4 : 2);
    if (segments == 1) {
        return 1;
    }
    // Twice as many, while they stay long, leave less idle at the end: a block that is done makes room for another one.
    const int64_t twice = segments_to_fill(p, walk.channels(), 2 * wanted, kShortestInTwo);
    return twice > segments ? twice : segments;
}

// Parts of dB and dC with which no two blocks add to the same one.
inline int64_t backward_slots(const MambaSelectiveScan& p, int kernel) {
    return group_blocks(p, kScanBackwardKernels[kernel].walk.channels());
}

inline MambaSelectiveScanPlan make_scan_plan(const MambaSelectiveScan& params, const DeviceLimits& device, bool deterministic) {
    MambaSelectiveScanPlan plan;
    MambaSelectiveScan p = params;
    p.segments = 1;  // until they are known
    plan.forward_segments = forward_segments(p, device);
    const int backward = backward_kernel(p, inputs_aligned(p), device);
    plan.backward_segments = backward_segments(p, backward, device);
    plan.slots = deterministic ? backward_slots(p, backward) : 1;
    plan.backward_workspace = scan_workspace_bytes(p, plan.backward_segments, plan.slots);
    return plan;
}

}  // namespace mamba
