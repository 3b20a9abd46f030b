// One tile of the CUDA backward scan: its shared memory, the passes over a sub-tile and the sums over channels.
#pragma once

#include "selective_scan/cuda/tile.cuh"

namespace mamba {

// Steps whose sums over states and channels are taken together.
constexpr int kSumSteps = 8;

// Shared memory of one block. Rows are Layout::kRow long, those of the sums over channels kSumRow.
template <typename T, class Layout, int kSub_>
struct BackwardShared {
    static constexpr int kSub = kSub_;
    static constexpr int kSubs = Layout::kTile / kSub;
    static constexpr int kSumRow = kSub + 4;
    static constexpr int kSums = Layout::kWarps * Layout::kSlice * kSumRow;
    MatrixTile<T, Layout> BC;
    float dt[Layout::kChannels * Layout::kRow];
    float x[Layout::kChannels * Layout::kRow];                      // dt * u
    float dy[Layout::kChannels * Layout::kRow];                     // dout * silu(z)
    float y[Layout::kChannels * Layout::kRow];                      // sum_n C h
    float Bg[Layout::kChannels * Layout::kRow];                     // sum_n B g
    float Aq[Layout::kChannels * Layout::kRow];                     // sum_n A a h g, A times log2(e)
    float h_sub[(kSubs - 1) * Layout::kStates * Layout::kThreads];  // states before each sub-tile but the first
    // Each warp's sums over its channels, twice: while all warps add up one sub-tile's, they fill the next one's.
    float dB[2 * kSums];
    float dC[2 * kSums];
    int resets[Layout::kTile];
};

template <class Layout>
struct BackwardThread {
    float A[Layout::kStates];  // times log2(e)
    float w[Layout::kStates];  // a_{t+1} g_{t+1}
    float dA[Layout::kStates];
    float constant_B[Layout::kStates];  // where B, C do not vary over time
    float constant_C[Layout::kStates];
    float constant_dB[Layout::kStates];
    float constant_dC[Layout::kStates];
};

// Runs the states forward through one sub-tile. kGeneral as in forward_tile.
template <class Layout, class Shared, bool kGeneral>
__device__ __forceinline__ void advance_sub_tile(const BackwardThread<Layout>& thread, float (&h)[Layout::kStates],
                                                 const Shared& shared, int own, int matrix_row, int first, bool variable_B) {
#pragma unroll
    for (int step = 0; step < Shared::kSub; step += 4) {
        const Steps4 dt = read4(shared.dt + own + first + step);
        const Steps4 x = read4(shared.x + own + first + step);
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            Steps4 B = shared.BC.read_B(matrix_row + first + step + s * Layout::kLanes * Layout::kRow);
            if (kGeneral) {
                B = variable_B ? B : same4(thread.constant_B[s]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (kGeneral) {
                    h[s] = shared.resets[first + step + j] ? 0.0f : h[s];
                }
                h[s] = fmaf(exp2_fast(dt.at[j] * thread.A[s]), h[s], x.at[j] * B.at[j]);
            }
        }
    }
}

// Sums kSumSteps terms of dB or dC over the warp's channels into a row; where the matrix is constant, over time instead.
template <class Layout>
__device__ __forceinline__ void add_terms(float* row, float& constant, float (&terms)[kSumSteps], int lane, bool variable) {
    if (variable) {
        sum_to_row<kSumSteps, Layout::kWarpChannels, Layout::kLanes>(row, terms, lane, false);
    } else {
#pragma unroll
        for (int t = 0; t < kSumSteps; ++t) {
            constant += terms[t];
        }
    }
}

// One sub-tile, forward then backward. kGeneral as in forward_tile. own is the thread's row in the channel tiles, matrix_row
// that of its first state in B and C, sum_row that in the sums over channels. As in forward_tile, stores to shared memory come
// after the loads that they would hold back.
template <class Layout, class Shared, bool kGeneral>
__device__ __forceinline__ void backward_sub_tile(BackwardThread<Layout>& thread, const float (&h_start)[Layout::kStates],
                                                  Shared& shared, int own, int matrix_row, int sum_row, int first,
                                                  bool variable_B, bool variable_C, bool need_y, bool add) {
    constexpr int kSub = Shared::kSub;
    constexpr int kStates = Layout::kStates;
    const int lane = threadIdx.x % 32;
    const int* resets = shared.resets + first;
    float h[kStates][kSub];
    float a[kStates][kSub];

#pragma unroll
    for (int part = 0; part < kSub; part += kSumSteps) {
        float y[kSumSteps];
        float terms[kStates][kSumSteps];
#pragma unroll
        for (int step = part; step < part + kSumSteps; step += 4) {
            const Steps4 dt = read4(shared.dt + own + first + step);
            const Steps4 x = read4(shared.x + own + first + step);
            const Steps4 dy = read4(shared.dy + own + first + step);
#pragma unroll
            for (int s = 0; s < kStates; ++s) {
                Steps4 B, C;
                shared.BC.read(matrix_row + first + step + s * Layout::kLanes * Layout::kRow, B, C);
                if (kGeneral) {
                    B = variable_B ? B : same4(thread.constant_B[s]);
                    C = variable_C ? C : same4(thread.constant_C[s]);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int t = step + j;
                    float before = t == 0 ? h_start[s] : h[s][t == 0 ? 0 : t - 1];
                    if (kGeneral) {
                        before = resets[t] ? 0.0f : before;
                    }
                    a[s][t] = exp2_fast(dt.at[j] * thread.A[s]);
                    h[s][t] = fmaf(a[s][t], before, x.at[j] * B.at[j]);
                    y[t - part] = s == 0 ? C.at[j] * h[s][t] : fmaf(C.at[j], h[s][t], y[t - part]);
                    terms[s][t - part] = dy.at[j] * h[s][t];
                }
            }
        }
        if (need_y) {
            sum_to_row<kSumSteps, Layout::kLanes, 1>(shared.y + own + first + part, y, lane, add);
        }
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
            add_terms<Layout>(shared.dC + sum_row + part + s * Layout::kLanes * Shared::kSumRow, thread.constant_dC[s],
                              terms[s], lane, !kGeneral || variable_C);
        }
    }

#pragma unroll
    for (int part = kSub - kSumSteps; part >= 0; part -= kSumSteps) {
        float Bg[kSumSteps];
        float Aq[kSumSteps];
        float terms[kStates][kSumSteps];
#pragma unroll
        for (int step = part + kSumSteps - 4; step >= part; step -= 4) {
            const Steps4 dt = read4(shared.dt + own + first + step);
            const Steps4 x = read4(shared.x + own + first + step);
            const Steps4 dy = read4(shared.dy + own + first + step);
#pragma unroll
            for (int s = 0; s < kStates; ++s) {
                Steps4 B, C;
                shared.BC.read(matrix_row + first + step + s * Layout::kLanes * Layout::kRow, B, C);
                if (kGeneral) {
                    B = variable_B ? B : same4(thread.constant_B[s]);
                    C = variable_C ? C : same4(thread.constant_C[s]);
                }
#pragma unroll
                for (int j = 3; j >= 0; --j) {
                    const int t = step + j;
                    const float before = t == 0 ? h_start[s] : h[s][t == 0 ? 0 : t - 1];
                    const float g = fmaf(C.at[j], dy.at[j], thread.w[s]);
                    float w = a[s][t] * g;
                    float q = w * before;
                    if (kGeneral) {
                        w = resets[t] ? 0.0f : w;
                        q = resets[t] ? 0.0f : q;
                    }
                    thread.w[s] = w;
                    thread.dA[s] = fmaf(dt.at[j], q, thread.dA[s]);
                    Bg[t - part] = s == 0 ? B.at[j] * g : fmaf(B.at[j], g, Bg[t - part]);
                    Aq[t - part] = s == 0 ? thread.A[s] * q : fmaf(thread.A[s], q, Aq[t - part]);
                    terms[s][t - part] = x.at[j] * g;
                }
            }
        }
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
            add_terms<Layout>(shared.dB + sum_row + part + s * Layout::kLanes * Shared::kSumRow, thread.constant_dB[s],
                              terms[s], lane, !kGeneral || variable_B);
        }
        sum_to_row<kSumSteps, Layout::kLanes, 1>(shared.Bg + own + first + part, Bg, lane, add);
        sum_to_row<kSumSteps, Layout::kLanes, 1>(shared.Aq + own + first + part, Aq, lane, add);
    }
}

