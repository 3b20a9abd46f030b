// The sizes that the CUDA kernels of Mamba-3's backward scan work with.
#pragma once

#include "mamba3/check.h"

namespace mamba {

// kStates: dstate is at most that. kRows: of a chunk, steps times rank. kInner: of headdim that a block takes.
template <int kStates_, int kRows_, int kInner_>
struct Mamba3BackwardTiles {
    static constexpr int kStates = kStates_;
    static constexpr int kRows = kRows_;
    static constexpr int kInner = kInner_;
    static constexpr int kSteps = kRows_;  // for WarpTile, whose rows these are
    static constexpr int kWarps = 8;
    static constexpr int kThreads = 32 * kWarps;
    static_assert(kRows >= kMamba3MostCudaRank, "a chunk has a step");
};

// By dstate: up to 64, 128, 256. The first three are for 220 KiB of shared memory a block (9.0 and 10.x); Little and Least, up
// to 128 and 256, for all others: they fit 64 KiB, but Least for float32.
template <typename T>
struct Mamba3BackwardLayouts {
    using Small = Mamba3BackwardTiles<64, 64, 64>;
    using Middle = Mamba3BackwardTiles<128, 64, 64>;
    using Large = Mamba3BackwardTiles<256, 32, 32>;
    using Little = Mamba3BackwardTiles<128, 16, 16>;
    using Least = Mamba3BackwardTiles<256, 16, 16>;
};
template <>
struct Mamba3BackwardLayouts<float> {
    using Small = Mamba3BackwardTiles<64, 64, 32>;
    using Middle = Mamba3BackwardTiles<128, 32, 32>;
    using Large = Mamba3BackwardTiles<256, 16, 32>;
    using Little = Mamba3BackwardTiles<128, 16, 16>;
    using Least = Mamba3BackwardTiles<256, 16, 16>;
};

}  // namespace mamba
