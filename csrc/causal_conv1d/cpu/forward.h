// The convolution forward, and the decode-time update of a cache of inputs.
#pragma once

#include "causal_conv1d/cpu/taps.h"

namespace mamba {
namespace MAMBA_ISA {

// The newest kHistory inputs of a tile of `steps` become the history of the next.
inline void keep_history(float* x, int steps) {
    memmove(x, x + steps * kLanes, kHistoryTile * sizeof(float));
}

inline void conv_forward(const MambaCausalConv1d& p, int64_t batch, int64_t channel) {
    alignas(64) float x[kHistoryTile + kTile];
    alignas(64) float out[kTile];
    const int lanes = block_lanes(p.dim - channel);
    const Taps taps = load_taps(p.weight, p.weight_dtype, p.bias, p.bias_dtype, p.width, channel, lanes);
    const int64_t x_offset = batch * p.x_batch_stride + channel * p.x_dim_stride;
    const int64_t out_offset = batch * p.out_batch_stride + channel * p.out_dim_stride;
    load_initial(p, batch, channel, lanes, x);
    for (int64_t start = 0; start < p.seqlen; start += kSteps) {
        const int steps = tile_steps(p.seqlen - start);
        const int32_t* seq_idx = p.seq_idx != nullptr ? p.seq_idx + batch * p.seqlen + start : nullptr;
        load_tile(p.dtype, p.x, x_offset + start * p.x_len_stride, p.x_dim_stride, p.x_len_stride, lanes, steps,
                  x + kHistoryTile);
        convolve(taps, p.width, x + kHistoryTile, seq_idx, start, steps, out);
        if (p.silu) {
            apply_silu(out, steps);
        }
        store_tile(p.dtype, p.out, out_offset + start * p.out_len_stride, p.out_dim_stride, p.out_len_stride, lanes, steps,
                   out);
        keep_history(x, steps);
    }
    if (p.final_states != nullptr) {
        const int64_t offset = batch * p.final_batch_stride + channel * p.final_dim_stride;
        store_tile(p.dtype, p.final_states, offset, p.final_dim_stride, p.final_len_stride, lanes, p.width - 1,
                   x + (kHistory + 1 - p.width) * kLanes);
    }
}

// The steps of one block of channels in some tensor.
struct StepsAt {
    int32_t dtype;
    void* data;
    int64_t offset, dim_stride, len_stride;
};

// Copies `count` steps, first to last, so that steps may move down within one tensor.
inline void copy_steps(const StepsAt& from, int64_t from_step, const StepsAt& to, int64_t to_step, int64_t count, int lanes) {
    alignas(64) float tile[kTile];
    for (int64_t done = 0; done < count; done += kSteps) {
        const int steps = tile_steps(count - done);
        load_tile(from.dtype, from.data, from.offset + (from_step + done) * from.len_stride, from.dim_stride, from.len_stride,
                  lanes, steps, tile);
        store_tile(to.dtype, to.data, to.offset + (to_step + done) * to.len_stride, to.dim_stride, to.len_stride, lanes, steps,
                   tile);
    }
}

// Puts x into the state. Shifted: the state ends with the newest input. Circular: input l goes to (position + l) % length,
// and of more inputs than places only the last are kept.
inline void update_state(const MambaCausalConv1dUpdate& p, const StepsAt& x, const StepsAt& state, int64_t position,
                         int lanes) {
    const int64_t kept = p.seqlen < p.state_len ? p.seqlen : p.state_len;
    if (p.cache_seqlens == nullptr) {
        copy_steps(state, kept, state, 0, p.state_len - kept, lanes);
        copy_steps(x, p.seqlen - kept, state, p.state_len - kept, kept, lanes);
        return;
    }
    const int64_t begin = (position + p.seqlen - kept) % p.state_len;
    const int64_t before_end = kept < p.state_len - begin ? kept : p.state_len - begin;
    copy_steps(x, p.seqlen - kept, state, begin, before_end, lanes);
    copy_steps(x, p.seqlen - kept + before_end, state, 0, kept - before_end, lanes);
}

// Four steps of a block of kLanes channels, as a decode step of width 4 has them.
template <typename T>
MAMBA_INLINE void load_four_steps(const T* data, int64_t dim_stride, int64_t len_stride, Vec* steps) {
    if (dim_stride == 1) {
        for (int i = 0; i < 4; ++i) {
            steps[i] = load(data + i * len_stride);
        }
        return;
    }
    Vec evens[2], odds[2];
    split_alternate(load(data), load(data + kLanes), evens[0], odds[0]);
    split_alternate(load(data + 2 * kLanes), load(data + 3 * kLanes), evens[1], odds[1]);
    split_alternate(evens[0], evens[1], steps[0], steps[2]);
    split_alternate(odds[0], odds[1], steps[1], steps[3]);
}

template <typename T>
MAMBA_INLINE void store_four_steps(T* data, int64_t dim_stride, int64_t len_stride, const Vec* steps) {
    if (dim_stride == 1) {
        for (int i = 0; i < 4; ++i) {
            store(data + i * len_stride, steps[i]);
        }
        return;
    }
    Vec evens[2], odds[2], joined[4];
    join_alternate(steps[0], steps[2], evens[0], evens[1]);
    join_alternate(steps[1], steps[3], odds[0], odds[1]);
    join_alternate(evens[0], odds[0], joined[0], joined[1]);
    join_alternate(evens[1], odds[1], joined[2], joined[3]);
    for (int i = 0; i < 4; ++i) {
        store(data + i * kLanes, joined[i]);
    }
}

// conv_update for one step of kLanes channels with a shifted state of four, neighbours in one of its dimensions.
template <typename State, typename Weight>
inline void update_four(const MambaCausalConv1dUpdate& p, int64_t batch, int64_t row, int64_t channel) {
    State* const state = static_cast<State*>(p.conv_state) + row * p.state_row_stride + channel * p.state_dim_stride;
    Vec steps[5], taps[4];
    load_four_steps(state, p.state_dim_stride, p.state_len_stride, steps);
    load_four_steps(static_cast<const Weight*>(p.weight) + channel * 4, 4, 1, taps);
    steps[4] = load_lanes(p.dtype, p.x, batch * p.x_batch_stride + channel * p.x_dim_stride, p.x_dim_stride, kLanes);
    store_four_steps(state, p.state_dim_stride, p.state_len_stride, steps + 1);
    Vec sum = p.bias != nullptr ? load_lanes(p.bias_dtype, p.bias, channel, 1, kLanes) : zero();
    for (int lag = 0; lag < 4; ++lag) {
        sum = fma(taps[3 - lag], steps[4 - lag], sum);
    }
    const Vec out = p.silu ? sum * sigmoid(sum) : sum;
    store_lanes(p.dtype, p.out, batch * p.out_batch_stride + channel * p.out_dim_stride, p.out_dim_stride, kLanes, out);
}

// Whether update_four runs this block, which it then has.
inline bool updated_four(const MambaCausalConv1dUpdate& p, int64_t batch, int64_t row, int64_t channel) {
    const bool neighbours = p.state_dim_stride == 1 || (p.state_dim_stride == 4 && p.state_len_stride == 1);
    if (p.width != 4 || p.seqlen != 1 || p.state_len != 4 || p.cache_seqlens != nullptr || !neighbours ||
        p.dim - channel < kLanes || p.state_dtype != p.weight_dtype) {
        return false;
    }
    with_type(p.state_dtype, [&](auto type) MAMBA_INLINE_LAMBDA {
        using T = typename decltype(type)::type;
        update_four<T, T>(p, batch, row, channel);
    });
    return true;
}

inline void conv_update(const MambaCausalConv1dUpdate& p, int64_t batch, int64_t channel) {
    alignas(64) float x_tile[kHistoryTile + kTile];
    alignas(64) float out[kTile];
    const int lanes = block_lanes(p.dim - channel);
    const int64_t out_offset = batch * p.out_batch_stride + channel * p.out_dim_stride;
    const int64_t row = p.conv_state_indices != nullptr ? p.conv_state_indices[batch] : batch;
    if (row < 0) {
        fill_zero(out, kTile);
        for (int64_t start = 0; start < p.seqlen; start += kSteps) {
            store_tile(p.dtype, p.out, out_offset + start * p.out_len_stride, p.out_dim_stride, p.out_len_stride, lanes,
                       tile_steps(p.seqlen - start), out);
        }
        return;
    }
    if (updated_four(p, batch, row, channel)) {
        return;
    }
    const Taps taps = load_taps(p.weight, p.weight_dtype, p.bias, p.bias_dtype, p.width, channel, lanes);
    const StepsAt x = {p.dtype, const_cast<void*>(p.x), batch * p.x_batch_stride + channel * p.x_dim_stride, p.x_dim_stride,
                       p.x_len_stride};
    const StepsAt state = {p.state_dtype, p.conv_state, row * p.state_row_stride + channel * p.state_dim_stride,
                           p.state_dim_stride, p.state_len_stride};
    int64_t position = p.cache_seqlens != nullptr ? p.cache_seqlens[batch] % p.state_len : 0;
    position += position < 0 ? p.state_len : 0;
    fill_zero(x_tile, kHistoryTile);
    for (int lag = 1; lag < p.width; ++lag) {
        const int64_t place = (position - lag + p.state_len) % p.state_len;
        const Vec old = load_lanes(state.dtype, state.data, state.offset + place * state.len_stride, state.dim_stride, lanes);
        store(x_tile + (kHistory - lag) * kLanes, old);
    }
    update_state(p, x, state, position, lanes);
    for (int64_t start = 0; start < p.seqlen; start += kSteps) {
        const int steps = tile_steps(p.seqlen - start);
        load_tile(p.dtype, p.x, x.offset + start * p.x_len_stride, p.x_dim_stride, p.x_len_stride, lanes, steps,
                  x_tile + kHistoryTile);
        convolve(taps, p.width, x_tile + kHistoryTile, nullptr, start, steps, out);
        if (p.silu) {
            apply_silu(out, steps);
        }
        store_tile(p.dtype, p.out, out_offset + start * p.out_len_stride, p.out_dim_stride, p.out_len_stride, lanes, steps,
                   out);
        keep_history(x_tile, steps);
    }
}

}  // namespace MAMBA_ISA
}  // namespace mamba
