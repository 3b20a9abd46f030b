// How the causal convolution runs on CUDA: the layouts its kernels tell apart, and in backward how the length is cut into
// segments and who adds up dweight and dbias.
#pragma once

#include "causal_conv1d/check.h"
#include "common/alignment.h"
#include "common/integers.h"

namespace mamba {

constexpr int kConvThreads = 256;
constexpr int kConvWarps = kConvThreads / 32;

// The strides and the pointer of one (B, D, L) tensor.
struct ConvLayout {
    const void* data;
    int64_t batch_stride, dim_stride, len_stride;
};

// Channel-last unless steps are neighbours; a tensor of one step is taken whichever way its channels allow.
inline bool is_channel_last(const MambaCausalConv1d& params) {
    return params.x_dim_stride == 1 && (params.x_len_stride != 1 || params.seqlen <= 1);
}

// Whether `vector` neighbouring channels can be moved at once everywhere in this tensor.
inline bool can_vectorise_channels(const MambaCausalConv1d& params, const ConvLayout& layout, int vector) {
    const int64_t size = dtype_size(params.dtype);
    const int64_t bytes = vector * size;
    return params.dim % vector == 0 && layout.dim_stride == 1 &&
           rows_aligned(layout.data, size, bytes, used_stride(params.seqlen, layout.len_stride),
                        used_stride(params.batch, layout.batch_stride));
}

// Whether steps are neighbours in x, the later ones at lower addresses.
inline MAMBA_HOST_DEVICE bool is_backwards(const MambaCausalConv1d& params) {
    return params.x_len_stride == -1 && params.seqlen > 1;
}

// Whether it has steps, they are neighbours in this tensor, in the same order as in x, and each of its rows lies as that of
// `reference` does between addresses that are multiples of 16 bytes. Rows need not begin at one: lengths may be odd.
inline bool rows_lie_alike(const MambaCausalConv1d& params, const ConvLayout& reference, const ConvLayout& layout) {
    const int64_t len_stride = is_backwards(params) ? -1 : 1;
    const int64_t size = dtype_size(params.dtype);
    const int64_t distance = reinterpret_cast<intptr_t>(layout.data) - reinterpret_cast<intptr_t>(reference.data);
    return params.seqlen > 0 && (layout.len_stride == len_stride || params.seqlen == 1) && distance % 16 == 0 &&
           pointer_is_aligned(layout.data, size) &&
           used_stride(params.dim, layout.dim_stride - reference.dim_stride) * size % 16 == 0 &&
           used_stride(params.batch, layout.batch_stride - reference.batch_stride) * size % 16 == 0;
}

inline ConvLayout conv_x(const MambaCausalConv1d& p) {
    return {p.x, p.x_batch_stride, p.x_dim_stride, p.x_len_stride};
}

// Whether every row of x begins and ends at a multiple of 16 bytes.
inline bool rows_are_whole_vectors(const MambaCausalConv1d& params, const ConvLayout& x) {
    const int64_t size = dtype_size(params.dtype);
    const void* const end = static_cast<const char*>(x.data) + (is_backwards(params) ? size : 0);  // one of a row's two
    return rows_aligned(end, size, 16, params.seqlen, used_stride(params.dim, x.dim_stride),
                        used_stride(params.batch, x.batch_stride));
}

// A group of 2^log2 neighbouring lanes takes a row, a vector of 16 bytes each at a time. Its vectors may reach beyond it by
// `slack` steps.
struct TimeLanes {
    int log2, slack;
};

inline TimeLanes time_lanes(const MambaCausalConv1d& params) {
    const int vector = static_cast<int>(16 / dtype_size(params.dtype));
    const int slack = rows_are_whole_vectors(params, conv_x(params)) ? 0 : vector - 1;
    return {ceil_log2(ceil_div(params.seqlen + slack, vector), 0, 5), slack};
}

// What most models call, for which kernels have a form without run-time branches.
inline bool is_width4_silu(const MambaCausalConv1d& params) {
    return params.width == kConvMaxWidth && params.silu && params.seq_idx == nullptr &&
           pointer_is_aligned(params.weight, kConvMaxWidth * dtype_size(params.weight_dtype));
}

// Whether rows are whole vectors and fill a warp.
inline bool rows_fill_warps(const MambaCausalConv1d& params) {
    const TimeLanes lanes = time_lanes(params);
    return lanes.slack == 0 && lanes.log2 == 5;
}

// ---- forward ---------------------------------------------------------------------------------------------------------

// Lanes along channels: how many steps a thread walks, with so many blocks at once. The last wave of blocks takes as long as a
// full one, and a thread's start as some steps: it reads its window and taps first. Odd numbers are tried: on an H200 88 steps
// took 1.5 % longer than 87 (8 x 2048 x 4096, as many waves), perhaps since walks then begin at multiples of 64 KB.
inline int conv_forward_steps(int64_t batch, int64_t vectors, int64_t length, int64_t blocks_at_once) {
    constexpr int kShortest = 7, kLongest = 127, kStart = 8;
    int best = kLongest;
    int64_t least = INT64_MAX;
    for (int steps = kLongest; steps >= kShortest; steps -= 4) {
        const int64_t blocks = batch * ceil_div(vectors * ceil_div(length, steps), kConvThreads);
        const int64_t time = ceil_div(blocks, blocks_at_once) * (steps + kStart);
        if (time < least) {
            least = time;
            best = steps;
        }
    }
    return best;
}

// What the rows of kernels.h ask, in the order of their tables.
inline bool takes_channels(const MambaCausalConv1d& p) {
    constexpr int kVector = 4;  // more channels a thread need more registers than hide the latency
    const ConvLayout out = {p.out, p.out_batch_stride, p.out_dim_stride, p.out_len_stride};
    return is_channel_last(p) && can_vectorise_channels(p, conv_x(p), kVector) && can_vectorise_channels(p, out, kVector);
}
inline bool takes_channels_width4_silu(const MambaCausalConv1d& p) {
    return is_width4_silu(p) && takes_channels(p);
}
inline bool takes_time(const MambaCausalConv1d& p) {
    const ConvLayout x = conv_x(p), out = {p.out, p.out_batch_stride, p.out_dim_stride, p.out_len_stride};
    return !is_channel_last(p) && rows_lie_alike(p, x, x) && rows_lie_alike(p, x, out);
}
inline bool takes_time_width4_silu(const MambaCausalConv1d& p) {
    return is_width4_silu(p) && p.initial_states == nullptr && takes_time(p) && rows_fill_warps(p);
}
inline bool takes_any_forward(const MambaCausalConv1d&) {
    return true;
}

// ---- backward --------------------------------------------------------------------------------------------------------

// The kernels walk (batch, segment) items; item i adds to slot i % slots, so the sums' order is fixed.
constexpr int64_t kConvMaxSlots = 256;
constexpr int64_t kTimeSegment = 512;  // lanes along time: a multiple of this, which holds a warp's vectors evenly

struct ConvBackwardPlan {
    int64_t segment;   // steps; the last one of a row may be shorter, and longer by the steps of a vector
    int64_t segments;  // of a row
    int64_t slots;
};

// Lanes along time. Long walks share taps, sums and starts, and a single slot leaves nothing to add up: so there are the fewest
// slots with which the GPU is done soonest. kWave warps run at once; the last wave takes as long as a full one. Of the slots
// that make as many waves only the fewest matter that walk no further than the most do, so that a call looks at few.
inline ConvBackwardPlan conv_backward_plan_time(int64_t batch, int64_t dim, int64_t length) {
    constexpr int64_t kWave = static_cast<int64_t>(1) << 12;
    constexpr int64_t kLongest = 32 * kTimeSegment;
    constexpr int64_t kStepsOfSums = 1024;                                    // what adding up slots takes
    constexpr int64_t kMostWaves = 8;                                         // of several slots: `most` has no more
    const int64_t warps = length >= 256 ? dim : ceil_div(dim * length, 256);  // a slot's
    int64_t most = batch * ceil_div(length, kTimeSegment);
    most = most < kConvMaxSlots ? most : kConvMaxSlots;
    most = most < ceil_div(4 * kWave, warps) ? most : ceil_div(4 * kWave, warps);
    ConvBackwardPlan plan = {};
    int64_t least = INT64_MAX;
    // Slots that take whole rows, or `parts` of them share a row. In the order of their number: the fewest win.
    const auto consider = [&](int64_t slots, int64_t parts) {
        const int64_t segment = round_up(ceil_div(length, parts), kTimeSegment);
        const int64_t steps = parts == 1 ? ceil_div(batch, slots) * length : segment;
        const int64_t time = ceil_div(slots * warps, kWave) * steps + (slots > 1 ? kStepsOfSums : 0);
        if (time < least) {
            least = time;
            plan.segment = segment < kLongest ? segment : kLongest;
            plan.slots = slots;
        }
    };
    consider(1, 1);
    const int64_t most_rows = most < batch ? most : batch;
    for (int64_t waves = 1, slots = 1; waves <= kMostWaves && slots < most_rows; ++waves) {
        slots = waves * kWave / warps;
        slots = slots < most_rows ? slots : most_rows;
        if (slots > 1) {
            consider(ceil_div(batch, ceil_div(batch, slots)), 1);
        }
    }
    const int64_t most_parts = most / batch;
    for (int64_t waves = 1, parts = 1; waves <= kMostWaves && parts < most_parts; ++waves) {
        parts = waves * kWave / (batch * warps);
        parts = parts < most_parts ? parts : most_parts;
        if (parts > 1) {
            const int64_t fewest = ceil_div(length, round_up(ceil_div(length, parts), kTimeSegment));
            const int64_t several = fewest > 2 ? fewest : 2;
            consider(batch * several, several);
        }
    }
    plan.segments = ceil_div(length, plan.segment);
    return plan;
}

// Lanes along channels, `channels` a block, whose warps share out a segment's steps. All slots run at once: kAtOnce blocks, two
// on each of an H100's multiprocessors. A segment's start takes as long as some of its steps, since each warp also reads some
// of its neighbours'; so there are as few segments as let all slots walk about as far. Those of a row are of one length.
inline ConvBackwardPlan conv_backward_plan_channel(int64_t batch, int64_t dim, int64_t length, int64_t channels) {
    constexpr int64_t kAtOnce = 264, kShortest = 64, kStart = 48, kTried = 16;
    const int64_t blocks = ceil_div(dim, channels);  // a slot's
    int64_t most = kAtOnce > blocks ? kAtOnce / blocks : 1;
    most = most < kConvMaxSlots ? most : kConvMaxSlots;
    const int64_t useful = ceil_div(most, batch) > kTried ? ceil_div(most, batch) : kTried;
    const int64_t possible = (length - 1) / (kShortest - 1);  // or they would be shorter
    const int64_t most_segments = useful < possible ? useful : possible;
    ConvBackwardPlan plan = {};
    int64_t least = INT64_MAX;
    const auto consider = [&](int64_t segments) {
        const int64_t segment = ceil_div(length, segments);
        const int64_t items_of_slot = ceil_div(batch * segments, most);
        const int64_t time = items_of_slot * (segment + kStart);
        if (time < least) {
            least = time;
            plan.segment = segment;
            plan.segments = ceil_div(length, segment);
            plan.slots = ceil_div(batch * plan.segments, items_of_slot);
        }
    };
    consider(1);
    for (int64_t segments = 2; segments <= kTried && segments <= most_segments; ++segments) {
        consider(segments);
    }
    // Beyond, where rows are few, a slot has one item or two: of each the fewest segments that are as short as any.
    if (most_segments > kTried) {
        const int64_t of_one_item = most / batch < most_segments ? most / batch : most_segments;
        consider(ceil_div(length, ceil_div(length, of_one_item)));
        consider(ceil_div(length, ceil_div(length, most_segments)));
    }
    return plan;
}

inline ConvBackwardPlan conv_backward_plan(const MambaCausalConv1d& params) {
    const int64_t length = params.seqlen > 0 ? params.seqlen : 1;
    const int64_t batch = params.batch > 0 ? params.batch : 1;
    const int64_t dim = params.dim > 0 ? params.dim : 1;
    if (!is_channel_last(params)) {
        return conv_backward_plan_time(batch, dim, length);
    }
    return conv_backward_plan_channel(batch, dim, length, 32 * 8 / dtype_size(params.dtype));
}

inline bool takes_channels(const MambaCausalConv1dBackward& q) {
    const MambaCausalConv1d& p = q.forward;
    const int vector = static_cast<int>(8 / dtype_size(p.dtype));  // wider needs more registers than hide the latency
    const ConvLayout dout = {q.dout, q.dout_batch_stride, q.dout_dim_stride, q.dout_len_stride};
    const ConvLayout dx = {q.dx, q.dx_batch_stride, q.dx_dim_stride, q.dx_len_stride};
    return is_channel_last(p) && can_vectorise_channels(p, conv_x(p), vector) && can_vectorise_channels(p, dout, vector) &&
           can_vectorise_channels(p, dx, vector);
}
inline bool takes_channels_width4_silu(const MambaCausalConv1dBackward& q) {
    return is_width4_silu(q.forward) && q.dfinal_states == nullptr && takes_channels(q);
}
inline bool takes_time(const MambaCausalConv1dBackward& q) {
    const MambaCausalConv1d& p = q.forward;
    const ConvLayout dout = {q.dout, q.dout_batch_stride, q.dout_dim_stride, q.dout_len_stride};
    const ConvLayout dx = {q.dx, q.dx_batch_stride, q.dx_dim_stride, q.dx_len_stride};
    return !is_channel_last(p) && rows_lie_alike(p, conv_x(p), conv_x(p)) && rows_lie_alike(p, conv_x(p), dout) &&
           rows_lie_alike(p, conv_x(p), dx);
}
inline bool takes_time_width4_silu(const MambaCausalConv1dBackward& q) {
    const MambaCausalConv1d& p = q.forward;
    return is_width4_silu(p) && q.dfinal_states == nullptr && p.initial_states == nullptr && q.dinitial_states == nullptr &&
           !is_backwards(p) && takes_time(q) && rows_fill_warps(p);
}
inline bool takes_any_backward(const MambaCausalConv1dBackward&) {
    return true;
}

// ---- update ----------------------------------------------------------------------------------------------------------

constexpr int kPairThreads = 128;
constexpr int64_t kMostPairChannels = static_cast<int64_t>(1) << 26;  // offsets of a channel have 32 bits

// Whether this is one step of four taps whose state is shifted, and pairs of channels can be moved at once everywhere but in
// the state.
inline bool pairs_fit(const MambaCausalConv1dUpdate& p) {
    const int64_t size = dtype_size(p.dtype), bias_size = dtype_size(p.bias_dtype);
    return p.seqlen == 1 && p.width == kConvMaxWidth && p.batch <= INT32_MAX && p.state_rows > 0 &&
           p.cache_seqlens == nullptr && p.dim % 2 == 0 && p.dim <= kMostPairChannels && p.state_dtype == p.dtype &&
           p.x_dim_stride == 1 && p.out_dim_stride == 1 &&
           rows_aligned(p.x, size, 2 * size, used_stride(p.batch, p.x_batch_stride)) &&
           rows_aligned(p.out, size, 2 * size, used_stride(p.batch, p.out_batch_stride)) && pointer_is_aligned(p.weight, 16) &&
           rows_aligned(p.bias, bias_size, 2 * bias_size);
}

// A state of four steps that are neighbours: both channels' are one vector.
inline bool takes_pairs(const MambaCausalConv1dUpdate& p) {
    return pairs_fit(p) && p.state_len == kConvMaxWidth && p.state_len_stride == 1 && p.state_dim_stride == kConvMaxWidth &&
           rows_aligned(p.conv_state, dtype_size(p.dtype), 16, used_stride(p.state_rows, p.state_row_stride));
}

// A state of three or four steps, whose channels are neighbours.
inline bool takes_pairs_channel_last(const MambaCausalConv1dUpdate& p) {
    const int64_t size = dtype_size(p.dtype);
    return pairs_fit(p) && (p.state_len == kConvMaxWidth || p.state_len == kConvMaxWidth - 1) && p.state_dim_stride == 1 &&
           rows_aligned(p.conv_state, size, 2 * size, used_stride(p.state_rows, p.state_row_stride), p.state_len_stride);
}
inline bool takes_any_update(const MambaCausalConv1dUpdate&) {
    return true;
}

}  // namespace mamba
