// The sizes that the CUDA kernels of Mamba-3's scan work with.
#pragma once

namespace mamba {

// kStates: dstate is at most that. kRows: of a chunk, its steps times the rank. They fit the 64 KiB of shared memory of compute
// capability 7.5.
template <int kStates_, int kRows_>
struct Mamba3Sizes {
    static constexpr int kStates = kStates_;
    static constexpr int kRows = kRows_;
};

// By dstate: up to 64, 128, 256.
template <typename T>
struct Mamba3Layouts {
    using Small = Mamba3Sizes<64, 64>;
    using Middle = Mamba3Sizes<128, 64>;
    using Large = Mamba3Sizes<256, 32>;
};
template <>
struct Mamba3Layouts<float> {
    using Small = Mamba3Sizes<128, 16>;
    using Middle = Small;
    using Large = Mamba3Sizes<256, 16>;
};

// The state's rows (headdim) that a forward block takes, 16 a warp.
constexpr int kMamba3StateRows = 64;

}  // namespace mamba
