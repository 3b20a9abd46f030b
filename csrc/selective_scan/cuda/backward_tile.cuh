// One tile of the CUDA backward scan: its shared memory, the passes over a sub-tile and the sums over channels.
#pragma once

#include "selective_scan/cuda/tile.cuh"

namespace mamba {

// Steps whose sums are taken together.
constexpr int kSumSteps = 8;

// Shared memory of one block. Rows are Layout::kRow long, those of the sums over channels kSub: their steps are swizzled, so
// that neither those who write four of one state each nor those who read one of each meet in a bank. Of a sliced layout x is
// read again for the next slice, else Bg takes its place.
template <typename T, class Layout>
struct BackwardShared {
    static constexpr int kSub = Layout::kSteps;
    static constexpr int kSubs = Layout::kTile / kSub;
    static constexpr int kSums = Layout::kWarps * Layout::kSlice * kSub;
    static constexpr int kChains = Layout::kEach * Layout::kStates;  // states of all of a lane's channels
    MatrixTile<T, Layout> BC;
    float dt[Layout::kChannels * Layout::kRow];
    float x[Layout::kChannels * Layout::kRow];   // dt * u
    float dy[Layout::kChannels * Layout::kRow];  // dout * silu(z)
    float y[Layout::kChannels * Layout::kRow];   // sum_n C h
    float Aq[Layout::kChannels * Layout::kRow];  // sum_n A a h g, A times log2(e)
    float own_Bg[Layout::kSliced ? Layout::kChannels * Layout::kRow : 4];
    float h_sub[(kSubs - 1) * kChains * Layout::kThreads];  // states before each sub-tile but the last
    // Each warp's sums over its channels, twice: while all warps add up one sub-tile's, they fill the next one's.
    float dB[2 * kSums];
    float dC[2 * kSums];
    int resets[Layout::kTile];
    float bias[Layout::kChannels];  // of delta
    float D[Layout::kChannels];
    float bias_sum[Layout::kPasses][Layout::kThreads];  // of ddelta over time
    float D_sum[Layout::kPasses][Layout::kThreads];

    // sum_n B g
    __device__ __forceinline__ float* Bg() { return Layout::kSliced ? own_Bg : x; }
};

template <class Layout>
struct BackwardThread {
    Chains<Layout> A;  // times log2(e)
    Chains<Layout> w;  // a_{t+1} g_{t+1}
    Chains<Layout> dA;
    int own[Layout::kEach];       // where the rows of the lane's channels begin in the block's tiles
    int matrix[Layout::kStates];  // where those of its states begin in B and C
    int state_sums;               // the place of what it is left with of sums over states, in its first channel's row
    int channel_sums;             // of what it is left with of the warp's sums over channels, in its first state's row
    int swizzle;                  // of that row
};

// B and C where they do not vary over time, and their gradients.
template <class Layout>
struct BackwardConstants {
    bool variable_B;
    bool variable_C;
    Chains<Layout> B, C, dB, dC;
};

// Runs the states forward through one sub-tile. kGeneral as in forward_tile.
template <class Layout, class Shared, bool kGeneral>
__device__ __forceinline__ void advance_sub_tile(const BackwardThread<Layout>& thread, Chains<Layout>& h, const Shared& shared,
                                                 const BackwardConstants<Layout>& constants, int first) {
#pragma unroll
    for (int step = first; step < first + Shared::kSub; step += 4) {
        Steps4 B[Layout::kStates];
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            B[s] = shared.BC.read_B(shared.BC.words + thread.matrix[s] + step);
        }
#pragma unroll
        for (int c = 0; c < Layout::kEach; ++c) {
            const Steps4 dt = read4(shared.dt + thread.own[c] + step);
            const Steps4 x = read4(shared.x + thread.own[c] + step);
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float B_now = B[s].at[j];
                    if (kGeneral) {
                        B_now = constants.variable_B ? B_now : constants.B[c][s];
                        h[c][s] = shared.resets[step + j] ? 0.0f : h[c][s];
                    }
                    h[c][s] = fmaf(exp2_fast(dt.at[j] * thread.A[c][s]), h[c][s], x.at[j] * B_now);
                }
            }
        }
    }
}

