// What the backward kernel is made of: its tiles, how its warps share an output, and the products of a warp.
#pragma once

#include "ssd/cuda/states.cuh"
#include "ssd/launch.h"

namespace mamba {

// Every second item (a head, or a part of its headdim) two warps compute the decays of two of them, others than the warp that
// finishes the item before. Its decays stay, so there is room for four.
constexpr int kDecaysWarp = 2;
constexpr int kDecaysTogether = 2;
constexpr int kDecaysKept = 4;

// How a block's warps share an output of kRows x kColumns: 16 rows each, and a part of the columns.
template <class Layout, int kColumns>
struct WarpTile {
    static constexpr int kAbove = Layout::kSteps / 16 < Layout::kWarps ? Layout::kSteps / 16 : Layout::kWarps;
    static constexpr int kBeside = Layout::kWarps / kAbove;
    static constexpr int kWide = kColumns / 16 < kBeside ? 1 : kColumns / 16 / kBeside;  // pairs of fragments
    static_assert(kAbove * 16 == Layout::kSteps, "every step has a warp");
    static_assert(kColumns / 16 <= kBeside || kColumns / 16 % kBeside == 0, "columns divide among the warps");
};

// What the gradient of a step's dt is made of, see store_step_gradients.
struct StepSums {
    float own;     // f_tt + sum_{t' > t} f_t't + what the state after the chunk has of x_t B_t^T
    float out_of;  // sum_{s < t} dt_s f_ts + what y_t has of the state before the chunk
    float column;  // sum_{t' > t} f_t't
    float into;    // what the state after the chunk has of x_t B_t^T
};

template <class Layout>
struct BackwardSums {
    static constexpr int kBeside = WarpTile<Layout, Layout::kSteps>::kBeside;
    static constexpr int kAbove = WarpTile<Layout, Layout::kSteps>::kAbove;
    float row_pairs[kBeside][Layout::kSteps];    // sum_{s < t} dt_s f_ts, f_ts = L_ts G_ts (dout_t . x_s), by warp column
    float column_pairs[kAbove][Layout::kSteps];  // sum_{t > s} f_ts, by warp row
    float own_pair[Layout::kSteps];              // f_tt
    float from_state[kBeside][Layout::kSteps];   // dout_t . exp(cs_t) H C_t
    float to_state[kBeside][Layout::kSteps];     // x_s . exp(cs_last - cs_s) dH' B_s
    float state_product[Layout::kWarps];         // H . dH'
    static constexpr int kParts = Layout::kThreads / Layout::kRows;
    float skip[kParts][Layout::kRows];  // sum over a part of the steps of dout_t x_t

    __device__ __forceinline__ StepSums at(int t) const {
        using Pairs = WarpTile<Layout, Layout::kSteps>;
        using Wide = WarpTile<Layout, Layout::kStates>;
        StepSums sums = {};
#pragma unroll
        for (int w = 0; w < kAbove; ++w) {
            sums.column += column_pairs[w][t];
        }
#pragma unroll
        for (int w = 0; w < kBeside; ++w) {
            if (16 * Pairs::kWide * w < Layout::kSteps) {
                sums.out_of += row_pairs[w][t];
            }
            if (16 * Wide::kWide * w < Layout::kStates) {
                sums.out_of += from_state[w][t];
                sums.into += to_state[w][t];
            }
        }
        sums.own = own_pair[t] + sums.column + sums.into;
        return sums;
    }
    __device__ __forceinline__ float state_products() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < Layout::kWarps; ++i) {
            sum += state_product[i];
        }
        return sum;
    }
};

// The tiles of one item: x, dout, and the state before the chunk, in whose place the gradient after the chunk comes. Or, where
// shared memory allows, ahead: the gradient has a tile of its own, and there are two sets, so that the next item's are on their
// way.
template <class Layout>
struct ItemSizes {
    static constexpr int kX = Layout::kSteps * (Layout::kRows + kTilePad);
    static constexpr int kH = Layout::kRows * (Layout::kStates + kTilePad);
    static constexpr int kElements = 2 * kX + kH;
    static constexpr int kElementsAhead = 2 * (kX + kH);
};
template <class Layout>
__host__ __device__ constexpr int item_elements(bool ahead) {
    return ahead ? 2 * ItemSizes<Layout>::kElementsAhead : ItemSizes<Layout>::kElements;
}

// Sum over the four lanes of a row.
__device__ __forceinline__ float add_over_row(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Sum over the eight rows of a column.
__device__ __forceinline__ float add_over_column(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 4);
    value += __shfl_xor_sync(0xffffffffu, value, 8);
    return value + __shfl_xor_sync(0xffffffffu, value, 16);
}

// The sums of the lanes after this one, and of those before it.
__device__ __forceinline__ void sum_over_other_lanes(float& after, float& before, int lane) {
    const float own_after = after, own_before = before;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const float later = __shfl_down_sync(0xffffffffu, after, distance);
        const float earlier = __shfl_up_sync(0xffffffffu, before, distance);
        after += lane + distance < 32 ? later : 0.0f;
        before += lane >= distance ? earlier : 0.0f;
    }
    after -= own_after;
    before -= own_before;
}

