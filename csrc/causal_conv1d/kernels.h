// The causal convolution's kernels. Each table's first row that takes a call runs it; plan.h has the predicates.
#pragma once

#include "causal_conv1d/plan.h"
#include "common/kernel_table.h"

namespace mamba {

// Where a warp's lanes lie.
enum class ConvLanes { kTime, kChannels };

struct ConvForwardKernel : KernelRow {
    bool (*takes)(const MambaCausalConv1d& p);
    ConvLanes lanes;
    int channels;      // of a lane
    bool width4_silu;  // known at compile time, with one sequence and, along time, whole vectors and no initial states
};

// clang-format off
inline constexpr ConvForwardKernel kConvForwardKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, lanes, channels, width4_silu
    {{"channel_last_width4_silu", "channel-last, D % 4 == 0, 8-byte rows; width 4, silu, no seq_idx",
      "1024 channels, a few steps of each at a time", k16Bit, kConvThreads, 0, 75},
     takes_channels_width4_silu, ConvLanes::kChannels, 4, true},
    {{"channel_last", "channel-last, D % 4 == 0, rows of whole vectors of 4", "1024 channels, a few steps of each at a time",
      k16Bit, kConvThreads, 0, 75},
     takes_channels, ConvLanes::kChannels, 4, false},
    {{"time_last_width4_silu",
      "time-last, rows of whole 16-byte vectors, L >= 136; width 4, silu, no seq_idx or initial_states", "8 rows, 1024 steps",
      k16Bit, kConvThreads, 0, 75},
     takes_time_width4_silu, ConvLanes::kTime, 1, true},
    {{"time_last", "time-last, rows alike between multiples of 16 bytes", "8 rows or more, 512 steps (float32: 256)",
      kAllDtypes, kConvThreads, 0, 75},
     takes_time, ConvLanes::kTime, 1, false},
    {{"one_channel", "", "256 channels, a few steps of each at a time", kAllDtypes, kConvThreads, 0, 75},
     takes_any_forward, ConvLanes::kChannels, 1, false},
};
// clang-format on
extern KernelTable conv_forward_table;

struct ConvBackwardKernel : KernelRow {
    bool (*takes)(const MambaCausalConv1dBackward& q);
    ConvLanes lanes;
    int channel_bytes;  // of a lane; 0: one channel
    bool width4_silu;   // as forward; along time it goes forward in time, too
};

// clang-format off
inline constexpr ConvBackwardKernel kConvBackwardKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, lanes, channel_bytes, width4_silu
    {{"channel_last_width4_silu", "channel-last, D % 4 == 0, 8-byte rows; width 4, silu, no seq_idx or dfinal_states",
      "128 channels, segments whose steps 8 warps share", k16Bit, kConvThreads, 0, 75},
     takes_channels_width4_silu, ConvLanes::kChannels, 8, true},
    {{"channel_last", "channel-last, rows of whole vectors of 8 bytes",
      "128 channels (float32: 64), segments whose steps 8 warps share", kAllDtypes, kConvThreads, 0, 75},
     takes_channels, ConvLanes::kChannels, 8, false},
    {{"time_last_width4_silu",
      "time-last, forward in time, rows of whole 16-byte vectors, L >= 136; width 4, silu, no seq_idx or states",
      "8 rows, walked backwards", k16Bit, kConvThreads, 0, 75},
     takes_time_width4_silu, ConvLanes::kTime, 0, true},
    {{"time_last", "time-last, rows alike between multiples of 16 bytes", "8 rows or more, walked backwards", kAllDtypes,
      kConvThreads, 0, 75},
     takes_time, ConvLanes::kTime, 0, false},
    {{"one_channel", "", "32 channels, segments whose steps 8 warps share", kAllDtypes, kConvThreads, 0, 75},
     takes_any_backward, ConvLanes::kChannels, 0, false},
};
// clang-format on
extern KernelTable conv_backward_table;

struct ConvUpdateKernel : KernelRow {
    bool (*takes)(const MambaCausalConv1dUpdate& p);
    bool pairs;         // a thread takes two channels of one step
    bool channel_last;  // the state's channels are neighbours
};

// clang-format off
inline constexpr ConvUpdateKernel kConvUpdateKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, pairs, channel_last
    {{"pairs", "1 step, width 4, a shifted state of 4 steps, time-last, even D", "256 channels, 1 batch entry", kAllDtypes,
      kPairThreads, 0, 75},
     takes_pairs, true, false},
    {{"pairs_channel_last", "1 step, width 4, a shifted state of 3 or 4 steps, channel-last, even D",
      "256 channels, 1 batch entry", kAllDtypes, kPairThreads, 0, 75},
     takes_pairs_channel_last, true, true},
    {{"one_channel", "", "256 channels, 1 batch entry", kAllDtypes, kConvThreads, 0, 75}, takes_any_update, false, false},
};
// clang-format on
extern KernelTable conv_update_table;

}  // namespace mamba