// Adds up the warps' sums of one sub-tile. Each thread has the same (state, step) every time: prepared once.
template <class Layout, class Shared>
struct SumFlush {
    static constexpr int kItems = Layout::kSlice * Shared::kSub / Layout::kThreads;
    static constexpr int kItemStates = Layout::kThreads / Shared::kSub;  // states between a thread's items
    static_assert(kItems * Layout::kThreads == Layout::kSlice * Shared::kSub, "the block's threads must cover the sums");
    int state;      // of the thread's first item
    int step;       // within the sub-tile
    int64_t where;  // of that item in dB and dC, at the tensors' first step

    __device__ __forceinline__ SumFlush(int64_t base, int64_t seqlen)
        : state(threadIdx.x / Shared::kSub), step(threadIdx.x % Shared::kSub), where(base + state * seqlen + step) {}

    // sums: one matrix's part of shared memory; out: dB or dC from the slice's first state and the sub-tile's first step on.
    __device__ __forceinline__ void operator()(const float* sums, float* out, int states, int steps, int64_t seqlen,
                                               bool atomic) const {
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
            const int n = state + item * kItemStates;
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < Layout::kWarps; ++warp) {
                sum += sums[(warp * Layout::kSlice + n) * Shared::kSumRow + step];
            }
            if (n < states && step < steps) {
                float* to = out + where + item * kItemStates * seqlen;
                if (atomic) {
                    atomicAdd(to, sum);
                } else {
                    *to = sum;
                }
            }
        }
    }
};

}  // namespace mamba
