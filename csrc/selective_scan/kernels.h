// The CUDA scan's kernels, a row each, in order of preference: the first row that takes a call runs it.
#pragma once

#include "common/alignment.h"
#include "common/cuda_device.h"
#include "common/integers.h"
#include "common/kernel_table.h"
#include "mamba_kernels.h"

namespace mamba {

// The calls that a kernel is compiled for. kMamba, kMambaReverse: those of Mamba's layers (is_mamba) in one direction, whose
// channels, states and steps fill all blocks and tiles. kAny: what a call has, and its direction, is read at run time;
// kForward: likewise, of calls that are not in reverse. kMambaAnySize: those of Mamba's layers, not in reverse.
enum class ScanCall { kAny, kForward, kMambaAnySize, kMamba, kMambaReverse };

// How a block walks the length.
struct ScanWalk {
    ScanCall call;
    int lanes;              // that share a channel
    int states;             // of a channel in each of them
    int channels_per_lane;  // which neighbouring lanes share
    int tile;               // steps that are staged at once
    int warps;
    int steps;    // forward: whose sums over states are taken at once; backward: whose states lie in registers at once
    int blocks;   // a multiprocessor that registers leave room for
    bool sliced;  // takes any number of states, in slices of lanes * states

    constexpr int slice() const { return lanes * states; }
    constexpr int channels() const { return 32 / lanes * channels_per_lane * warps; }
};

// The kernel that takes a walk: cuda/forward.cuh or backward.cuh; cuda/forward_pipeline.cuh, where `warps` are those that scan;
// cuda/few_states_*.cuh, which has no segments.
enum class ScanCode { kTiles, kPipeline, kFewStates };

struct ScanKernel : KernelRow {
    bool (*takes)(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device);
    ScanWalk walk;
    ScanWalk carry;  // of the launch that finds what segments pass on, for every call that the row takes
    ScanCode code = ScanCode::kTiles;
};

// ---- what calls have -------------------------------------------------------------------------------------------------

// Whether every tensor's rows, and those of variable B and C, start at multiples of so many bytes.
inline bool inputs_start_at(const MambaSelectiveScan& p, int64_t bytes) {
    const int64_t size = dtype_size(p.dtype);
    const bool B = !p.variable_B || rows_aligned(p.B, size, bytes, p.B_batch_stride, p.B_group_stride, p.B_dstate_stride);
    const bool C = !p.variable_C || rows_aligned(p.C, size, bytes, p.C_batch_stride, p.C_group_stride, p.C_dstate_stride);
    return B && C && rows_aligned(p.u, size, bytes, p.u_batch_stride, p.u_dim_stride) &&
           rows_aligned(p.delta, size, bytes, p.delta_batch_stride, p.delta_dim_stride) &&
           rows_aligned(p.z, size, bytes, p.z_batch_stride, p.z_dim_stride) &&
           rows_aligned(p.out, size, bytes, p.out_batch_stride, p.out_dim_stride);
}
inline bool gradients_start_at(const MambaSelectiveScanBackward& q, int64_t bytes) {
    const int64_t size = dtype_size(q.forward.dtype);
    return rows_aligned(q.dout, size, bytes, q.dout_batch_stride, q.dout_dim_stride) &&
           rows_aligned(q.du, size, bytes, q.du_batch_stride, q.du_dim_stride) &&
           rows_aligned(q.ddelta, size, bytes, q.ddelta_batch_stride, q.ddelta_dim_stride) &&
           rows_aligned(q.dz, size, bytes, q.dz_batch_stride, q.dz_dim_stride);
}

// For 16-byte accesses to 8 elements, and for accesses to four elements.
inline bool inputs_aligned(const MambaSelectiveScan& p) {
    return p.seqlen % 8 == 0 && inputs_start_at(p, 16);
}
inline bool gradients_aligned(const MambaSelectiveScanBackward& q) {
    return gradients_start_at(q, 16);
}
inline bool inputs_in_quads(const MambaSelectiveScan& p) {
    return p.seqlen % 4 == 0 && inputs_start_at(p, 4 * dtype_size(p.dtype));
}
inline bool gradients_in_quads(const MambaSelectiveScanBackward& q) {
    return gradients_start_at(q, 4 * dtype_size(q.forward.dtype));
}

// Whether a call has what Mamba's layers give it: 16 bits, z, D, softplus, B and C that vary, and no sequences.
inline bool is_mamba(const MambaSelectiveScan& p) {
    return dtype_size(p.dtype) == 2 && p.z != nullptr && p.D != nullptr && p.delta_softplus && p.variable_B && p.variable_C &&
           p.seq_idx == nullptr;
}

// Blocks of so many channels each, without segments, and those of one batch entry and group.
inline int64_t group_blocks(const MambaSelectiveScan& p, int channels) {
    const int64_t blocks = ceil_div(p.dim / p.ngroups, channels);
    return blocks > 1 ? blocks : 1;
}
inline int64_t scan_blocks(const MambaSelectiveScan& p, int channels) {
    return p.batch * p.ngroups * group_blocks(p, channels);
}

// Whether a kernel of kMamba or kMambaReverse can take the call.
inline bool fills_blocks(const MambaSelectiveScan& p, bool aligned, const ScanWalk& walk) {
    const bool states = walk.sliced ? p.dstate % walk.slice() == 0 : p.dstate == walk.slice();
    return is_mamba(p) && (p.reverse != 0) == (walk.call == ScanCall::kMambaReverse) && aligned && states && p.seqlen > 0 &&
           p.seqlen % walk.tile == 0 && p.dim / p.ngroups % walk.channels() == 0;
}

template <bool (*kTakes)(const MambaSelectiveScan&, bool, const DeviceLimits&)>
bool is_forward_and(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device) {
    return !p.reverse && kTakes(p, aligned, device);
}

// ---- few states: 16 lanes a channel ----------------------------------------------------------------------------------

constexpr int kMostFewStates = 4;

// Whether tiles are full enough: more than half of their steps exist, with more than two states three quarters. And whether the
// channels are enough, without segments of the length.
inline bool has_few_states(const MambaSelectiveScan& p, bool, const DeviceLimits& device) {
    const int64_t steps = round_up(p.seqlen, 128);
    const bool two = p.dstate <= 2;
    return p.segments == 1 && p.dstate <= kMostFewStates && p.variable_B && p.variable_C && p.z == nullptr &&
           p.seq_idx == nullptr && (two ? 2 * p.seqlen > steps : 4 * p.seqlen >= 3 * steps) && p.seqlen > 0 &&
           p.seqlen < 1 << 30 && p.dim <= INT32_MAX && p.batch * p.dim >= (two ? 4 : 16) * device.processors;
}

// ---- the forward scan ------------------------------------------------------------------------------------------------

// Lengths below this are not split into segments: a second launch costs time too.
constexpr int64_t kShortestSplit = 8 * MAMBA_SCAN_CHECKPOINT;

// clang-format off
//                                                               lanes  states  channels  tile  warps  steps  blocks  sliced
constexpr ScanWalk kForward4 =            {ScanCall::kAny,          16,      4,        1,  128,     4,     8,      6,  false};
constexpr ScanWalk kForward4Float32 =     {ScanCall::kAny,          16,      4,        1,  128,     8,     8,      3,  false};
constexpr ScanWalk kForward8 =            {ScanCall::kAny,           4,      2,        1,   64,     4,    16,      4,  false};
constexpr ScanWalk kForward16 =           {ScanCall::kAny,           8,      2,        2,   64,     4,     8,      4,  false};
constexpr ScanWalk kForward16Forward =    {ScanCall::kForward,       8,      2,        2,   64,     4,     8,      4,  false};
constexpr ScanWalk kForward16Few =        {ScanCall::kAny,           8,      2,        1,   64,     4,    16,      4,  false};
constexpr ScanWalk kForward16FewForward = {ScanCall::kForward,       8,      2,        1,   64,     4,    16,      4,  false};
constexpr ScanWalk kForward16Mamba =      {ScanCall::kMamba,         8,      2,        2,   64,     4,     8,      4,  false};
constexpr ScanWalk kForward16Reverse =    {ScanCall::kMambaReverse,  8,      2,        2,   64,     4,     8,      4,  false};
constexpr ScanWalk kForward64Mamba =      {ScanCall::kMamba,         8,      8,        2,   32,     4,     4,      4,  false};
constexpr ScanWalk kForward128Mamba =     {ScanCall::kMamba,        16,      8,        2,   32,     8,     4,      2,  false};
constexpr ScanWalk kForwardSliced =       {ScanCall::kAny,           8,      8,        2,   32,     4,     4,      3,   true};
constexpr ScanWalk kPipeline12 =          {ScanCall::kAny,           8,      2,        1,   64,     3,     4,      1,  false};
constexpr ScanWalk kPipeline12Forward =   {ScanCall::kForward,       8,      2,        1,   64,     3,     4,      1,  false};
constexpr ScanWalk kPipeline12Of8 =       {ScanCall::kForward,       8,      1,        1,   64,     3,     8,      1,  false};
constexpr ScanWalk kPipeline12Mamba =     {ScanCall::kMamba,         8,      2,        1,   64,     3,     4,      1,  false};
constexpr ScanWalk kPipeline16Mamba =     {ScanCall::kMamba,         8,      2,        1,   32,     4,     8,      1,  false};
constexpr ScanWalk kPipeline32 =          {ScanCall::kAny,           8,      2,        1,   32,     8,     4,      1,  false};
constexpr ScanWalk kPipeline32Mamba =     {ScanCall::kMamba,         8,      2,        1,   32,     8,     4,      1,  false};
constexpr ScanWalk kPipeline40Mamba =     {ScanCall::kMamba,         8,      2,        1,   32,    10,     4,      1,  false};
// clang-format on

// Blocks of 32 channels would leave the GPU half empty, and those of 16 fill it, or the length is too short to be split.
inline bool has_few_channels(const MambaSelectiveScan& p, bool, const DeviceLimits& device) {
    const bool few = 2 * scan_blocks(p, kForward16.channels()) < 5 * device.processors;
    const bool fill = 2 * scan_blocks(p, kForward16Few.channels()) >= 3 * device.processors;
    return p.segments == 1 && p.dstate > 8 && p.dstate <= 16 && few && (fill || p.seqlen < kShortestSplit);
}

inline bool is_mamba_16(const MambaSelectiveScan& p, bool aligned, const DeviceLimits&) {
    return fills_blocks(p, aligned, kForward16Mamba);
}
inline bool is_mamba_16_reverse(const MambaSelectiveScan& p, bool aligned, const DeviceLimits&) {
    return fills_blocks(p, aligned, kForward16Reverse);
}
inline bool is_mamba_64(const MambaSelectiveScan& p, bool aligned, const DeviceLimits&) {
    return fills_blocks(p, aligned, kForward64Mamba);
}
inline bool is_mamba_128(const MambaSelectiveScan& p, bool aligned, const DeviceLimits&) {
    return fills_blocks(p, aligned, kForward128Mamba);
}
inline bool has_8_states(const MambaSelectiveScan& p, bool, const DeviceLimits&) {
    return p.dstate <= 8;
}
inline bool has_16_states(const MambaSelectiveScan& p, bool, const DeviceLimits&) {
    return p.dstate <= 16;
}
inline bool is_any_scan(const MambaSelectiveScan&, bool, const DeviceLimits&) {
    return true;
}

// Tiles that the pipelined forward scan has prepared when it scans one.
constexpr int pipeline_ahead(int element_size) {
    return element_size == 2 ? 2 : 1;
}

// The bytes of shared memory that it needs. All fit 9.0 and 10.x, all but 40 channels also 8.0, and 16 every GPU since.
constexpr int pipeline_shared(int channels, int element_size, int slice) {
    const int tile = channels == 12 ? 64 : 32, row = tile + 4, ahead = pipeline_ahead(element_size);
    const int stage = (3 * channels + 2 * slice) * tile * element_size;  // u, delta and z, B and C
    const int prepared = (2 * channels + 2 * slice) * row * 4;           // dt, dt * u, B and C
    const int sums = 8 * channels * row * 4;                             // y
    return (ahead + 3) * stage + (ahead + 1) * prepared + 2 * sums;
}

// Lengths up to this are worth the pipelined forward scan however few the channels are.
constexpr int64_t kLongestNarrow = 1024;

// Whether blocks of so many channels have a multiprocessor each. They all run for as long as one does: with fewer than two
// thirds of the multiprocessors, segments of a long length are faster.
template <int kChannels>
bool is_for_pipeline(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device) {
    const int64_t blocks = scan_blocks(p, kChannels);
    return p.segments == 1 && p.dstate <= 16 && p.variable_B && p.variable_C && p.seq_idx == nullptr &&
           p.seqlen > MAMBA_SCAN_CHECKPOINT && aligned &&
           pipeline_shared(kChannels, static_cast<int>(dtype_size(p.dtype)), 16) <= device.shared &&
           blocks <= device.processors && (p.seqlen <= kLongestNarrow || 3 * blocks >= 2 * device.processors);
}
inline bool is_for_pipeline_12_of_8_states(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device) {
    return p.dstate <= 8 && !p.reverse && is_for_pipeline<12>(p, aligned, device);
}
template <int kChannels>
bool is_mamba_for_pipeline(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device) {
    return is_for_pipeline<kChannels>(p, aligned, device) && is_mamba(p) && !p.reverse && p.dstate == 16 &&
           p.dim / p.ngroups % kChannels == 0 && p.seqlen % (kChannels == 12 ? 64 : 32) == 0;
}

// clang-format off
inline constexpr ScanKernel kScanForwardKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, walk, carry, code
    {{"dstate4", "dstate up to 4, variable B and C, no z or seq_idx; full tiles, many channels",
      "8 channels, 128 steps", k16Bit, 128, 0, 75}, has_few_states, kForward4, kForward16, ScanCode::kFewStates},
    {{"dstate4_float32", "as dstate4",
      "16 channels, 128 steps", kF32, 256, 0, 75}, has_few_states, kForward4Float32, kForward16, ScanCode::kFewStates},
    {{"pipeline_12_channels_mamba", "Mamba's call; dstate 16, dim % 12 == 0, L % 64 == 0; a block for each multiprocessor",
      "12 channels, 64 steps", k16Bit, 384, pipeline_shared(12, 2, 16), 80}, is_mamba_for_pipeline<12>, kPipeline12Mamba,
      kForward16, ScanCode::kPipeline},
    {{"pipeline_12_channels_dstate8", "forward, dstate up to 8; else as pipeline_12_channels",
      "12 channels, 64 steps", kAllDtypes, 384, pipeline_shared(12, 4, 8), 80}, is_for_pipeline_12_of_8_states, kPipeline12Of8,
      kForward16, ScanCode::kPipeline},
    {{"pipeline_12_channels_forward", "forward; else as pipeline_12_channels",
      "12 channels, 64 steps", kAllDtypes, 384, pipeline_shared(12, 4, 16), 80}, is_forward_and<is_for_pipeline<12>>,
      kPipeline12Forward, kForward16, ScanCode::kPipeline},
    {{"pipeline_12_channels", "dstate up to 16, aligned rows, variable B and C, no seq_idx; a block for each multiprocessor",
      "12 channels, 64 steps", k16Bit, 384, pipeline_shared(12, 2, 16), 80}, is_for_pipeline<12>, kPipeline12,
      kForward16, ScanCode::kPipeline},
    {{"pipeline_16_channels_mamba", "Mamba's call; dstate 16, dim % 16 == 0, L % 32 == 0; a block for each multiprocessor",
      "16 channels, 32 steps", k16Bit, 256, pipeline_shared(16, 2, 16), 80}, is_mamba_for_pipeline<16>, kPipeline16Mamba,
      kForward16, ScanCode::kPipeline},
    {{"pipeline_32_channels_mamba", "Mamba's call; dstate 16, dim % 32 == 0, L % 32 == 0; a block for each multiprocessor",
      "32 channels, 32 steps", k16Bit, 512, pipeline_shared(32, 2, 16), 80}, is_mamba_for_pipeline<32>, kPipeline32Mamba,
      kForward16, ScanCode::kPipeline},
    {{"pipeline_32_channels", "dstate up to 16, aligned rows, variable B and C, no seq_idx; a block for each multiprocessor",
      "32 channels, 32 steps", kAllDtypes, 512, pipeline_shared(32, 4, 16), 80}, is_for_pipeline<32>, kPipeline32,
      kForward16, ScanCode::kPipeline},
    {{"pipeline_40_channels_mamba", "Mamba's call; dstate 16, dim % 40 == 0, L % 32 == 0; a block for each multiprocessor",
      "40 channels, 32 steps", k16Bit, 640, pipeline_shared(40, 2, 16), 80}, is_mamba_for_pipeline<40>, kPipeline40Mamba,
      kForward16, ScanCode::kPipeline},
    {{"dstate16_few_channels_forward", "forward; else as dstate16_few_channels",
      "16 channels, 64 steps", kAllDtypes, 128, 0, 75}, is_forward_and<has_few_channels>, kForward16FewForward, kForward16},
    {{"dstate16_few_channels", "dstate 9 to 16; few channels, and a length that is not split",
      "16 channels, 64 steps", k16Bit, 128, 0, 75}, has_few_channels, kForward16Few, kForward16},
    {{"dstate16_mamba", "Mamba's call; dstate 16, dim % 32 == 0, L % 64 == 0",
      "32 channels, 64 steps", k16Bit, 128, 0, 75}, is_mamba_16, kForward16Mamba, kForward16Mamba},
    {{"dstate16_mamba_reverse", "Mamba's call in reverse; dstate 16, dim % 32 == 0, L % 64 == 0",
      "32 channels, 64 steps", k16Bit, 128, 0, 75}, is_mamba_16_reverse, kForward16Reverse, kForward16},
    {{"dstate64_mamba", "Mamba's call; dstate 64, dim % 32 == 0, L % 32 == 0",
      "32 channels, 32 steps", k16Bit, 128, 0, 75}, is_mamba_64, kForward64Mamba, kForwardSliced},
    {{"dstate128_mamba", "Mamba's call; dstate 128, dim % 32 == 0, L % 32 == 0",
      "32 channels, 32 steps", k16Bit, 256, 0, 75}, is_mamba_128, kForward128Mamba, kForwardSliced},
    {{"dstate8", "dstate up to 8",
      "32 channels, 64 steps", kAllDtypes, 128, 0, 75}, has_8_states, kForward8, kForward16},
    {{"dstate16_forward", "forward, dstate up to 16",
      "32 channels, 64 steps", k16Bit, 128, 0, 75}, is_forward_and<has_16_states>, kForward16Forward, kForward16},
    {{"dstate16", "dstate up to 16",
      "32 channels, 64 steps", kAllDtypes, 128, 0, 75}, has_16_states, kForward16, kForward16},
    {{"sliced", "",
      "32 channels, 32 steps, 64 states", kAllDtypes, 128, 32768, 75}, is_any_scan, kForwardSliced, kForwardSliced},
};
// clang-format on
extern KernelTable scan_forward_table;

