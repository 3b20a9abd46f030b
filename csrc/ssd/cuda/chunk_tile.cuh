// What the kernels of Mamba-2's scan share: layouts, tiles in shared memory, decays of a chunk, stores of accumulators.
//
// Time goes in chunks of kSteps. Within a chunk, with a_t = dt_t A and cs_t = a_0 + ... + a_t,
//     y_t = exp(cs_t) H C_t + sum_{s <= t} (C_t . B_s) exp(cs_t - cs_s) dt_s x_s      (H: the state before the chunk)
//     H' = exp(cs_last) H + sum_s exp(cs_last - cs_s) dt_s x_s B_s^T                  (the state after it)
// (Mamba-2, arXiv 2405.21060, section 6). Where seq_idx changes, a state restarts: a run of steps sees itself only.
#pragma once

#include "ssd/cuda/tensor_core.cuh"
#include "ssd/layouts.h"

namespace mamba {

constexpr int kForwardThreads = 128;
// Every so many chunks as many warps of a block compute the decays of one of the next ones each.
constexpr int kDecayChunks = 4;

// Steps of a chunk that exist.
template <int kSteps>
__device__ __forceinline__ int steps_in(int64_t seqlen, int64_t chunk) {
    const int64_t left = seqlen - chunk * kSteps;
    return static_cast<int>(left < kSteps ? left : kSteps);
}

// ---- tiles ---------------------------------------------------------------------------------------------------------

// Starts to copy `rows` x `columns` elements into a tile of kRows x kColumns, the rest of which becomes zero.
// vectors: every row lies at a multiple of 16 bytes, and so do columns.
template <typename T, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void load_tile(T* tile, const T* from, int64_t row_stride, int rows, int columns, bool vectors) {
    using Tile = PaddedTile<kColumns>;
    if (vectors) {
        constexpr int kVector = 16 / sizeof(T);
        constexpr int kRowVectors = kColumns / kVector;
        static_assert(kThreads % kRowVectors == 0, "a thread's column stays the same");
        constexpr int kTogether = kThreads / kRowVectors;  // rows
        const int column = threadIdx.x % kRowVectors * kVector;
        int row = threadIdx.x / kRowVectors;
        const T* at = from + row * row_stride + column;
        T* to = tile + Tile::at(row, column);
        rows = column < columns ? rows : 0;
#pragma unroll
        for (int i = 0; i < kRows; i += kTogether) {
            if (kRows % kTogether == 0 || row < kRows) {
                cp_async<16>(to, row < rows ? at : from, row < rows);
            }
            row += kTogether;
            at += kTogether * row_stride;
            to += kTogether * Tile::kPitch;
        }
    } else {
        for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
            const int row = i / kColumns;
            const int column = i % kColumns;
            const bool valid = row < rows && column < columns;
            tile[Tile::at(row, column)] = valid ? from[row * row_stride + column] : from_float<T>(0.0f);
        }
    }
}

// ---- decays --------------------------------------------------------------------------------------------------------

template <int kSteps>
struct alignas(16) ChunkDecays {
    float log2_decay[kSteps];  // cs_t in base 2, and what it lacks: with strong decay the sum is large, but near steps differ
    float log2_rest[kSteps];   // by little
    float dt[kSteps];
    float entering[kSteps];  // exp(cs_t): what the state before the chunk counts at step t; 0 after a restart
    float adding[kSteps];    // exp(cs_last - cs_t) dt: what x_t B_t^T counts in the state after the chunk; 0 before a restart
    int run_start[kSteps];   // first step of t's run in this chunk, -1 for a run that began before it
    float carry;             // exp(cs_last), 0 with a restart
    float A;
};

template <int kSteps>
struct alignas(16) BackwardDecays : ChunkDecays<kSteps> {
    float leaving[kSteps];   // exp(cs_last - cs_t); 0 before a restart
    float gradient[kSteps];  // d dt / d (dt before bias, softplus and clamping)
};

// A lane's neighbouring steps of an array, in one store.
template <typename Value, int kEach>
struct alignas(sizeof(Value) * kEach) LaneSteps {
    Value at[kEach];
};
template <typename Value, int kEach>
__device__ __forceinline__ void store_steps(Value* array, int lane, const LaneSteps<Value, kEach>& values) {
    reinterpret_cast<LaneSteps<Value, kEach>*>(array)[lane] = values;
}

template <int kSteps, int kEach>
__device__ __forceinline__ void store_gradients(ChunkDecays<kSteps>&, int, const LaneSteps<float, kEach>&,
                                                const LaneSteps<float, kEach>&) {}
