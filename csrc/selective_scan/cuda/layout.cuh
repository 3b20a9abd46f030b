// Who owns which channels, states and steps in the CUDA scan's kernels.
#pragma once

#include <cuda_runtime.h>

#include "selective_scan/kernels.h"

namespace mamba {

// kCall, kSteps, kBlocks and kSliced: see ScanWalk.
template <ScanCall kCall_, int kLanes_, int kStates_, int kEach_, int kTile_, int kWarps_, int kSteps_, int kBlocks_,
          bool kSliced_>
struct ScanLayout {
    static constexpr ScanCall kCall = kCall_;
    static constexpr bool kWhole = kCall == ScanCall::kMamba || kCall == ScanCall::kMambaReverse;  // fills all blocks and tiles
    static constexpr bool kMamba = kWhole || kCall == ScanCall::kMambaAnySize;
    static constexpr int kLanes = kLanes_;    // lanes that share channels
    static constexpr int kStates = kStates_;  // states a lane holds: lane k has states k, k + kLanes, ...
    static constexpr int kTile = kTile_;      // time steps staged at once
    static constexpr int kWarps = kWarps_;    // warps a block
    static constexpr int kEach = kEach_;      // channels a lane holds, each with all of its states
    static constexpr int kSteps = kSteps_;
    static constexpr int kBlocks = kBlocks_;
    static constexpr bool kSliced = kSliced_;
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

// A row's walk, and its carry's, as types; and the layout of such a type.
template <const auto& kRows, int kRow>
struct Walk {
    static constexpr ScanWalk kWalk = kRows[kRow].walk;
};
template <const auto& kRows, int kRow>
struct CarryWalk {
    static constexpr ScanWalk kWalk = kRows[kRow].carry;
};
template <class Of>
using LayoutOf = ScanLayout<Of::kWalk.call, Of::kWalk.lanes, Of::kWalk.states, Of::kWalk.channels_per_lane, Of::kWalk.tile,
                            Of::kWalk.warps, Of::kWalk.steps, Of::kWalk.blocks, Of::kWalk.sliced>;

// function(0), function(1), ..., function(kCount - 1), without a loop.
template <int kCount, class Function>
__device__ __forceinline__ void unroll(const Function& function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        function(i);
    }
}

// Where a lane's chain waits in shared memory between slices, and how many bytes all of a block's chains take.
template <class Layout>
__device__ __forceinline__ float& waiting_place(float* waiting, int slice, int c, int s) {
    return waiting[((slice * Layout::kEach + c) * Layout::kStates + s) * Layout::kThreads + threadIdx.x];
}
template <class Layout>
constexpr int64_t waiting_bytes(int64_t dstate) {
    return Layout::kSliced ? ceil_div(dstate, Layout::kSlice) * Layout::kEach * Layout::kStates * Layout::kThreads * 4 : 0;
}

}  // namespace mamba