// ---- the backward scan -----------------------------------------------------------------------------------------------

// clang-format off
//                                                               lanes  states  channels  tile  warps  steps  blocks  sliced
constexpr ScanWalk kBackward4 =           {ScanCall::kAny,          16,      4,        4,  128,     4,     8,      3,  false};
constexpr ScanWalk kBackward8Forward =    {ScanCall::kForward,       4,      2,        1,   64,     4,    16,      3,  false};
constexpr ScanWalk kBackward8Float32 =    {ScanCall::kAny,           4,      2,        1,   64,     4,    16,      2,  false};
constexpr ScanWalk kBackward16 =          {ScanCall::kAny,           8,      2,        2,   64,     4,     8,      3,  false};
constexpr ScanWalk kBackward16Forward =   {ScanCall::kForward,       8,      2,        2,   64,     4,     8,      3,  false};
constexpr ScanWalk kBackward16AnySize =   {ScanCall::kMambaAnySize,  8,      2,        2,   64,     4,     8,      3,  false};
constexpr ScanWalk kBackward16Few =       {ScanCall::kAny,           8,      2,        1,   64,     4,    16,      3,  false};
constexpr ScanWalk kBackward16FewForward = {ScanCall::kForward,       8,      2,        1,   64,     4,    16,      3,  false};
constexpr ScanWalk kBackward16Mamba =     {ScanCall::kMamba,         8,      2,        2,   64,     4,     8,      3,  false};
constexpr ScanWalk kBackward16Reverse =   {ScanCall::kMambaReverse,  8,      2,        2,   64,     4,     8,      3,  false};
constexpr ScanWalk kBackwardSlicedMamba = {ScanCall::kMamba,         8,      2,        2,   64,     4,     8,      2,   true};
constexpr ScanWalk kBackwardSliced =      {ScanCall::kAny,           8,      2,        2,   64,     4,     8,      2,   true};
constexpr ScanWalk kBackwardSmall =       {ScanCall::kAny,           8,      4,        1,   64,     2,     8,      4,   true};
// clang-format on

