// What the three convolution kernels share: the taps of a block of channels, and tiles of inputs with the W-1 before them.
// Vector lanes are channels, whatever the memory layout: tiles are transposed on load where time is the contiguous dimension.
#pragma once

#include "causal_conv1d/cpu/kernels.h"
#include "common/cpu_tile.h"

namespace mamba {
namespace MAMBA_ISA {

constexpr int kSteps = 128;  // time steps of a tile: long enough pieces of a row for the hardware to foresee the next
constexpr int kHistory = 3;  // the most inputs that an output looks back, W-1 for W = 4
constexpr int kTile = kSteps * kLanes;
constexpr int kHistoryTile = kHistory * kLanes;

// tap[lag] multiplies the input `lag` steps back; lags beyond the width are zero and never used.
struct Taps {
    Vec tap[kHistory + 1];
    Vec bias;
};

inline Taps load_taps(const void* weight, int32_t weight_dtype, const void* bias, int32_t bias_dtype, int width,
                      int64_t channel, int lanes) {
    Taps taps;
    for (int lag = 0; lag <= kHistory; ++lag) {
        taps.tap[lag] =
            lag < width ? load_lanes(weight_dtype, weight, channel * width + width - 1 - lag, width, lanes) : zero();
    }
    taps.bias = bias != nullptr ? load_lanes(bias_dtype, bias, channel, 1, lanes) : zero();
    return taps;
}

// The sequence of the input `lag` steps before `step`, both counted from a tile whose first step is the row's first_step.
// Inputs before the row's first step belong to its sequence.
inline int32_t sequence_before(const int32_t* seq_idx, int64_t first_step, int step, int lag) {
    return seq_idx[first_step + step >= lag ? step - lag : -first_step];
}

// out[step] = bias + sum of taps, before the activation. x points at the tile's first input; earlier inputs lie before it.
// With seq_idx (at the tile's first step; first_step counts the steps before it) taps of another sequence are left out, not
// multiplied by zero: a NaN there must not reach this sequence. Padding, whose seq_idx is negative, gets 0.
template <int kWidth, bool kSequences>
MAMBA_INLINE void convolve_steps(const Taps& taps, const float* x, const int32_t* seq_idx, int64_t first_step, int steps,
                                 float* out) {
    for (int step = 0; step < steps; ++step) {
        const bool padding = kSequences && seq_idx[step] < 0;
        Vec sum = padding ? zero() : taps.bias;
        for (int lag = 0; lag < kWidth && !padding; ++lag) {
            if (!kSequences || sequence_before(seq_idx, first_step, step, lag) == seq_idx[step]) {
                sum = fma(taps.tap[lag], load(x + (step - lag) * kLanes), sum);
            }
        }
        store(out + step * kLanes, sum);
    }
}

template <int kWidth>
inline void convolve_width(const Taps& taps, const float* x, const int32_t* seq_idx, int64_t first_step, int steps,
                           float* out) {
    if (seq_idx != nullptr) {
        convolve_steps<kWidth, true>(taps, x, seq_idx, first_step, steps, out);
    } else {
        convolve_steps<kWidth, false>(taps, x, seq_idx, first_step, steps, out);
    }
}

inline void convolve(const Taps& taps, int width, const float* x, const int32_t* seq_idx, int64_t first_step, int steps,
                     float* out) {
    if (width == 2) {
        convolve_width<2>(taps, x, seq_idx, first_step, steps, out);
    } else if (width == 3) {
        convolve_width<3>(taps, x, seq_idx, first_step, steps, out);
    } else {
        convolve_width<4>(taps, x, seq_idx, first_step, steps, out);
    }
}

inline void apply_silu(float* tile, int steps) {
    for (int i = 0; i < steps * kLanes; i += kLanes) {
        const Vec value = load(tile + i);
        store(tile + i, value * sigmoid(value));
    }
}

// The inputs before step 0: zero, but for the W-1 of initial_states. history holds kHistory rows, the newest last.
inline void load_initial(const MambaCausalConv1d& p, int64_t batch, int64_t channel, int lanes, float* history) {
    fill_zero(history, kHistoryTile);
    if (p.initial_states != nullptr) {
        const int64_t offset = batch * p.initial_batch_stride + channel * p.initial_dim_stride;
        load_tile(p.dtype, p.initial_states, offset, p.initial_dim_stride, p.initial_len_stride, lanes, p.width - 1,
                  history + (kHistory + 1 - p.width) * kLanes);
    }
}

inline int tile_steps(int64_t left) {
    return left < kSteps ? static_cast<int>(left) : kSteps;
}

}  // namespace MAMBA_ISA
}  // namespace mamba
