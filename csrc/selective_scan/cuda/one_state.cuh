// The scan of channels that have one state: a warp takes a channel, a lane kLaneSteps neighbouring steps of it, and the state
// crosses lanes. Nothing is summed over states, so that what is read and written can be the limit.
//
//     a tile of 256 steps     lane 0   lane 1   ...   lane 31      1. a lane's own steps, from a state of zero
//     of one channel          0 .. 7   8 .. 15  ...   248 .. 255   2. what reaches it from the lanes before: five shuffles
//                                                                  3. its own steps again, from the right state
#pragma once

#include "selective_scan/cuda/tile.cuh"

namespace mamba {

constexpr int kLaneSteps = 8;
constexpr int kOneStateTile = 32 * kLaneSteps;
constexpr int kLaneStages = 5;  // in which a value crosses a warp
constexpr unsigned kAllLanes = 0xffffffffu;

// Which steps of a row a lane has.
struct LaneSteps {
    int64_t place;  // of the first one in memory
    int valid;      // how many exist: none where it is not positive
    bool reverse;   // memory has them in the opposite order
    bool quads;     // rows begin at multiples of four elements, and so many make up their length

    __device__ __forceinline__ LaneSteps(const MambaSelectiveScan& p, int64_t tile_first, bool in_quads)
        : reverse(p.reverse != 0), quads(in_quads) {
        const int64_t first = tile_first + threadIdx.x % 32 * kLaneSteps, left = p.seqlen - first;
        place = reverse ? left - kLaneSteps : first;
        valid = left < kLaneSteps ? static_cast<int>(left) : kLaneSteps;
    }

    // In the order of the scan; steps that do not exist are zero.
    template <typename T>
    __device__ __forceinline__ void load(const T* row, float (&values)[kLaneSteps]) const {
        const T* const at = row + place;
        if (!quads) {
#pragma unroll
            for (int i = 0; i < kLaneSteps; ++i) {
                values[i] = i < valid ? to_float(at[reverse ? kLaneSteps - 1 - i : i]) : 0.0f;
            }
            return;
        }
        const auto load_four = [&](int first, bool exist) {
            return exist ? packed_load<T, 4>(at + first) : packed_zero<T, 4>();
        };
        if (reverse) {
            Packed<T, 4> early = load_four(4, valid > 0), late = load_four(0, valid > 4);
            mirror(early);
            mirror(late);
            unpack<T, 4>(early, values);
            unpack<T, 4>(late, values + 4);
        } else {
            unpack<T, 4>(load_four(0, valid > 0), values);
            unpack<T, 4>(load_four(4, valid > 4), values + 4);
        }
    }

    template <typename T>
    __device__ __forceinline__ void store(T* row, const float (&values)[kLaneSteps]) const {
        T* const at = row + place;
        if (!quads) {
#pragma unroll
            for (int i = 0; i < kLaneSteps; ++i) {
                if (i < valid) {
                    at[reverse ? kLaneSteps - 1 - i : i] = from_float<T>(values[i]);
                }
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < kLaneSteps; i += 4) {
            if (i < valid) {
                packed_store<T, 4>(at + (reverse ? kLaneSteps - 4 - i : i), pack_steps<T, 4>(values + i, reverse));
            }
        }
    }
    // Adds what is there.
    template <typename T>
    __device__ __forceinline__ void add(const T* row, float (&values)[kLaneSteps]) const {
        float before[kLaneSteps];
        load(row, before);
#pragma unroll
        for (int i = 0; i < kLaneSteps; ++i) {
            values[i] += before[i];
        }
    }
};

// How a state that decays by exp2(exponent dt) crosses a warp, along time or (kBack) against it.
template <bool kBack>
struct LaneCrossing {
    // Sums of dt: of the 1, 2, 4, 8, 16 lanes that end with this one, and of all lanes before it.
    float stage[kLaneStages], before;

    static __device__ __forceinline__ float from(float value, int distance) {
        return kBack ? __shfl_down_sync(kAllLanes, value, distance) : __shfl_up_sync(kAllLanes, value, distance);
    }
    static __device__ __forceinline__ bool has(int distance) {
        const int lane = threadIdx.x % 32;
        return kBack ? lane + distance < 32 : lane >= distance;
    }