// Bytes of shared memory that a block of the rows which are not sliced needs at most, but for the one of few channels: that
// fits the smallest GPUs too (compute capability 7.5), as does the last row.
constexpr int kBackwardShared = 99072;
constexpr int kSmallestShared = 65536;
constexpr int64_t backward_sliced_shared(int64_t dstate, int64_t element_size) {
    return (element_size == 4 ? 86016 : 81664) + ceil_div(dstate, kBackwardSliced.slice()) * 2048;
}
constexpr int kBackwardSlicedShared = static_cast<int>(backward_sliced_shared(MAMBA_MAX_DSTATE, 2));

// Segments that a length can have, none shorter than `shortest` checkpoints.
inline int64_t most_segments(const MambaSelectiveScan& p, int64_t shortest) {
    return p.seqlen < kShortestSplit ? 1 : ceil_div(p.seqlen, MAMBA_SCAN_CHECKPOINT) / shortest;
}

// So many blocks that a plan asks for no segments (backward_segments).
inline bool has_few_states_backward(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device) {
    return has_few_states(p, aligned, device) && 2 * scan_blocks(p, kBackward4.channels()) > 3 * device.processors;
}
// Fewer channels a block where there would not be two for each multiprocessor. Of float32 no more than two fit one, too few for
// the segments of a length.
inline bool has_few_channels_backward(const MambaSelectiveScan& p, bool, const DeviceLimits& device) {
    const int64_t blocks = scan_blocks(p, kBackward16.channels());
    const bool few = blocks * most_segments(p, 4) < 2 * device.processors ||
                     (dtype_size(p.dtype) == 4 && 2 * blocks <= 3 * device.processors);
    return p.dstate <= 16 && (few || device.shared < kBackwardShared);
}
inline bool has_8_states_backward(const MambaSelectiveScan& p, bool, const DeviceLimits& device) {
    return p.dstate <= 8 && device.shared >= kBackwardShared;
}
inline bool has_16_states_backward(const MambaSelectiveScan& p, bool, const DeviceLimits& device) {
    return p.dstate <= 16 && device.shared >= kBackwardShared;
}
inline bool is_mamba_16_backward(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device) {
    return has_16_states_backward(p, aligned, device) && fills_blocks(p, aligned, kBackward16Mamba);
}
inline bool is_mamba_16_reverse_backward(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device) {
    return has_16_states_backward(p, aligned, device) && fills_blocks(p, aligned, kBackward16Reverse);
}
inline bool is_mamba_of_16_states_backward(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device) {
    return is_mamba(p) && !p.reverse && p.dstate > 8 && has_16_states_backward(p, aligned, device);
}
inline bool fits_sliced_backward(const MambaSelectiveScan& p, bool, const DeviceLimits& device) {
    return backward_sliced_shared(p.dstate, dtype_size(p.dtype)) <= device.shared;
}
inline bool is_mamba_sliced_backward(const MambaSelectiveScan& p, bool aligned, const DeviceLimits& device) {
    return fits_sliced_backward(p, aligned, device) && fills_blocks(p, aligned, kBackwardSlicedMamba);
}

