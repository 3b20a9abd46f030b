// What forward and backward share about a chunk of steps: where it lies, its tiles, its decays.
#pragma once

#include <math.h>

#include "common/cpu_rows.h"
#include "ssd/cpu/kernels.h"

namespace mamba {
namespace MAMBA_ISA {

constexpr int kChunk = static_cast<int>(kSsdChunk);
constexpr float kLog2e = 1.44269504f;

// One batch entry: steps [begin, begin + length) of a row of the tensors.
struct Sequence {
    int64_t row, begin, length;
};

inline Sequence sequence_of(const MambaSsd& p, int64_t batch) {
    Sequence sequence = {batch, 0, p.seqlen};
    if (p.cu_seqlens != nullptr) {
        sequence.row = 0;
        sequence.begin = p.cu_seqlens[batch];
        sequence.length = p.cu_seqlens[batch + 1] - sequence.begin;
    }
    return sequence;
}

// Steps [begin, end) of a chunk that share a state: seq_idx does not change between them.
struct ChunkRun {
    int begin, end;
};

struct Chunk {
    int64_t row, start;  // in the tensors
    int steps, count;    // count: of runs
    bool restarts;       // the first run begins with a state of zero, whatever came before
    ChunkRun runs[kChunk];

    const ChunkRun& first() const { return runs[0]; }
    const ChunkRun& last() const { return runs[count - 1]; }
};

inline void find_chunk(const MambaSsd& p, const Sequence& sequence, int64_t index, Chunk& chunk) {
    const int64_t done = index * kChunk, left = sequence.length - done;
    chunk.row = sequence.row;
    chunk.start = sequence.begin + done;
    chunk.steps = left < kChunk ? static_cast<int>(left) : kChunk;
    chunk.count = 1;
    chunk.restarts = false;
    chunk.runs[0].begin = 0;
    if (p.seq_idx != nullptr) {
        const int32_t* seq_idx = p.seq_idx + chunk.row * p.seqlen + chunk.start;
        chunk.restarts = done > 0 && seq_idx[0] != seq_idx[-1];
        for (int step = 1; step < chunk.steps; ++step) {
            if (seq_idx[step] != seq_idx[step - 1]) {
                chunk.runs[chunk.count - 1].end = step;
                chunk.runs[chunk.count++].begin = step;
            }
        }
    }
    chunk.runs[chunk.count - 1].end = chunk.steps;
}

inline int64_t x_offset(const MambaSsd& p, const Chunk& chunk, int64_t head) {
    return chunk.row * p.x_batch_stride + chunk.start * p.x_len_stride + head * p.x_head_stride;
}
inline int64_t B_offset(const MambaSsd& p, const Chunk& chunk, int64_t group) {
    return chunk.row * p.B_batch_stride + chunk.start * p.B_len_stride + group * p.B_group_stride;
}
inline int64_t C_offset(const MambaSsd& p, const Chunk& chunk, int64_t group) {
    return chunk.row * p.C_batch_stride + chunk.start * p.C_len_stride + group * p.C_group_stride;
}

// The same steps as columns: tile[column of memory][step], kChunk floats a row.
inline void load_columns(int32_t dtype, const void* data, int64_t offset, int64_t len_stride, int64_t columns, int steps,
                         float* tile) {
    for (int step = 0; step < steps; step += kLanes) {
        load_tile(dtype, data, offset + step * len_stride, len_stride, 1, block_lanes(steps - step), static_cast<int>(columns),
                  tile + step, kChunk);
    }
}

// What one head does in a chunk. Exponents are sums of dt A log2(e) from the chunk's first step on, each as a float and the
// rest that it loses: their differences between near steps must be exact where the sums have grown large.
struct Decays {
    alignas(64) float dt[kChunk];
    alignas(64) float slope[kChunk];  // d dt / d the value in memory
    alignas(64) float high[kChunk];
    alignas(64) float low[kChunk];
    alignas(64) float entering[kChunk];  // decay of the state that enters the chunk, up to and with this step
    alignas(64) float leaving[kChunk];   // decay of this step's input, up to the chunk's end
    float carried;                       // decay over the whole chunk
    float A;
};

// An element of a parameter of any dtype.
inline float load_one(int32_t dtype, const void* data, int64_t index) {
    alignas(64) float values[kLanes];
    store(values, load_lanes(dtype, data, index, 1, 1));
    return *values;
}

inline float head_A(const MambaSsd& p, int64_t head) {
    const float A = load_one(p.A_dtype, p.A, head);
    return p.A_is_log != 0 ? static_cast<float>(-::exp(static_cast<double>(A))) : A;
}

inline void find_decays(const MambaSsd& p, const Chunk& chunk, int64_t head, Decays& decays) {
    const float bias = p.dt_bias != nullptr ? load_one(p.dt_bias_dtype, p.dt_bias, head) : 0.0f;
    const Vec low = set1(p.dt_min), high = set1(p.dt_max);
    const int64_t offset = chunk.row * p.dt_batch_stride + chunk.start * p.dt_len_stride + head * p.dt_head_stride;
    for (int step = 0; step < chunk.steps; step += kLanes) {
        Vec slope = set1(1.0f);
        Vec dt =
            load_lanes(p.dt_dtype, p.dt, offset + step * p.dt_len_stride, p.dt_len_stride, block_lanes(chunk.steps - step));
        dt = dt + set1(bias);
        if (p.dt_softplus) {
            dt = softplus(dt, slope);
        }
        slope = select_greater(low, dt, zero(), select_greater(dt, high, zero(), slope));
        store(decays.dt + step, minimum(high, maximum(low, dt)));
        store(decays.slope + step, slope);
    }
    decays.A = head_A(p, head);
    const double rate = static_cast<double>(decays.A) * 1.4426950408889634;
    double sum = 0.0;
    for (int step = 0; step < chunk.steps; ++step) {
        sum += decays.dt[step] * rate;
        decays.high[step] = static_cast<float>(sum);
        decays.low[step] = static_cast<float>(sum - static_cast<double>(decays.high[step]));
    }
    for (int step = chunk.steps; step < kChunk; ++step) {
        decays.dt[step] = 0.0f;
        decays.high[step] = decays.high[chunk.steps - 1];
        decays.low[step] = decays.low[chunk.steps - 1];
    }
    const Vec last_high = set1(decays.high[chunk.steps - 1]), last_low = set1(decays.low[chunk.steps - 1]);
    for (int step = 0; step < chunk.steps; step += kLanes) {
        const Vec step_high = load(decays.high + step), step_low = load(decays.low + step);
        store(decays.entering + step, exp2(step_high + step_low));
        store(decays.leaving + step, exp2((last_high - step_high) + (last_low - step_low)));
    }
    decays.carried = decays.entering[chunk.steps - 1];
}

// Decay of the inputs of the kLanes steps from `from` on, up to step `to`; of no meaning behind it.
MAMBA_INLINE Vec decay_between(const Decays& decays, int from, int to) {
    const Vec high = set1(decays.high[to]) - load(decays.high + from);
    const Vec low = set1(decays.low[to]) - load(decays.low + from);
    return exp2(high + low);
}

}  // namespace MAMBA_ISA
}  // namespace mamba