template <int kSteps, int kEach>
__device__ __forceinline__ void store_gradients(BackwardDecays<kSteps>& decays, int lane,
                                                const LaneSteps<float, kEach>& leaving,
                                                const LaneSteps<float, kEach>& gradient) {
    store_steps(decays.leaving, lane, leaving);
    store_steps(decays.gradient, lane, gradient);
}

// A head's A; expf, not exp2_fast: it is multiplied by the sum of a chunk's steps.
__device__ __forceinline__ float head_A(const MambaSsd& p, int64_t head) {
    const float A = load_as_float(p.A, head, p.A_dtype);
    return p.A_is_log != 0 ? -expf(A) : A;
}

// What a step's dt is made of.
struct StepSize {
    const void* dt;  // at the first step of the row, for this head
    int64_t stride;
    int32_t dtype;
    bool softplus;
    float bias, min, max;
};

// float_from_bits with its branches in the order that takes the fewest instructions here.
__device__ __forceinline__ float dt_from_bits(uint32_t bits, int32_t dtype) {
    if (dtype == MAMBA_FLOAT16) {
        return unpack2<__half>(bits).x;
    }
    return __uint_as_float(dtype == MAMBA_FLOAT32 ? bits : bits << 16);
}

// A lane's share of a chunk's steps, as they are in memory: loaded well before they are needed.
template <int kSteps>
struct StepInputs {
    static constexpr int kEach = kSteps < 32 ? 1 : kSteps / 32;
    uint32_t dt[kEach];  // bits: a conversion would wait for the load
    bool exists[kEach];
    int32_t sequence[kEach];  // seq_idx here and one step earlier
    int32_t before[kEach];
};

// first: the chunk's first step, of which `valid` exist. seq_idx: of the row, or NULL.
template <int kSteps>
__device__ __forceinline__ void load_steps(StepInputs<kSteps>& inputs, const StepSize& size, const int32_t* seq_idx,
                                           int64_t first, int valid, int lane) {
#pragma unroll
    for (int i = 0; i < StepInputs<kSteps>::kEach; ++i) {
        const int step = lane * StepInputs<kSteps>::kEach + i;
        inputs.exists[i] = step < valid;
        inputs.dt[i] = 0;
        inputs.sequence[i] = inputs.before[i] = 0;
        if (step < valid) {
            inputs.dt[i] = load_bits(size.dt, (first + step) * size.stride, size.dtype);
            if (seq_idx != nullptr && first + step > 0) {
                inputs.sequence[i] = seq_idx[first + step];
                inputs.before[i] = seq_idx[first + step - 1];
            }
        }
    }
}

// What a step's decay is at least, in base 2: 2^-128 is zero in float32 (exp2_fast). So cs_t in base 2 stays above -8192 over
// 64 steps, and differences of float32 values are exact to 2^-11: what 16-bit factors show nothing of.
constexpr double kLeastDecay = -128.0;