// sum (16 x 16 kWide) += A (16 x 16 kInner) B. In memory A is [row][k] (kATransposed: [k][row]), B [k][column] (kBTransposed:
// [column][k]).
template <typename T, int kWide, int kInner, bool kATransposed, bool kBTransposed>
__device__ __forceinline__ void multiply(float (&sum)[2 * kWide][4], const T* A, int A_stride, const T* B, int B_stride,
                                         int lane) {
#pragma unroll
    for (int k = 0; k < kInner; ++k) {
        Operand<T> a;
        if (kATransposed) {
            load_a_transposed<T>(a, A + 16 * k * A_stride, A_stride, lane);
        } else {
            load_a<T>(a, A + 16 * k, A_stride, lane);
        }
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
            Operand<T> b;
            if (kBTransposed) {
                load_b<T>(b, B + 16 * j * B_stride + 16 * k, B_stride, lane);
            } else {
                load_b_transposed<T>(b, B + 16 * k * B_stride + 16 * j, B_stride, lane);
            }
            multiply_add<T>(sum[2 * j], a, b, 0);
            multiply_add<T>(sum[2 * j + 1], a, b, 1);
        }
    }
}

// sum += factor(row) add, and returns for both of the lane's rows the dot product of add with the tile's row.
template <typename T, int kWide>
__device__ __forceinline__ float2 accumulate(float (&sum)[2 * kWide][4], const float (&add)[2 * kWide][4], float above,
                                             float below, const T* tile, int stride, int lane) {
    float2 dot = make_float2(0.0f, 0.0f);
    const T* const at = tile + lane / 4 * stride + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 2 * kWide; ++j) {
        const float2 top = load_pair<T>(at + 8 * j);
        const float2 bottom = load_pair<T>(at + 8 * stride + 8 * j);
        dot.x = fmaf(add[j][0], top.x, fmaf(add[j][1], top.y, dot.x));
        dot.y = fmaf(add[j][2], bottom.x, fmaf(add[j][3], bottom.y, dot.y));
        sum[j][0] = fmaf(above, add[j][0], sum[j][0]);
        sum[j][1] = fmaf(above, add[j][1], sum[j][1]);
        sum[j][2] = fmaf(below, add[j][2], sum[j][2]);
        sum[j][3] = fmaf(below, add[j][3], sum[j][3]);
    }
    return make_float2(add_over_row(dot.x), add_over_row(dot.y));
}

// Adds a warp's 16 rows to float32 memory, or sets it.
template <int kWide>
__device__ __forceinline__ void store_sum(float* to, int64_t row_stride, const float (&sum)[2 * kWide][4], int rows,
                                          int columns, bool add, int lane) {
#pragma unroll
    for (int j = 0; j < 2 * kWide; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8;
            const int column = 8 * j + lane % 4 * 2 + i % 2;
            if (row < rows && column < columns) {
                float* const at = to + row * row_stride + column;
                *at = add ? *at + sum[j][i] : sum[j][i];
            }
        }
    }
}

// sum + the dot product of up to 16 bytes of global memory with as many of shared memory, which is aligned.
template <typename T>
__device__ __forceinline__ float dot_16(const T* global, const T* tile, int count, bool vectors, float sum) {
    constexpr int kVector = 16 / sizeof(T);
    if (vectors) {
        const uint4 bits = *reinterpret_cast<const uint4*>(global);
        const T* const values = reinterpret_cast<const T*>(&bits);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            sum = fmaf(to_float(values[i]), to_float(tile[i]), sum);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            if (i < count) {
                sum = fmaf(to_float(global[i]), to_float(tile[i]), sum);
            }
        }
    }
    return sum;
}

// A chunk's gradients: of dt before bias, softplus and clamping at each step, and the chunk's part of A's and the bias's. One
// warp computes them.
template <int kSteps, class Sums>
__device__ __forceinline__ void store_step_gradients(float* ddt, float* dA, float* ddt_bias, const Sums& sums,
                                                     const BackwardDecays<kSteps>& decays, float A, int valid, int lane) {
    constexpr int kEach = kSteps < 32 ? 1 : kSteps / 32;
    const bool active = lane * kEach < kSteps;
    const float carried = decays.carry * sums.state_products();
    float after[kEach];  // what paths that end at step t carry past it, less those that begin there
    float before[kEach];
    float own[kEach];
    float after_sum = 0.0f;
    float before_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int t = lane * kEach + i;
        after[i] = before[i] = own[i] = 0.0f;
        if (active) {
            const StepSums step = sums.at(t);
            own[i] = step.own;
            after[i] = step.out_of - decays.dt[t] * step.column;
            before[i] = decays.dt[t] * step.into;
        }
        after_sum += after[i];
        before_sum += before[i];
    }
    sum_over_other_lanes(after_sum, before_sum, lane);
    float dA_sum = 0.0f;
    float bias_sum = 0.0f;
    float values[kEach];
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
        after_sum += after[i];
        values[i] = after_sum;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int t = lane * kEach + i;
        const float da = values[i] + before_sum + carried;  // gradient of dt_t A
        before_sum += before[i];
        if (active && t < valid) {
            dA_sum = fmaf(decays.dt[t], da, dA_sum);
            const float gradient = fmaf(A, da, own[i]) * decays.gradient[t];
            bias_sum += gradient;
            ddt[t] = gradient;
        }
    }
    dA_sum = add_over_column(add_over_row(dA_sum));
    bias_sum = add_over_column(add_over_row(bias_sum));
    if (lane == 0) {
        *dA = dA_sum;
        *ddt_bias = bias_sum;
    }
}

}  // namespace mamba
