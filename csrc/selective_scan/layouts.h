// Who owns which channels, states and steps in the CUDA scan's kernels, and which layout a number of states takes.
#pragma once

#include "common/alignment.h"
#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {

template <int kLanes_, int kStates_, int kTile_, int kWarps_, int kEach_ = 1>
struct ScanLayout {
    static constexpr int kLanes = kLanes_;                    // lanes that share channels
    static constexpr int kStates = kStates_;                  // states a lane holds: lane k has states k, k + kLanes, ...
    static constexpr int kTile = kTile_;                      // time steps staged at once
    static constexpr int kWarps = kWarps_;                    // warps a block
    static constexpr int kEach = kEach_;                      // channels a lane holds, each with all of its states
    static constexpr int kThreads = 32 * kWarps;              // threads a block
    static constexpr int kSlice = kLanes * kStates;           // states handled at once; a larger dstate takes several slices
    static constexpr int kGroups = 32 / kLanes;               // groups of lanes with the same channels in a warp
    static constexpr int kWarpChannels = kGroups * kEach;     // channels a warp
    static constexpr int kChannels = kWarpChannels * kWarps;  // channels a block
    static constexpr int kRow = kTile + 4;                    // floats a row: 16-byte aligned, rows four banks apart
    static constexpr bool kPairs = true;                      // 16-bit B and C lie in pairs, see MatrixTile
    // Element-wise work on a warp's own (kWarpChannels, kTile) elements: kPasses times kVector steps of one row a lane.
    static constexpr int kVector = kTile / kLanes < 8 ? kTile / kLanes : 8;
    static constexpr int kRowLanes = kTile / kVector;
    static constexpr int kPassRows = 32 / kRowLanes;
    static constexpr int kPasses = kWarpChannels / kPassRows;
    // Staging of (kSlice, kTile) of B and of C by the whole block.
    static constexpr int kStage = kSlice * kTile / kThreads;
    static constexpr int kStageVector = kStage < 8 ? kStage : 8;
    static constexpr int kStagePasses = kStage / kStageVector;
    static_assert(kPasses * kPassRows == kWarpChannels, "the element-wise passes must cover the warp's rows");
    static_assert(kStagePasses * kStageVector * kThreads == kSlice * kTile, "staging must cover the tile");
    static_assert(kLanes >= 4, "sums over states are transposed over four lanes");
};

// A layout whose steps memory has in the order of the scan, or in the opposite one. A branch at run time would cost 5 %.
template <class Layout, bool kReverse_, bool kUsual_ = false, bool kFilled_ = false, bool kWhole_ = false>
struct Directed : Layout {
    static constexpr bool kReverse = kReverse_;
    static constexpr bool kUsual = kUsual_;    // for calls that are usual, see is_usual
    static constexpr bool kFilled = kFilled_;  // whose channels and states fill all blocks, see fills_blocks
    static constexpr bool kWhole = kWhole_;    // and their steps all tiles, see fills_tiles
};

// Whether there are kernels for usual calls, of which each makes the library larger; and those of the rarer ones, too.
template <typename T>
constexpr bool kHasUsual = sizeof(T) == 2;
template <typename T, bool kReverse>
constexpr bool kHasAllUsual = kHasUsual<T> && !kReverse;

// Whether a call has what Mamba's have: 16 bits, z, D and softplus, B and C that vary, and no sequences.
inline bool is_usual(const MambaSelectiveScan& p) {
    return dtype_size(p.dtype) == 2 && p.z != nullptr && p.D != nullptr && p.delta_softplus && p.variable_B && p.variable_C &&
           p.seq_idx == nullptr;
}

// Whether a layout has no blocks with fewer channels, nor slices with fewer states, than it has room for.
template <class Layout>
bool fills_blocks(const MambaSelectiveScan& p) {
    return p.dim / p.ngroups % Layout::kChannels == 0 && p.dstate % Layout::kSlice == 0;
}

// Whether rows are aligned (inputs_aligned), too, and all of its tiles whole.
template <class Layout>
bool fills_tiles(const MambaSelectiveScan& p, bool aligned) {
    return aligned && p.seqlen % Layout::kTile == 0 && fills_blocks<Layout>(p);
}

// ---- forward ---------------------------------------------------------------------------------------------------------