// By how much a state's steps are swizzled in the sums over channels.
__device__ __forceinline__ int swizzle(int state) {
    return state & 4;
}

// One sub-tile from step `first` on, forward then backward. kGeneral as in forward_tile. buffer: where the sums over channels
// begin. As in forward_tile, stores to shared memory come after the loads that they would hold back.
template <class Layout, class Shared, bool kGeneral>
__device__ __forceinline__ void backward_sub_tile(BackwardThread<Layout>& thread, const Chains<Layout>& h_start, Shared& shared,
                                                  BackwardConstants<Layout>& constants, int buffer, int first, bool need_y,
                                                  bool add) {
    constexpr int kSub = Shared::kSub;
    constexpr int kEach = Layout::kEach;
    constexpr int kStates = Layout::kStates;
    constexpr int kSteps = kSumSteps;
    const int lane = threadIdx.x % 32;
    const int* resets = shared.resets + first;
    float h[kEach][kStates][kSub];
    float a[kEach][kStates][kSub];

#pragma unroll
    for (int part = 0; part < kSub; part += kSteps) {
        float y[kEach][kSteps];
        float terms[kStates][kSteps];
#pragma unroll
        for (int step = part; step < part + kSteps; step += 4) {
            Steps4 B[kStates], C[kStates];
#pragma unroll
            for (int s = 0; s < kStates; ++s) {
                shared.BC.read(shared.BC.words + thread.matrix[s] + first + step, B[s], C[s]);
            }
#pragma unroll
            for (int c = 0; c < kEach; ++c) {
                const Steps4 dt = read4(shared.dt + thread.own[c] + first + step);
                const Steps4 x = read4(shared.x + thread.own[c] + first + step);
                const Steps4 dy = read4(shared.dy + thread.own[c] + first + step);
#pragma unroll
                for (int s = 0; s < kStates; ++s) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const int t = step + j;
                        float before = t == 0 ? h_start[c][s] : h[c][s][t == 0 ? 0 : t - 1];
                        float B_now = B[s].at[j], C_now = C[s].at[j];
                        if (kGeneral) {
                            B_now = constants.variable_B ? B_now : constants.B[c][s];
                            C_now = constants.variable_C ? C_now : constants.C[c][s];
                            before = resets[t] ? 0.0f : before;
                        }
                        a[c][s][t] = exp2_fast(dt.at[j] * thread.A[c][s]);
                        h[c][s][t] = fmaf(a[c][s][t], before, x.at[j] * B_now);
                        y[c][t - part] = s == 0 ? C_now * h[c][s][t] : fmaf(C_now, h[c][s][t], y[c][t - part]);
                        const float term = dy.at[j] * h[c][s][t];
                        if (kGeneral) {
                            constants.dC[c][s] += term;
                        }
                        terms[s][t - part] = c == 0 ? term : fmaf(dy.at[j], h[c][s][t], terms[s][t - part]);
                    }
                }
            }
        }
        if (need_y) {
            sum_over_states<Layout>(shared.y + thread.state_sums + first + part, y, lane, add);
        }
        sum_over_channels<Layout>(shared.dC + buffer + thread.channel_sums + part, terms, lane, thread.swizzle);
    }