// Channels of a block must not depend on what is aligned, which a plan does not know of gradients (see backward_slots).
// clang-format off
inline constexpr ScanKernel kScanBackwardKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, walk, carry, code
    {{"dstate4", "dstate up to 4, variable B and C, no z or seq_idx; full tiles, many channels",
      "32 channels, 128 steps", kAllDtypes, 128, kSmallestShared, 75}, has_few_states_backward, kBackward4, kBackwardSliced,
      ScanCode::kFewStates},
    {{"dstate8_forward", "forward, dstate up to 8; 99072 bytes of shared memory",
      "32 channels, 64 steps", k16Bit, 128, kBackwardShared, 75}, is_forward_and<has_8_states_backward>,
      kBackward8Forward, kBackwardSliced},
    {{"dstate8_float32", "dstate up to 8; 99072 bytes of shared memory",
      "32 channels, 64 steps", kF32, 128, kBackwardShared, 75}, has_8_states_backward, kBackward8Float32, kBackwardSliced},
    {{"dstate16_few_channels_forward", "forward; else as dstate16_few_channels",
      "16 channels, 64 steps", kAllDtypes, 128, kSmallestShared, 75}, is_forward_and<has_few_channels_backward>,
      kBackward16FewForward, kBackwardSliced},
    {{"dstate16_few_channels", "dstate up to 16; few channels, or less than 99072 bytes of shared memory",
      "16 channels, 64 steps", kAllDtypes, 128, kSmallestShared, 75}, has_few_channels_backward,
      kBackward16Few, kBackwardSliced},
    {{"dstate16_mamba", "Mamba's call; dstate 16, dim % 32 == 0, L % 64 == 0",
      "32 channels, 64 steps", k16Bit, 128, kBackwardShared, 75}, is_mamba_16_backward, kBackward16Mamba, kBackward16Mamba},
    {{"dstate16_mamba_reverse", "Mamba's call in reverse; dstate 16, dim % 32 == 0, L % 64 == 0",
      "32 channels, 64 steps", k16Bit, 128, kBackwardShared, 75}, is_mamba_16_reverse_backward,
      kBackward16Reverse, kBackwardSliced},
    {{"dstate16_mamba_any_size", "Mamba's call, dstate 9 to 16; 99072 bytes of shared memory",
      "32 channels, 64 steps", k16Bit, 128, kBackwardShared, 75}, is_mamba_of_16_states_backward,
      kBackward16AnySize, kBackwardSliced},
    {{"dstate16_forward", "forward; else as dstate16",
      "32 channels, 64 steps", kAllDtypes, 128, kBackwardShared, 75}, is_forward_and<has_16_states_backward>,
      kBackward16Forward, kBackwardSliced},
    {{"dstate16", "dstate up to 16; 99072 bytes of shared memory",
      "32 channels, 64 steps", kAllDtypes, 128, kBackwardShared, 75}, has_16_states_backward, kBackward16, kBackwardSliced},
    {{"sliced_mamba", "Mamba's call; dstate % 16 == 0, dim % 32 == 0, L % 64 == 0",
      "32 channels, 64 steps, 16 states", k16Bit, 128, kBackwardSlicedShared, 75}, is_mamba_sliced_backward,
      kBackwardSlicedMamba, kBackwardSliced},
    {{"sliced", "81664 + 128 * dstate bytes of shared memory",
      "32 channels, 64 steps, 16 states", k16Bit, 128, kBackwardSlicedShared, 75}, fits_sliced_backward, kBackwardSliced,
      kBackwardSliced},
    {{"sliced_little_memory", "",
      "8 channels, 64 steps, 32 states", kAllDtypes, 64, kSmallestShared, 75}, is_any_scan, kBackwardSmall, kBackwardSliced},
};
// clang-format on
extern KernelTable scan_backward_table;

}  // namespace mamba
