// The sizes that the CUDA kernels of Mamba-2's scan work with.
#pragma once

namespace mamba {

// kStates: dstate is at most that. kSteps: of a chunk. kRows: of headdim that one backward block takes (forward: 64).
// kWarps: of a backward block. The sizes fit the 64 KiB of shared memory of compute capability 7.5, but those of Ssd64 and
// Ssd128 in backward.
template <int kStates_, int kSteps_, int kRows_, int kWarps_>
struct SsdLayout {
    static constexpr int kStates = kStates_;
    static constexpr int kSteps = kSteps_;
    static constexpr int kRows = kRows_;
    static constexpr int kWarps = kWarps_;
    static constexpr int kThreads = 32 * kWarps_;
};
using Ssd64 = SsdLayout<64, 64, 64, 8>;
using Ssd128 = SsdLayout<128, 64, 64, 8>;
using Ssd128Small = SsdLayout<128, 32, 64, 4>;  // both of these where shared memory is little
using Ssd256 = SsdLayout<256, 32, 32, 4>;
using SsdWide256 = SsdLayout<256, 64, 64, 8>;  // of products.cuh for forward_warpgroup.cuh
using SsdFloat64 = SsdLayout<64, 32, 32, 4>;
using SsdFloat128 = SsdLayout<128, 16, 32, 4>;
using SsdFloat256 = SsdLayout<256, 16, 16, 4>;

// By dstate: up to 64, 128, 256. Little: up to 128, in backward where shared memory is little.
template <typename T>
struct SsdLayouts {
    using Small = Ssd64;
    using Middle = Ssd128;
    using Large = Ssd256;
    using Little = Ssd128Small;
};
template <>
struct SsdLayouts<float> {
    using Small = SsdFloat64;
    using Middle = SsdFloat128;
    using Large = SsdFloat256;
    using Little = SsdFloat128;
};

// The state's rows (headdim) that a block of the forward kernels takes, 16 a warp.
constexpr int kForwardRows = 64;

// Of a chunk, for the warpgroup kernels.
constexpr int kWarpgroupSteps = 64;

}  // namespace mamba
