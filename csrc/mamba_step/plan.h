// How CUDA runs a Mamba layer's decode step: the slices that the sums of x_proj are cut into, and the workspace.
#pragma once

#include "common/integers.h"
#include "mamba_kernels.h"

namespace mamba {

constexpr int kTileChannels = 64;        // of d_inner, that a block of the first kernel takes at a time
constexpr int kTileBatch = 16;           // entries of the batch in one
constexpr int64_t kProjectBlocks = 128;  // of them that keep a GPU busy

// Tiles of channels that a block walks: one, unless the batch alone makes blocks enough. What the second kernel reads grows
// with the number of slices.
inline int64_t slice_tiles(const MambaMambaStep& p) {
    const int64_t slices = ceil_div(kProjectBlocks, ceil_div(p.batch, static_cast<int64_t>(kTileBatch)));
    return ceil_div(ceil_div(p.dim, static_cast<int64_t>(kTileChannels)), slices);
}

inline int64_t step_slices(const MambaMambaStep& p) {
    return ceil_div(p.dim, kTileChannels * slice_tiles(p));
}

// x_proj's outputs.
MAMBA_HOST_DEVICE inline int64_t step_outputs(const MambaMambaStep& p) {
    return p.dt_rank + 2 * p.dstate;
}

// The sums of a slice and batch entry are whole vectors of four.
MAMBA_HOST_DEVICE inline int64_t step_pitch(const MambaMambaStep& p) {
    return round_up(step_outputs(p), 4);
}

// The slices' parts of x_proj's sums (B, slices, pitch), then x behind the convolution (B, D), as floats.
inline int64_t step_workspace_bytes(const MambaMambaStep& p) {
    return p.batch * (step_slices(p) * step_pitch(p) + p.dim) * static_cast<int64_t>(sizeof(float));
}

}  // namespace mamba
