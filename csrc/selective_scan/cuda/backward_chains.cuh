// What the CUDA backward scan does with a lane's chains before, between and after its tiles.
#pragma once

#include "selective_scan/cuda/backward_tile.cuh"
#include "selective_scan/parts.h"

namespace mamba {

// Where a lane's channels and states lie in the block's tiles, and what it is left with of sums.
template <class Layout>
__device__ __forceinline__ void find_places(BackwardThread<Layout>& thread, const LaneOrder<Layout>& order) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < Layout::kEach; ++c) {
        thread.own[c] = opaque((warp * Layout::kWarpChannels + order.channel(c)) * Layout::kRow);
    }
#pragma unroll
    for (int s = 0; s < Layout::kStates; ++s) {
        thread.matrix[s] = opaque(order.state(s) * Layout::kRow);
    }
    thread.swizzle = swizzle(order.state(0));
    thread.state_sums = opaque(thread.own[0] + StateSums<Layout, kSumSteps>::first(lane));
    thread.channel_sums = opaque((warp * Layout::kSlice + order.state(0)) * Layout::kSteps +
                                 (ChannelSums<Layout, kSumSteps>::first(lane) ^ thread.swizzle));
}

// Calls function(c, s, whether the chain exists, its parameter's number among the block's) for the lane's chains of a slice.
template <class Layout, class Function>
__device__ __forceinline__ void for_chains(const MambaSelectiveScan& p, const ScanBlock& block, const LaneOrder<Layout>& order,
                                           int slice, const Function& function) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int c = 0; c < Layout::kEach; ++c) {
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const int row = warp * Layout::kWarpChannels + order.channel(c);
            const int n = slice * Layout::kSlice + order.state(s);
            function(c, s, Layout::kWhole || (row < block.channels && n < p.dstate), row * static_cast<int>(p.dstate) + n);
        }
    }
}

template <class Layout>
__device__ __forceinline__ void load_constants(BackwardConstants<Layout>& constants, const MambaSelectiveScan& p,
                                               const ScanBlock& block, const LaneOrder<Layout>& order, int slice,
                                               int64_t first_parameter) {
    constants.variable_B = p.variable_B;
    constants.variable_C = p.variable_C;
    for_chains(p, block, order, slice, [&](int c, int s, bool exists, int parameter) {
        constants.B[c][s] = exists && !p.variable_B ? static_cast<const float*>(p.B)[first_parameter + parameter] : 0.0f;
        constants.C[c][s] = exists && !p.variable_C ? static_cast<const float*>(p.C)[first_parameter + parameter] : 0.0f;
        constants.dB[c][s] = 0.0f;
        constants.dC[c][s] = 0.0f;
    });
}

// The gradients of B and C where they do not vary over time.
template <class Layout>
__device__ __forceinline__ void add_constants(const ScanBackward& q, const BackwardConstants<Layout>& constants,
                                              const ScanBlock& block, const LaneOrder<Layout>& order, int slice,
                                              int64_t first_part) {
    for_chains(q.forward, block, order, slice, [&](int c, int s, bool exists, int parameter) {
        if (exists && !q.forward.variable_B) {  // no other thread's: atomic because nothing waits for it
            atomicAdd(q.parts.dB + first_part + parameter, constants.dB[c][s]);
        }
        if (exists && !q.forward.variable_C) {
            atomicAdd(q.parts.dC + first_part + parameter, constants.dC[c][s]);
        }
    });
}

// A slice's gradients after the last step of the segment: those of the last state, or what later segments pass back.
template <class Layout>
__device__ __forceinline__ void begin_slice(BackwardThread<Layout>& thread, const ScanBackward& q, const ScanBlock& block,
                                            const LaneOrder<Layout>& order, int slice, int64_t first_chain,
                                            int64_t first_parameter, int64_t first_part) {
    const MambaSelectiveScan& p = q.forward;
    for_chains(p, block, order, slice, [&](int c, int s, bool exists, int parameter) {
        thread.w[c][s] = exists && q.dlast_state != nullptr ? q.dlast_state[first_chain + parameter] : 0.0f;
        thread.A[c][s] = exists ? decay_exponent(p.A[first_parameter + parameter]) : 0.0f;
        thread.dA[c][s] = 0.0f;
        if (exists) {
            if (Layout::kSliced) {
                q.parts.dA[first_part + parameter] = 0.0f;
            }
            if (!Layout::kMamba && !p.variable_B) {
                q.parts.dB[first_part + parameter] = 0.0f;
            }
            if (!Layout::kMamba && !p.variable_C) {
                q.parts.dC[first_part + parameter] = 0.0f;
            }
        }
    });
    const int later = static_cast<int>(p.segments - 1 - block.segment);
    if (later > 0) {
        griddepcontrol_wait();
        SegmentStates<Layout> at;
        for_chains(p, block, order, slice, [&](int c, int s, bool exists, int parameter) {
            at.exists[c][s] = exists;
            at.state[c][s] = first_chain + parameter;
        });
        pass_through_segments<Layout>(p, thread.w, at, p.segments - 1, -1, later);
    }
}

// Of a sliced layout: w waits for the slice's next tile, and dA is added up in its output.
template <class Layout>
__device__ __forceinline__ void end_slice(BackwardThread<Layout>& thread, float* waiting, const ScanBackward& q,
                                          const ScanBlock& block, const LaneOrder<Layout>& order, int slice,
                                          int64_t first_part) {
    for_chains(q.forward, block, order, slice, [&](int c, int s, bool exists, int parameter) {
        waiting_place<Layout>(waiting, slice, c, s) = thread.w[c][s];
        if (exists) {
            atomicAdd(q.parts.dA + first_part + parameter, thread.dA[c][s]);
        }
        thread.dA[c][s] = 0.0f;
    });
}

// The gradients of initial states and of A.
template <class Layout>
__device__ __forceinline__ void store_chain_gradients(const BackwardThread<Layout>& thread, float* waiting,
                                                      const ScanBackward& q, const ScanBlock& block,
                                                      const LaneOrder<Layout>& order, int slice, int64_t first_chain,
                                                      int64_t first_part) {
    for_chains(q.forward, block, order, slice, [&](int c, int s, bool exists, int parameter) {
        if (exists && q.dinitial_state != nullptr && block.segment == 0) {
            q.dinitial_state[first_chain + parameter] =
                Layout::kSliced ? waiting_place<Layout>(waiting, slice, c, s) : thread.w[c][s];
        }
        if (exists && !Layout::kSliced) {
            q.parts.dA[first_part + parameter] = thread.dA[c][s];
        }
    });
}

}  // namespace mamba