// The layouts, one for each range of dstate. Those above 64 states work through slices of 64, but for usual calls of 128.
using Forward8 = ScanLayout<4, 2, 64, 4>;
using Forward16 = ScanLayout<8, 2, 64, 4, 2>;
using Forward16Wide = ScanLayout<8, 2, 64, 4>;
using Forward16Many = ScanLayout<4, 4, 32, 4, 2>;
using Forward32 = ScanLayout<8, 4, 64, 4>;
using Forward64 = ScanLayout<8, 8, 32, 4, 2>;
using Forward64Wide = ScanLayout<8, 8, 32, 4>;
using Forward128 = ScanLayout<16, 8, 32, 8, 2>;

// How many channels a block takes, where a number of states has several layouts: those called wide take few.
enum class BlockChannels { kFew, kSome, kMany };

// Channels that one block takes. wide: with Forward16Wide or Forward64Wide.
inline int forward_channels(int64_t dstate, bool wide) {
    if (dstate <= Forward8::kSlice) {
        return Forward8::kChannels;
    }
    if (dstate <= Forward16::kSlice) {
        return wide ? Forward16Wide::kChannels : Forward16::kChannels;
    }
    if (dstate <= Forward32::kSlice) {
        return Forward32::kChannels;
    }
    static_assert(Forward128::kChannels == Forward64::kChannels, "either may run");
    return wide ? Forward64Wide::kChannels : Forward64::kChannels;
}

// Whether Forward128 can run.
inline bool takes_128_states(const MambaSelectiveScan& p, bool aligned) {
    return is_usual(p) && !p.reverse && p.dstate == Forward128::kSlice && fills_tiles<Forward128>(p, aligned);
}

// Channels that a block of forward_pipeline.cuh may take, and whether they may have so many states.
constexpr int kPipelineChannels[] = {12, 16, 32, 40};
inline bool pipeline_takes(int channels, int64_t dstate) {
    return dstate > 8 || channels == 12 || channels == 32;
}

// Tiles that the pipelined forward scan has prepared when it scans one.
constexpr int pipeline_ahead(int element_size) {
    return element_size == 2 ? 2 : 1;
}

// The bytes of shared memory that it needs then, slice: 8 or 16 states. All fit 9.0 and 10.x, all but 40 also 8.0, and 16 every
// GPU since.
constexpr int pipeline_shared(int channels, int slice, int element_size) {
    const int tile = channels == 12 ? 64 : 32, row = tile + 4, ahead = pipeline_ahead(element_size);
    const int stage = (3 * channels + 2 * slice) * tile * element_size;  // u, delta and z, B and C
    const int prepared = (2 * channels + 2 * slice) * row * 4;           // dt, dt * u, B and C
    const int sums = 8 * channels * row * 4;                             // y
    return (ahead + 3) * stage + (ahead + 1) * prepared + 2 * sums;
}

// ---- backward --------------------------------------------------------------------------------------------------------

using Backward8 = ScanLayout<4, 2, MAMBA_SCAN_CHECKPOINT, 4>;
using Backward16 = ScanLayout<8, 2, MAMBA_SCAN_CHECKPOINT, 4, 2>;
using Backward16Narrow = ScanLayout<8, 2, MAMBA_SCAN_CHECKPOINT, 4>;
using Backward32 = ScanLayout<8, 4, MAMBA_SCAN_CHECKPOINT, 4>;
using Backward32Small = ScanLayout<8, 4, MAMBA_SCAN_CHECKPOINT, 2>;

// The ways to run the backward scan. Those that are sliced take any number of states.
enum class BackwardKind { k8, k16, k16Narrow, k16Sliced, k32Sliced, k32SmallSliced };

// Channels that one block takes.
inline int backward_channels(BackwardKind kind) {
    switch (kind) {
        case BackwardKind::k8:
            return Backward8::kChannels;
        case BackwardKind::k16:
        case BackwardKind::k16Sliced:
            return Backward16::kChannels;
        case BackwardKind::k16Narrow:
            return Backward16Narrow::kChannels;
        case BackwardKind::k32Sliced:
            return Backward32::kChannels;
        default:
            return Backward32Small::kChannels;
    }
}

// Bytes of shared memory a block that each needs at most: all but k16Sliced, and the two that fit the smallest GPUs too
// (compute capability 7.5), which are k16Narrow and k32SmallSliced.
constexpr int kBackwardShared = 99072;
constexpr int kSmallestShared = 65536;
constexpr int64_t backward16_sliced_shared(int64_t dstate, int64_t element_size) {
    return (element_size == 4 ? 86016 : 81664) + ceil_div(dstate, Backward16::kSlice) * 2048;
}

}  // namespace mamba