    __device__ __forceinline__ explicit LaneCrossing(const float (&dt)[kLaneSteps]) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kLaneSteps; ++i) {
            sum += dt[i];
        }
#pragma unroll
        for (int i = 0; i < kLaneStages; ++i) {
            stage[i] = sum;
            const float other = from(sum, 1 << i);
            sum += has(1 << i) ? other : 0.0f;
        }
        before = from(sum, 1);
        before = has(1) ? before : 0.0f;
    }

    // The state that reaches the lane, where each lane's steps leave `value` if they begin with zero, and the tile begins with
    // `carry`. Zero stays zero even where a factor has overflowed, as it would step by step.
    __device__ __forceinline__ float pass(float value, float exponent, float carry) const {
#pragma unroll
        for (int i = 0; i < kLaneStages; ++i) {
            const float other = from(value, 1 << i);
            const float sum = fmaf(exp2_fast(exponent * stage[i]), other, value);
            value = has(1 << i) && other != 0.0f ? sum : value;
        }
        float own = from(value, 1);
        own = has(1) ? own : 0.0f;
        return carry != 0.0f ? fmaf(exp2_fast(exponent * before), carry, own) : own;
    }
};

// What scan_block finds where the length has one segment, by 32-bit divisions: a block may have only one tile to do.
__device__ __forceinline__ ScanBlock one_state_block(const MambaSelectiveScan& p, int channels_per_block) {
    const int groups = static_cast<int>(p.ngroups), group_channels = static_cast<int>(p.dim) / groups;
    const int group_blocks = (group_channels + channels_per_block - 1) / channels_per_block;
    const int batch_group = static_cast<int>(blockIdx.x) / group_blocks;
    const int index = static_cast<int>(blockIdx.x) - batch_group * group_blocks;
    ScanBlock block;
    block.index = index;
    block.batch = batch_group / groups;
    block.group = batch_group % groups;
    block.first_channel = block.group * group_channels + index * channels_per_block;
    const int left = group_channels - index * channels_per_block;
    block.channels = left < channels_per_block ? left : channels_per_block;
    block.segment = block.begin = 0;
    block.end = p.seqlen;
    return block;
}

// What a warp knows of the channels it takes, one after the other: lane c has channel c's.
struct OneStateChannels {
    int64_t first;
    int count;
    float exponent, bias, skip;

    // each: channels a warp.
    __device__ __forceinline__ OneStateChannels(const MambaSelectiveScan& p, const ScanBlock& block, int each) {
        const int before = threadIdx.x / 32 * each;
        first = block.first_channel + before;
        count = block.channels - before < each ? block.channels - before : each;
        const int lane = threadIdx.x % 32;
        const bool exists = lane < count;
        exponent = exists ? decay_exponent(p.A[first + lane]) : 0.0f;
        bias = exists && p.delta_bias != nullptr ? p.delta_bias[first + lane] : 0.0f;
        skip = exists && p.D != nullptr ? p.D[first + lane] : 0.0f;
    }
    static __device__ __forceinline__ float of(float value, int channel) { return __shfl_sync(kAllLanes, value, channel); }
};

// Asks for the steps of the next channel, or else of the next tile's first channel, to come into the L2 cache. row: the
// channel's.
template <typename T>
__device__ __forceinline__ void prefetch_next(const T* row, const T* first_row, int64_t stride, bool last_channel,
                                              const LaneSteps& steps, int64_t to_next_tile) {
    if (steps.valid > 0) {
        prefetch_to_L2(last_channel ? first_row + steps.place + to_next_tile : row + stride + steps.place);
    }
}

// A channel's row of a tensor (B, D, L), or a group's of B or C.
template <typename T>
__device__ __forceinline__ T* row_of(T* data, int64_t batch, int64_t batch_stride, int64_t row, int64_t stride) {
    return data + batch * batch_stride + row * stride;
}

}  // namespace mamba