#pragma unroll
    for (int part = kSub - kSteps; part >= 0; part -= kSteps) {
        float Bg[kEach][kSteps];
        float Aq[kEach][kSteps];
        float terms[kStates][kSteps];
#pragma unroll
        for (int step = part + kSteps - 4; step >= part; step -= 4) {
            Steps4 B[kStates], C[kStates];
#pragma unroll
            for (int s = 0; s < kStates; ++s) {
                shared.BC.read(shared.BC.words + thread.matrix[s] + first + step, B[s], C[s]);
            }
#pragma unroll
            for (int c = 0; c < kEach; ++c) {
                const Steps4 dt = read4(shared.dt + thread.own[c] + first + step);
                const Steps4 x = read4(shared.x + thread.own[c] + first + step);
                const Steps4 dy = read4(shared.dy + thread.own[c] + first + step);
#pragma unroll
                for (int s = 0; s < kStates; ++s) {
#pragma unroll
                    for (int j = 3; j >= 0; --j) {
                        const int t = step + j;
                        const float before = t == 0 ? h_start[c][s] : h[c][s][t == 0 ? 0 : t - 1];
                        float B_now = B[s].at[j], C_now = C[s].at[j];
                        if (kGeneral) {
                            B_now = constants.variable_B ? B_now : constants.B[c][s];
                            C_now = constants.variable_C ? C_now : constants.C[c][s];
                        }
                        const float g = fmaf(C_now, dy.at[j], thread.w[c][s]);
                        float w = a[c][s][t] * g;
                        float q = w * before;
                        if (kGeneral) {
                            w = resets[t] ? 0.0f : w;
                            q = resets[t] ? 0.0f : q;
                            constants.dB[c][s] = fmaf(x.at[j], g, constants.dB[c][s]);
                        }
                        thread.w[c][s] = w;
                        thread.dA[c][s] = fmaf(dt.at[j], q, thread.dA[c][s]);
                        Bg[c][t - part] = s == 0 ? B_now * g : fmaf(B_now, g, Bg[c][t - part]);
                        Aq[c][t - part] = s == 0 ? thread.A[c][s] * q : fmaf(thread.A[c][s], q, Aq[c][t - part]);
                        terms[s][t - part] = c == 0 ? x.at[j] * g : fmaf(x.at[j], g, terms[s][t - part]);
                    }
                }
            }
        }
        sum_over_channels<Layout>(shared.dB + buffer + thread.channel_sums + part, terms, lane, thread.swizzle);
        sum_over_states<Layout>(shared.Aq + thread.state_sums + first + part, Aq, lane, add);
        __syncwarp();  // other lanes have read x, where Bg may go
        sum_over_states<Layout>(shared.Bg() + thread.state_sums + first + part, Bg, lane, add);
    }
}

// Adds up the warps' sums of one sub-tile. Each thread has the same (state, step) every time: prepared once.
template <class Layout, class Shared>
struct SumFlush {
    static constexpr int kItems = Layout::kSlice * Shared::kSub / Layout::kThreads;
    static constexpr int kItemStates = Layout::kThreads / Shared::kSub;  // states between a thread's items
    static_assert(kItems * Layout::kThreads == Layout::kSlice * Shared::kSub, "the block's threads must cover the sums");
    static_assert(kItems == 1 || kItemStates % 8 == 0, "its items are swizzled alike");
    int state;      // of the thread's first item
    int step;       // within the sub-tile
    int place;      // of that item in a warp's sums
    int64_t where;  // of that item in dB and dC, at the tensors' first step

    __device__ __forceinline__ SumFlush(int64_t base, int64_t seqlen, bool reverse)
        : state(opaque(threadIdx.x / Shared::kSub)),
          step(opaque(threadIdx.x % Shared::kSub)),
          place(opaque(state * Shared::kSub + (step ^ swizzle(state)))),
          where(base + state * seqlen + (reverse ? -step : step)) {}

    // sums: one matrix's part of shared memory; out: dB or dC at the slice's first state and the sub-tile's first step.
    __device__ __forceinline__ void operator()(const float* sums, float* out, int states, int steps, int64_t seqlen,
                                               bool atomic) const {
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < Layout::kWarps; ++warp) {
                sum += sums[warp * Layout::kSlice * Shared::kSub + item * kItemStates * Shared::kSub + place];
            }
            if (Layout::kWhole || (state + item * kItemStates < states && step < steps)) {
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
