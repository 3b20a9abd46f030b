// The sizes that the CUDA kernels of Mamba-2's scan work with.
#pragma once

namespace mamba {

// kStates: dstate is at most that. kSteps: of a chunk. kRows: of headdim that one backward block takes (forward: 64).
// kWarps: of a backward block.
template <int kStates_, int kSteps_, int kRows_, int kWarps_>
struct SsdLayout {
    static constexpr int kStates = kStates_;
    static constexpr int kSteps = kSteps_;
    static constexpr int kRows = kRows_;
    static constexpr int kWarps = kWarps_;
    static constexpr int kThreads = 32 * kWarps_;
};

// Of the kernels without warpgroups, by dstate: up to 128 and 256. All fit the 64 KiB of shared memory of compute capability
// 7.5, but backward of 16 bits with up to 128 states.
template <typename T>
struct SsdLayouts {
    using Middle = SsdLayout<128, 64, 64, 8>;
    using Large = SsdLayout<256, 32, 32, 4>;
};
template <>
struct SsdLayouts<float> {
    using Middle = SsdLayout<128, 16, 32, 4>;
    using Large = SsdLayout<256, 16, 16, 4>;
};

// The state's rows (headdim) that a block of the forward kernels takes, 16 a warp.
constexpr int kForwardRows = 64;

// Of a chunk, for the warpgroup kernels.
constexpr int kWarpgroupSteps = 64;

}  // namespace mamba
