// The convolution backward: tiles from last to first, so that the gradients of later outputs, which reach back W-1 inputs, are
// at hand.
#pragma once

#include "causal_conv1d/cpu/taps.h"

namespace mamba {
namespace MAMBA_ISA {

struct WeightSums {
    Vec tap[kHistory + 1];
    Vec bias;
};

struct ConvBackwardTiles {
    alignas(64) float x[kHistoryTile + kTile];
    alignas(64) float grad[kTile + kHistoryTile];  // gradient of the sum before the activation, and of the W-1 steps after
    alignas(64) float work[kTile];                 // that sum, later dx
};

// grad is dout: multiplies it by silu'(sum).
inline void apply_silu_slope(const float* sum, int steps, float* grad) {
    const Vec one = set1(1.0f);
    for (int i = 0; i < steps * kLanes; i += kLanes) {
        const Vec value = load(sum + i), s = sigmoid(value);
        store(grad + i, load(grad + i) * s * fma(value, one - s, one));
    }
}

// dx of a tile from the gradients of its steps and the W-1 after them, and the tile's part of the weights' gradients. seq_idx
// as in convolve; `after` counts the steps of the sequence from the tile's first on.
template <int kWidth, bool kSequences>
MAMBA_INLINE void convolve_back(const Taps& taps, const float* x, const float* grad, const int32_t* seq_idx, int64_t first_step,
                                int64_t after, int steps, float* dx, WeightSums& sums) {
    WeightSums s;  // a tile's sums, added to the totals in one go: long sums lose less so
    for (int lag = 0; lag < kWidth; ++lag) {
        s.tap[lag] = zero();
    }
    s.bias = zero();
    for (int step = 0; step < steps; ++step) {
        if (kSequences && seq_idx[step] < 0) {  // padding
            store(dx + step * kLanes, zero());
            continue;
        }
        const Vec grad_step = load(grad + step * kLanes);
        Vec dx_step = zero();
        for (int lag = 0; lag < kWidth; ++lag) {
            if (!kSequences || (step + lag < after && seq_idx[step + lag] == seq_idx[step])) {
                dx_step = fma(taps.tap[lag], load(grad + (step + lag) * kLanes), dx_step);
            }
            if (!kSequences || sequence_before(seq_idx, first_step, step, lag) == seq_idx[step]) {
                s.tap[lag] = fma(grad_step, load(x + (step - lag) * kLanes), s.tap[lag]);
            }
        }
        s.bias = s.bias + grad_step;
        store(dx + step * kLanes, dx_step);
    }
    for (int lag = 0; lag < kWidth; ++lag) {
        sums.tap[lag] = sums.tap[lag] + s.tap[lag];
    }
    sums.bias = sums.bias + s.bias;
}

template <int kWidth>
inline void convolve_back_width(const Taps& taps, const float* x, const float* grad, const int32_t* seq_idx, int64_t first_step,
                                int64_t after, int steps, float* dx, WeightSums& sums) {
    if (seq_idx != nullptr) {
        convolve_back<kWidth, true>(taps, x, grad, seq_idx, first_step, after, steps, dx, sums);
    } else {
        convolve_back<kWidth, false>(taps, x, grad, seq_idx, first_step, after, steps, dx, sums);
    }
}

// final_states holds inputs L-(W-1) .. L-1: adds its gradient to those of `steps` inputs from `start` on (negative: before
// the sequence).
inline void add_dfinal(const MambaCausalConv1dBackward& q, int64_t batch, int64_t channel, int lanes, int64_t start, int steps,
                       float* dx) {
    const MambaCausalConv1d& p = q.forward;
    const int64_t history = p.width - 1, first = p.seqlen - history;
    for (int step = 0; step < steps && q.dfinal_states != nullptr; ++step) {
        const int64_t index = start + step - first;
        if (index >= 0 && index < history) {
            const int64_t offset = (batch * p.dim + channel) * history + index;
            store(dx + step * kLanes, load(dx + step * kLanes) + load_lanes(p.dtype, q.dfinal_states, offset, history, lanes));
        }
    }
}

// grad begins at step 0.
inline void store_dinitial(const MambaCausalConv1dBackward& q, const Taps& taps, const float* grad, int64_t batch,
                           int64_t channel, int lanes) {
    const MambaCausalConv1d& p = q.forward;
    const int history = p.width - 1;
    const int32_t* const seq_idx = p.seq_idx != nullptr ? p.seq_idx + batch * p.seqlen : nullptr;
    const auto sees_initial = [&](int step) {
        return seq_idx == nullptr || (step < p.seqlen && seq_idx[step] >= 0 && seq_idx[step] == seq_idx[0]);
    };
    alignas(64) float rows[kHistoryTile];
    for (int back = 1; back <= history; ++back) {  // the input `back` steps before step 0
        Vec sum = zero();
        for (int lag = back; lag <= history; ++lag) {
            if (sees_initial(lag - back)) {
                sum = fma(taps.tap[lag], load(grad + (lag - back) * kLanes), sum);
            }
        }
        store(rows + (history - back) * kLanes, sum);
    }
    add_dfinal(q, batch, channel, lanes, -history, history, rows);
    store_tile(p.dtype, q.dinitial_states, (batch * p.dim + channel) * history, history, 1, lanes, history, rows);
}

inline void conv_backward_rows(const MambaCausalConv1dBackward& q, const Taps& taps, int64_t batch, int64_t channel, int lanes,
                               WeightSums& sums) {
    const MambaCausalConv1d& p = q.forward;
    const int64_t x_offset = batch * p.x_batch_stride + channel * p.x_dim_stride;
    const int64_t dout_offset = batch * q.dout_batch_stride + channel * q.dout_dim_stride;
    const int64_t dx_offset = batch * q.dx_batch_stride + channel * q.dx_dim_stride;
    ConvBackwardTiles t;
    float* x = t.x + kHistoryTile;
    fill_zero(t.grad, kHistoryTile);  // what follows the last tile
    for (int64_t start = (p.seqlen - 1) / kSteps * kSteps; start >= 0 && p.seqlen > 0; start -= kSteps) {
        const int steps = tile_steps(p.seqlen - start);
        const int32_t* seq_idx = p.seq_idx != nullptr ? p.seq_idx + batch * p.seqlen + start : nullptr;
        memmove(t.grad + steps * kLanes, t.grad, kHistoryTile * sizeof(float));
        load_tile(p.dtype, q.dout, dout_offset + start * q.dout_len_stride, q.dout_dim_stride, q.dout_len_stride, lanes, steps,
                  t.grad);
        if (start > 0) {
            load_tile(p.dtype, p.x, x_offset + (start - kHistory) * p.x_len_stride, p.x_dim_stride, p.x_len_stride, lanes,
                      kHistory, t.x);
        } else {
            load_initial(p, batch, channel, lanes, t.x);
        }
        load_tile(p.dtype, p.x, x_offset + start * p.x_len_stride, p.x_dim_stride, p.x_len_stride, lanes, steps, x);
        if (p.silu) {
            convolve(taps, p.width, x, seq_idx, start, steps, t.work);
            apply_silu_slope(t.work, steps, t.grad);
        }
        const int64_t after = p.seqlen - start;
        if (p.width == 2) {
            convolve_back_width<2>(taps, x, t.grad, seq_idx, start, after, steps, t.work, sums);
        } else if (p.width == 3) {
            convolve_back_width<3>(taps, x, t.grad, seq_idx, start, after, steps, t.work, sums);
        } else {
            convolve_back_width<4>(taps, x, t.grad, seq_idx, start, after, steps, t.work, sums);
        }
        add_dfinal(q, batch, channel, lanes, start, steps, t.work);
        if (q.add) {  // t.x has been used
            load_tile(p.dtype, q.dx, dx_offset + start * q.dx_len_stride, q.dx_dim_stride, q.dx_len_stride, lanes, steps, x);
            for (int i = 0; i < steps * kLanes; i += kLanes) {
                store(t.work + i, load(t.work + i) + load(x + i));
            }
        }
        store_tile(p.dtype, q.dx, dx_offset + start * q.dx_len_stride, q.dx_dim_stride, q.dx_len_stride, lanes, steps, t.work);
    }
    if (q.dinitial_states != nullptr) {
        store_dinitial(q, taps, t.grad, batch, channel, lanes);
    }
}

inline void conv_backward(const ConvBackward& q, int64_t slot, int64_t batch_begin, int64_t batch_end, int64_t channel) {
    const MambaCausalConv1d& p = q.forward;
    const int lanes = block_lanes(p.dim - channel);
    const Taps taps = load_taps(p.weight, p.weight_dtype, p.bias, p.bias_dtype, p.width, channel, lanes);
    WeightSums sums;
    for (int lag = 0; lag <= kHistory; ++lag) {
        sums.tap[lag] = zero();
    }
    sums.bias = zero();
    for (int64_t batch = batch_begin; batch < batch_end; ++batch) {
        conv_backward_rows(q, taps, batch, channel, lanes, sums);
    }
    const int64_t row = slot * p.dim + channel;
    for (int lag = 0; lag < p.width; ++lag) {
        const int64_t index = row * p.width + p.width - 1 - lag;
        store_lanes(q.weight_sums_dtype, q.weight_sums, index, p.width, lanes, sums.tap[lag]);
    }
    if (q.bias_sums != nullptr) {
        store_lanes(q.bias_sums_dtype, q.bias_sums, row, 1, lanes, sums.bias);
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