// One warp computes the decays of a chunk. A: of the head.
template <int kSteps, class Decays>
__device__ __forceinline__ void chunk_decays(Decays& decays, const StepInputs<kSteps>& inputs, const StepSize& size, float A,
                                             int lane) {
    constexpr int kEach = StepInputs<kSteps>::kEach;
    const bool active = lane * kEach < kSteps;
    float dt[kEach];
    LaneSteps<float, kEach> gradient;
    double sum[kEach];
    int run[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const float raw = dt_from_bits(inputs.dt[i], size.dtype) + size.bias;
        const float value = size.softplus ? softplus(raw) : raw;
        const bool clamped = value < size.min || value > size.max;
        dt[i] = clamped ? (value < size.min ? size.min : size.max) : value;  // NaN stays
        dt[i] = inputs.exists[i] ? dt[i] : 0.0f;
        gradient.at[i] = clamped ? 0.0f : size.softplus ? sigmoid(raw) : 1.0f;
        run[i] = inputs.sequence[i] != inputs.before[i] ? lane * kEach + i : -1;
        const double step = static_cast<double>(dt[i]) * A * static_cast<double>(kLog2e);
        sum[i] = (step < kLeastDecay && size.min >= 0.0f ? kLeastDecay : step) + (i > 0 ? sum[i > 0 ? i - 1 : 0] : 0.0);
        run[i] = i > 0 && run[i > 0 ? i - 1 : 0] > run[i] ? run[i > 0 ? i - 1 : 0] : run[i];
    }
    double before = sum[kEach - 1];
    int started = run[kEach - 1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, before, distance);
        const int other_run = __shfl_up_sync(0xffffffffu, started, distance);
        if (lane >= distance) {
            before += other;
            started = other_run > started ? other_run : started;
        }
    }
    const double last = __shfl_sync(0xffffffffu, before, 31);  // steps that do not exist decay nothing
    const int last_run = __shfl_sync(0xffffffffu, started, 31);
    before -= sum[kEach - 1];
    started = __shfl_up_sync(0xffffffffu, started, 1);
    started = lane == 0 ? -1 : started;
    LaneSteps<float, kEach> rounded, rest, size_of_step, entering, adding, leaving;
    LaneSteps<int, kEach> start;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const double cs = before + sum[i];
        rounded.at[i] = static_cast<float>(cs);
        rest.at[i] = static_cast<float>(cs - rounded.at[i]);
        size_of_step.at[i] = dt[i];
        start.at[i] = run[i] > started ? run[i] : started;
        entering.at[i] = start.at[i] < 0 ? exp2_fast(rounded.at[i]) : 0.0f;
        leaving.at[i] = lane * kEach + i >= last_run ? exp2_fast(static_cast<float>(last - cs)) : 0.0f;
        adding.at[i] = leaving.at[i] * dt[i];
    }
    if (active) {
        store_steps(decays.log2_decay, lane, rounded);
        store_steps(decays.log2_rest, lane, rest);
        store_steps(decays.dt, lane, size_of_step);
        store_steps(decays.entering, lane, entering);
        store_steps(decays.adding, lane, adding);
        store_steps(decays.run_start, lane, start);
        store_gradients<kSteps>(decays, lane, leaving, gradient);
    }
    if (lane == 0) {
        decays.carry = last_run < 0 ? exp2_fast(static_cast<float>(last)) : 0.0f;
        decays.A = A;
    }
}

// ---- accumulators to and from memory -------------------------------------------------------------------------------

template <int kFragments>
__device__ __forceinline__ void set_to_zero(float (&sum)[kFragments][4]) {
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
        sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.0f;
    }
}

// Stores columns 0..15 of one row, of which each lane holds two in `left` (2t, 2t + 1) and two in `right` (8 + 2t, ...).
// row: NULL for a row that does not exist. vectors: row lies at a multiple of 8 bytes (float32: 8), columns is even (16 bit:
// a multiple of 4). The four lanes of a row must come here together.
template <typename T>
__device__ __forceinline__ void store_row(T* row, int columns, bool vectors, const float2& left, const float2& right,
                                          int lane) {
    const uint32_t first = pack2<T>(left.x, left.y);
    const uint32_t second = pack2<T>(right.x, right.y);
    const int t = lane % 4;
    const int source = lane / 4 * 4 + t % 2 * 2;
    const uint32_t a = __shfl_sync(0xffffffffu, first, source);
    const uint32_t b = __shfl_sync(0xffffffffu, first, source + 1);
    const uint32_t c = __shfl_sync(0xffffffffu, second, source);
    const uint32_t d = __shfl_sync(0xffffffffu, second, source + 1);
    const uint2 quad = t < 2 ? make_uint2(a, b) : make_uint2(c, d);  // columns 4t..4t+3
    if (row == nullptr) {
        return;
    }
    if (vectors) {
        if (4 * t < columns) {
            *reinterpret_cast<uint2*>(row + 4 * t) = quad;
        }
        return;
    }
    const float2 low = unpack2<T>(quad.x);
    const float2 high = unpack2<T>(quad.y);
    const float values[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (4 * t + i < columns) {
            row[4 * t + i] = from_float<T>(values[i]);
        }
    }
}
template <>
__device__ __forceinline__ void store_row<float>(float* row, int columns, bool vectors, const float2& left, const float2& right,
                                                 int lane) {
    if (row == nullptr) {
        return;
    }
    const float2 pairs[2] = {left, right};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int column = half * 8 + lane % 4 * 2;
        if (vectors) {
            if (column < columns) {
                *reinterpret_cast<float2*>(row + column) = pairs[half];
            }
        } else {
            if (column < columns) {
                row[column] = pairs[half].x;
            }
            if (column + 1 < columns) {
                row[column + 1] = pairs[half].y;
            }
        }
    }
}

// Two neighbouring elements of a tile as float32.
template <typename T>
__device__ __forceinline__ float2 load_pair(const T* pair) {
    return unpack2<T>(*reinterpret_cast<const uint32_t*>(pair));
}
template <>
__device__ __forceinline__ float2 load_pair<float>(const float* pair) {
    return *reinterpret_cast<const float2*>(pair);
}

