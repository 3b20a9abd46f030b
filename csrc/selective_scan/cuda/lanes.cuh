// Which lane holds what of a warp's channels and states, and how sums cross lanes.
#pragma once

#include "common/cuda_vector.cuh"
#include "selective_scan/cuda/layout.cuh"

namespace mamba {

// kCount floats to or from a row in shared memory, with accesses of up to 16 bytes.
template <int kCount>
__device__ __forceinline__ void write_row(float* row, const float (&values)[kCount]) {
    if constexpr (kCount % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            *reinterpret_cast<float4*>(row + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
        }
    } else if constexpr (kCount == 2) {
        *reinterpret_cast<float2*>(row) = make_float2(values[0], values[1]);
    } else {
        static_assert(kCount == 1, "1, 2 or a multiple of 4 floats");
        *row = values[0];
    }
}

template <int kCount>
__device__ __forceinline__ void read_row(float (&values)[kCount], const float* row) {
    unpack<float, kCount>(packed_load<float, kCount>(row), values);
}

// A value for each of a lane's chains: a state of one of its channels.
template <class Layout>
using Chains = float[Layout::kEach][Layout::kStates];

// Which of its channels and states a lane holds in which register: an order that differs between lanes, so that lanes which add
// something up always hand each other the same register (ordered_sum).
template <class Layout>
struct LaneOrder {
    static constexpr bool kOrdersStates = Layout::kStates <= Layout::kGroups;
    int k;              // lane within its group
    int group;          // of the warp
    int channel_order;  // the lane's top bits within the group
    int state_order;    // the group's top bits

    __device__ __forceinline__ explicit LaneOrder(int lane)
        : k(lane % Layout::kLanes),
          group(lane / Layout::kLanes),
          channel_order(k / (Layout::kLanes / Layout::kEach)),
          state_order(kOrdersStates ? group / (kOrdersStates ? Layout::kGroups / Layout::kStates : 1) : 0) {}

    // The channel, within the warp's, that register c has; the state, within the slice, that register s has.
    __device__ __forceinline__ int channel(int c) const { return group * Layout::kEach + (c ^ channel_order); }
    __device__ __forceinline__ int state(int s) const { return (s ^ state_order) * Layout::kLanes + k; }
};

// Sums kCount rows of values over the lanes that differ in the bits kBit, kBit / 2, ..., log2(kCount) of them. The lane with
// x in these bits has row i ^ x in v[i], and is left with the sum of row x in v[0].
template <int kCount, int kBit, int kSteps, int kCapacity>
__device__ __forceinline__ void ordered_sum(float (&v)[kCapacity][kSteps]) {
    if constexpr (kCount > 1) {
        constexpr int kHalf = kCount / 2;
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
#pragma unroll
            for (int t = 0; t < kSteps; ++t) {
                v[i][t] += __shfl_xor_sync(0xffffffffu, v[i + kHalf][t], kBit);
            }
        }
        ordered_sum<kHalf, kBit / 2>(v);
    }
}

// What transpose_sum leaves of kSteps steps' sums over kMembers lanes that are kSpacing apart.
template <int kSteps, int kMembers, int kSpacing>
struct SumsLeft {
    static constexpr int kLeft = kSteps > kMembers ? kSteps / kMembers : 1;    // sums a lane holds
    static constexpr int kCopies = kMembers > kSteps ? kMembers / kSteps : 1;  // lanes that hold the same sum

    // The first step that the lane holds.
    static __device__ __forceinline__ int first(int lane) { return lane / kSpacing % kMembers / kCopies * kLeft; }

    // Stores them into (add: onto) `to`, where the first one's place is; the fifth one's is 4 behind that, or before it where
    // the row is swizzled.
    static __device__ __forceinline__ void store(float* to, const float (&v)[kSteps], int lane, bool add, int swizzle) {
        constexpr int kPiece = kLeft < 4 ? kLeft : 4;
        static_assert(kLeft <= 8, "two pieces at most");
        if (lane / kSpacing % kMembers % kCopies == 0) {
#pragma unroll
            for (int piece = 0; piece < kLeft; piece += kPiece) {
                float* const at = piece == 0 ? to : to + (swizzle != 0 ? -4 : 4);
                float sums[kPiece];
#pragma unroll
                for (int i = 0; i < kPiece; ++i) {
                    sums[i] = add ? at[i] + v[piece + i] : v[piece + i];
                }
                if constexpr (kPiece == 4) {
                    st_shared_v4_f32(at, sums[0], sums[1], sums[2], sums[3]);
                } else {
                    write_row(at, sums);
                }
            }
        }
    }
};

// Sums over a channel's states, which its lanes have: what is left with whom.
template <class Layout, int kSteps>
using StateSums = SumsLeft<kSteps, Layout::kLanes / Layout::kEach, 1>;

// Puts them into (add: onto) `to`, the place of the lane's first step in its first channel's row.
template <class Layout, int kSteps>
__device__ __forceinline__ void sum_over_states(float* to, float (&v)[Layout::kEach][kSteps], int lane, bool add) {
    ordered_sum<Layout::kEach, Layout::kLanes / 2>(v);
    transpose_sum<kSteps, Layout::kLanes / Layout::kEach / 2, 1>(v[0], lane);
    StateSums<Layout, kSteps>::store(to, v[0], lane, add, 0);
}

// Sums of terms of dB or dC over the warp's channels: what is left with whom.
template <class Layout, int kSteps>
using ChannelSums = SumsLeft<kSteps, Layout::kGroups / Layout::kStates, Layout::kLanes>;

// Puts them into `to`, the place of the lane's first step in its first state's row. swizzle: see SumsLeft.
template <class Layout, int kSteps>
__device__ __forceinline__ void sum_over_channels(float* to, float (&v)[Layout::kStates][kSteps], int lane, int swizzle) {
    static_assert(LaneOrder<Layout>::kOrdersStates, "each state's sum must be left with other lanes");
    ordered_sum<Layout::kStates, 16>(v);
    transpose_sum<kSteps, 16 / Layout::kStates, Layout::kLanes>(v[0], lane);
    ChannelSums<Layout, kSteps>::store(to, v[0], lane, false, swizzle);
}

}  // namespace mamba
