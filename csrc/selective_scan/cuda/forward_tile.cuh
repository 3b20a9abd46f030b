// One tile of the CUDA forward scan: what a thread holds, and the walk of its states.
#pragma once

#include "selective_scan/cuda/tile.cuh"

namespace mamba {

// A tile in shared memory. In one piece, so that one address serves all of a channel's rows.
template <typename T, class Layout, bool kCarryOnly>
struct ForwardShared {
    static constexpr int kRows = Layout::kChannels * Layout::kRow;
    MatrixTile<T, Layout> BC;
    float dt[kRows];
    float x[kRows];  // dt * u
    float y[kCarryOnly ? 4 : kRows];
};

// What one thread needs to run its states through a tile.
template <class Layout>
struct ForwardThread {
    Chains<Layout> h;
    Chains<Layout> A;             // times log2(e)
    int row[Layout::kEach];       // of the lane's channels in the block's tiles; the y that it is left with belongs to row[0]
    int state[Layout::kStates];   // of the lane in the slice
    float dt_sum[Layout::kEach];  // kCarryOnly: sum of dt, over which the segment's decays multiply to exp2(A dt_sum)
    bool restarted;               // kCarryOnly: the state has restarted

    __device__ __forceinline__ explicit ForwardThread(const LaneOrder<Layout>& order) {
#pragma unroll
        for (int c = 0; c < Layout::kEach; ++c) {
            row[c] = threadIdx.x / 32 * Layout::kWarpChannels + order.channel(c);
            dt_sum[c] = 0.0f;
        }
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            state[s] = order.state(s);
        }
        restarted = false;
    }
};

// B and C where they do not vary over time.
template <class Layout>
struct ForwardConstants {
    bool variable_B;
    bool variable_C;
    Chains<Layout> B, C;
};

// Runs `steps` (a multiple of kSteps) steps of one tile. y is added to where add_y, else written. kGeneral: B or C may be
// constant, and the state may restart; the common case pays for neither. kCarryOnly: the states alone, no y. The sums over
// states come last in each round: a store to shared memory would hold back the loads behind it.
template <typename T, class Layout, bool kGeneral, bool kCarryOnly>
__device__ __forceinline__ void forward_tile(ForwardThread<Layout>& thread, ForwardShared<T, Layout, kCarryOnly>& tile,
                                             const ForwardConstants<Layout>& constants, const int* resets, int steps,
                                             bool add_y) {
    using Shared = ForwardShared<T, Layout, kCarryOnly>;
    [[maybe_unused]] const int lane = threadIdx.x % 32;
    // Where the present steps lie: these walk, or their addresses would be computed from the tile's each time.
    const float* row[Layout::kEach];
    const float* matrix[Layout::kStates];
#pragma unroll
    for (int c = 0; c < Layout::kEach; ++c) {
        row[c] = tile.dt + thread.row[c] * Layout::kRow;
    }
#pragma unroll
    for (int s = 0; s < Layout::kStates; ++s) {
        matrix[s] = tile.BC.words + thread.state[s] * Layout::kRow;
    }
    float* y_row = tile.y + thread.row[0] * Layout::kRow + StateSums<Layout, Layout::kSteps>::first(lane);
    for (int first = 0; first < steps; first += Layout::kSteps) {
        float y[Layout::kEach][Layout::kSteps];
#pragma unroll
        for (int part = 0; part < Layout::kSteps; part += 4) {
            Steps4 dt[Layout::kEach], x[Layout::kEach];
#pragma unroll
            for (int c = 0; c < Layout::kEach; ++c) {
                dt[c] = read4(row[c] + part);
                x[c] = read4(row[c] + part + Shared::kRows);
                if (kCarryOnly && !add_y) {  // once for all slices
                    thread.dt_sum[c] += (dt[c].at[0] + dt[c].at[1]) + (dt[c].at[2] + dt[c].at[3]);
                }
            }
            if (kCarryOnly && kGeneral) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    thread.restarted |= resets[first + part + j] != 0;
                }
            }
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                Steps4 B;
                Steps4 C = same4(0.0f);
                if constexpr (kCarryOnly) {
                    B = tile.BC.read_one(matrix[s] + part);
                } else {
                    tile.BC.read(matrix[s] + part, B, C);
                }
#pragma unroll
                for (int c = 0; c < Layout::kEach; ++c) {
                    float h = thread.h[c][s];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float B_now = B.at[j], C_now = C.at[j];
                        if (kGeneral) {
                            B_now = constants.variable_B ? B_now : constants.B[c][s];
                            C_now = constants.variable_C ? C_now : constants.C[c][s];
                            h = resets[first + part + j] ? 0.0f : h;
                        }
                        h = fmaf(exp2_fast(dt[c].at[j] * thread.A[c][s]), h, x[c].at[j] * B_now);
                        if (!kCarryOnly) {
                            y[c][part + j] = s == 0 ? C_now * h : fmaf(C_now, h, y[c][part + j]);
                        }
                    }
                    thread.h[c][s] = h;
                }
            }
        }
        if constexpr (!kCarryOnly) {
            sum_over_states<Layout>(y_row, y, lane, add_y);
            y_row += Layout::kSteps;
        }
#pragma unroll
        for (int c = 0; c < Layout::kEach; ++c) {
            row[c] += Layout::kSteps;
        }
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            matrix[s] += Layout::kSteps;
        }
    }
}

}  // namespace mamba
