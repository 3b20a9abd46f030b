// The sizes that the CUDA kernels of Mamba-2's scan work with.
#pragma once

namespace mamba {

// Of a backward block without warpgroups. kStates: dstate is at most that. kSteps: of a chunk. kRows: of headdim.
template <int kStates_, int kSteps_, int kRows_, int kWarps_>
struct SsdLayout {
    static constexpr int kStates = kStates_;
    static constexpr int kSteps = kSteps_;
    static constexpr int kRows = kRows_;
    static constexpr int kWarps = kWarps_;
    static constexpr int kThreads = 32 * kWarps_;
};

// The state's rows (headdim) that a block of the forward kernels takes, 16 a warp.
constexpr int kForwardRows = 64;

// Of a chunk, for the warpgroup kernels.
constexpr int kWarpgroupSteps = 64;

}  // namespace mamba
