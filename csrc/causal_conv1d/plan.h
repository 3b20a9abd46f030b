// Causal convolution, backward: how the length is cut into segments and who adds up dweight and dbias.
#pragma once

#include "causal_conv1d/cuda/common.cuh"

namespace mamba {

// The kernels walk (batch, segment) items; item i adds to slot i % slots, so the sums' order is fixed.
constexpr int64_t kConvMaxSlots = 256;
constexpr int64_t kChannelSegment = 512;  // lanes along channels: shared out among a block's warps
constexpr int64_t kTimeSegment = 512;     // lanes along time: a multiple of this, which holds a warp's vectors evenly

struct ConvBackwardPlan {
    int64_t segment;   // steps; the last one of a row may be shorter, and longer by the steps of a vector
    int64_t segments;  // of a row
    int64_t slots;
};

inline ConvBackwardPlan causal_conv1d_backward_plan(const MambaCausalConv1d& params) {
    const bool channel_last = is_channel_last(params);
    // Enough warps for a GPU several times over; beyond that, long walks that share taps, sums and starts are better.
    constexpr int64_t kWarps = static_cast<int64_t>(1) << 14;
    const int64_t length = params.seqlen > 0 ? params.seqlen : 1;
    const int64_t batch = params.batch > 0 ? params.batch : 1;
    const int64_t dim = params.dim > 0 ? params.dim : 1;
    int64_t warps;  // an item
    ConvBackwardPlan plan;
    if (channel_last) {
        plan.segment = kChannelSegment;
        warps = ceil_div(dim, 128) * kConvWarps;
    } else {
        const int64_t wanted = ceil_div(kWarps, batch * dim);
        plan.segment = ceil_div(ceil_div(length, wanted), kTimeSegment) * kTimeSegment;
        plan.segment = plan.segment < 32 * kTimeSegment ? plan.segment : 32 * kTimeSegment;
        warps = length >= 256 ? dim : ceil_div(dim * length, 256);
    }
    plan.segments = ceil_div(length, plan.segment);
    const int64_t items = batch * plan.segments;
    int64_t share = warps * items / (2 * kWarps);  // items a slot
    share = share > 1 ? share : 1;
    plan.slots = ceil_div(items, share);
    plan.slots = plan.slots < kConvMaxSlots ? plan.slots : kConvMaxSlots;
    return plan;
}

}  // namespace mamba