// The opposite.
template <typename T>
__device__ __forceinline__ void store_pair(T* pair, float low, float high) {
    *reinterpret_cast<uint32_t*>(pair) = pack2<T>(low, high);
}
template <>
__device__ __forceinline__ void store_pair<float>(float* pair, float low, float high) {
    *reinterpret_cast<float2*>(pair) = make_float2(low, high);
}

// The row of a tile of those on and below the diagonal of kRows x kRows tiles, which are counted row by row.
template <int kRows>
__device__ __forceinline__ int row_of_triangle(int tile) {
    int i = 0;
#pragma unroll
    for (int row = 1; row < kRows; ++row) {
        i += tile >= row * (row + 1) / 2 ? 1 : 0;
    }
    return i;
}

// Which element of a row of the state an accumulator's column holds.
struct SameElement {
    __device__ __forceinline__ int operator()(int column) const { return column; }
};

// A warp's 16 x kColumns elements of a float32 state (P, N), from (row, column) on, as accumulators: columns 8 j + 2 t, ... of
// rows g and g + 8 in state[j].
template <int kColumns, class Element = SameElement>
__device__ __forceinline__ void load_state(float (&state)[kColumns / 8][4], const float* from, int row, int rows, int column,
                                           int dstate, int lane, const Element& element = Element()) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int p = row + lane / 4 + i / 2 * 8;
            const int n = column + 8 * j + lane % 4 * 2 + i % 2;
            state[j][i] = p < rows && n < dstate ? from[p * dstate + element(n)] : 0.0f;
        }
    }
}

// The same, or zeros where there is no state.
template <int kColumns>
__device__ __forceinline__ void start_state(float (&state)[kColumns / 8][4], const float* from, int row, int rows, int column,
                                            int dstate, int lane) {
    if (from != nullptr) {
        load_state<kColumns>(state, from, row, rows, column, dstate, lane);
        return;
    }
    set_to_zero(state);
}

template <int kColumns, class Element = SameElement>
__device__ __forceinline__ void store_state(float* to, const float (&state)[kColumns / 8][4], int row, int rows, int column,
                                            int dstate, int lane, const Element& element = Element()) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int p = row + lane / 4 + i / 2 * 8;
            const int n = column + 8 * j + lane % 4 * 2 + i % 2;
            if (p < rows && n < dstate) {
                to[p * dstate + element(n)] = state[j][i];
            }
        }
    }
}

// The same of a warpgroup's tile, in the order in which its threads hold it: a warp's accesses are whole lines. What they write
// is for load_accumulators alone.
template <int kColumns>
__device__ __forceinline__ void store_accumulators(float* tile, const float (&state)[kColumns / 8][4], int thread) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
        reinterpret_cast<float4*>(tile)[j * kForwardThreads + thread] =
            make_float4(state[j][0], state[j][1], state[j][2], state[j][3]);
    }
}
template <int kColumns>
__device__ __forceinline__ void load_accumulators(float (&state)[kColumns / 8][4], const float* tile, int thread) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
        const float4 four = reinterpret_cast<const float4*>(tile)[j * kForwardThreads + thread];
        state[j][0] = four.x;
        state[j][1] = four.y;
        state[j][2] = four.z;
        state[j][3] = four.w;
    }
}

// The products take whole tiles: a branch around each would keep the compiler from overlapping them.

// H = carry H + X^T diag(weight) B over the steps of a chunk, for 16 rows of H and kColumns states. x_tile and B_tile point at
// the first of them.
template <typename T, int kColumns, int kStates, int kSteps>
__device__ __forceinline__ void update_state(float (&state)[kColumns / 8][4], const T* x_tile, const T* B_tile,
                                             const float* weight, float carry, int lane) {
    constexpr int kXStride = kForwardRows + kTilePad;
    constexpr int kBStride = kStates + kTilePad;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            state[j][i] *= carry;
        }
    }
#pragma unroll
    for (int k = 0; k < kSteps / 16; ++k) {
        Operand<T> a;
        load_a_weighted<T>(a, x_tile + 16 * k * kXStride, kXStride, weight + 16 * k, lane);
#pragma unroll
        for (int j = 0; j < kColumns / 16; ++j) {
            Operand<T> b;
            load_b_transposed<T>(b, B_tile + 16 * k * kBStride + 16 * j, kBStride, lane);
            multiply_add<T>(state[2 * j], a, b, 0);
            multiply_add<T>(state[2 * j + 1], a, b, 1);
        }
    }
}

}  // namespace mamba
