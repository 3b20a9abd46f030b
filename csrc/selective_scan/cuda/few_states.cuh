// The scan of channels that have few states: 16 lanes take a channel, each kLaneSteps neighbouring steps of it, and states
// cross lanes one after the other. What a step needs once for all states (softplus, sums of dt) is found once. Nothing is
// summed over lanes but what a group of channels shares, so that what is read and written can be the limit.
//
//     a tile of 128 steps        lanes 0, 1   lanes 2, 3   ...   lanes 30, 31     1. a lane's own steps, from a state of zero
//     of two channels, the even  0 .. 7       8 .. 15      ...   120 .. 127       2. what reaches it from before: four shuffles
//     and the odd lanes' one                                                      3. its own steps again, from the right state
//
// Neighbouring lanes read the same steps of B and C, which is half as much work for the L1 cache as if halves of a warp did.
// What a tile, a channel or a state needs from memory is asked for while the one before it is under way.
#pragma once

#include "selective_scan/cuda/tile.cuh"

namespace mamba {

constexpr int kLaneSteps = 8;
constexpr int kChannelLanes = 16;
constexpr int kFewStatesTile = kChannelLanes * kLaneSteps;
constexpr int kCrossingStages = 4;  // in which a value crosses a channel's lanes
constexpr unsigned kAllLanes = 0xffffffffu;

// Hides how a value was computed, or ptxas, short of registers, computes it again for each state.
__device__ __forceinline__ float opaque_value(float value) {
    return __int_as_float(opaque(__float_as_int(value)));
}

// Which of a channel's lanes this one is, and which of a warp's two channels it has.
__device__ __forceinline__ int channel_lane() {
    return threadIdx.x % 32 / 2;
}
__device__ __forceinline__ int channel_of_warp() {
    return threadIdx.x % 2;
}
// What the channel's lane of this number has.
__device__ __forceinline__ float of_channel_lane(float value, int lane) {
    return __shfl_sync(kAllLanes, value, 2 * lane + channel_of_warp());
}

// How rows are read: in fours of elements, where they begin at multiples of four elements and so many make up their length,
// along memory or against it; or element by element, either way.
enum class RowAccess { kQuads, kQuadsReverse, kElements };

// A lane's steps of rows: where they lie, how they are read and written.
template <RowAccess kAccess>
struct LaneSteps {
    static constexpr bool kQuads = kAccess != RowAccess::kElements;

    int seqlen;
    bool any_reverse;

    __device__ __forceinline__ explicit LaneSteps(const MambaSelectiveScan& p)
        : seqlen(static_cast<int>(p.seqlen)), any_reverse(p.reverse != 0) {}

    // Memory has the steps in the opposite order.
    __device__ __forceinline__ bool reverse() const { return kQuads ? kAccess == RowAccess::kQuadsReverse : any_reverse; }
    // The first one in memory, of the tile that begins with this step, and of the next one from there.
    __device__ __forceinline__ int place(int tile_first) const {
        const int first = tile_first + channel_lane() * kLaneSteps;
        return reverse() ? seqlen - first - kLaneSteps : first;
    }
    __device__ __forceinline__ int to_next_tile() const { return reverse() ? -kFewStatesTile : kFewStatesTile; }
    // How many exist: none where it is not positive.
    __device__ __forceinline__ int count(int tile_first) const {
        const int left = seqlen - tile_first - channel_lane() * kLaneSteps;
        return tile_first < 0 ? 0 : left < kLaneSteps ? left : kLaneSteps;
    }

    // As they lie in memory; steps that do not exist are zero.
    template <typename T>
    __device__ __forceinline__ Packed<T, kLaneSteps> load(const T* at, int count) const {
        if constexpr (kQuads) {
            constexpr int kWords = sizeof(T);
            const Packed<T, 4> low = load_steps<T, 4, Access::kAligned>(at, reverse() ? count - 4 : count, reverse());
            const Packed<T, 4> high = load_steps<T, 4, Access::kAligned>(at + 4, reverse() ? count : count - 4, reverse());
            Packed<T, kLaneSteps> packed;
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                packed.word[i] = low.word[i];
                packed.word[kWords + i] = high.word[i];
            }
            return packed;
        } else {
            return load_steps<T, kLaneSteps, Access::kSteps>(at, count, reverse());
        }
    }
    // In the order of the scan.
    template <typename T>
    __device__ __forceinline__ void unpack_steps(Packed<T, kLaneSteps> packed, float (&values)[kLaneSteps]) const {
        if (reverse()) {
            mirror(packed);
        }
        unpack<T, kLaneSteps>(packed, values);
    }

    template <typename T>
    __device__ __forceinline__ void store(T* at, int count, const float (&values)[kLaneSteps]) const {
        if constexpr (kQuads) {
#pragma unroll
            for (int i = 0; i < kLaneSteps; i += 4) {
                if (i < count) {
                    packed_store<T, 4>(at + (reverse() ? kLaneSteps - 4 - i : i), pack_steps<T, 4>(values + i, reverse()));
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < kLaneSteps; ++i) {
                if (i < count) {
                    at[reverse() ? kLaneSteps - 1 - i : i] = from_float<T>(values[i]);
                }
            }
        }
    }
    // Adds what is there.
    template <typename T>
    __device__ __forceinline__ void add(const T* at, int count, float (&values)[kLaneSteps]) const {
        float before[kLaneSteps];
        unpack_steps<T>(load(at, count), before);
#pragma unroll
        for (int i = 0; i < kLaneSteps; ++i) {
            values[i] += before[i];
        }
    }
};

// Steps on their way to shared memory, 16 bytes here and, of float32, 16 in the next array of kLanes. Registers would be
// scarce, and ptxas has so few scoreboards that a lane which waits for one row would wait for others.
template <typename T, int kLanes>
struct WaitingSteps {
    static constexpr int kParts = sizeof(T) / 2;
    uint4 part[kParts][kLanes];

    template <RowAccess kAccess>
    __device__ __forceinline__ void fetch(int lane, const LaneSteps<kAccess>& steps, const T* at, int count) {
        if constexpr (LaneSteps<kAccess>::kQuads) {
            void* const second = kParts == 1 ? static_cast<void*>(reinterpret_cast<uint2*>(&part[0][lane]) + 1)
                                             : static_cast<void*>(&part[kParts - 1][lane]);
            cp_async<4 * sizeof(T)>(&part[0][lane], at, (steps.reverse() ? count - 4 : count) > 0);
            cp_async<4 * sizeof(T)>(second, at + 4, (steps.reverse() ? count : count - 4) > 0);
        } else {
            const Packed<T, kLaneSteps> packed = steps.load(at, count);
#pragma unroll
            for (int i = 0; i < kParts; ++i) {
                const uint32_t* const words = packed.word + 4 * i;
                part[i][lane] = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
    __device__ __forceinline__ Packed<T, kLaneSteps> read(int lane) const {
        Packed<T, kLaneSteps> packed;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const uint4 words = part[i][lane];
            packed.word[4 * i] = words.x;
            packed.word[4 * i + 1] = words.y;
            packed.word[4 * i + 2] = words.z;
            packed.word[4 * i + 3] = words.w;
        }
        return packed;
    }
};

// How a state that decays by exp2(exponent dt) crosses a channel's lanes, along time or (kBack) against it.
template <bool kBack>
struct LaneCrossing {
    float stage[kCrossingStages];  // sums of dt: of the 1, 2, 4, 8 lanes that end (kBack: begin) with this one

    static __device__ __forceinline__ float from(float value, int distance) {
        return kBack ? __shfl_down_sync(kAllLanes, value, 2 * distance) : __shfl_up_sync(kAllLanes, value, 2 * distance);
    }
    // Whether there is a lane so far ahead of this one.
    static __device__ __forceinline__ bool has(int distance) {
        return kBack ? channel_lane() < kChannelLanes - distance : channel_lane() >= distance;
    }

    __device__ __forceinline__ explicit LaneCrossing(const float (&dt)[kLaneSteps]) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kLaneSteps; ++i) {
            sum += dt[i];
        }
#pragma unroll
        for (int i = 0; i < kCrossingStages; ++i) {
            stage[i] = sum;
            sum += from(sum, 1 << i);  // of no use where there is no such lane
        }
    }

    // The state before a lane's steps begin with: zero but for the first lane's, which is the tile's.
    static __device__ __forceinline__ float begin(float carry) { return has(1) ? 0.0f : carry; }

    // The state that a lane leaves, where its own steps leave `value` of what they begin with. Factors are finite, so that zero
    // stays zero, as it would step by step.
    __device__ __forceinline__ float pass(float value, float exponent) const {
#pragma unroll
        for (int i = 0; i < kCrossingStages; ++i) {
            const float sum = fmaf(exp2_fast(fminf(exponent * stage[i], 127.0f)), from(value, 1 << i), value);
            value = has(1 << i) ? sum : value;
        }
        return value;
    }
    // The state that reaches a lane, of what each one leaves.
    static __device__ __forceinline__ float reach(float passed, float carry) {
        const float other = from(passed, 1);
        return has(1) ? other : carry;
    }
    // What the last lane leaves, for all of the channel's.
    static __device__ __forceinline__ float end(float passed) { return of_channel_lane(passed, kBack ? 0 : kChannelLanes - 1); }
};

// What scan_block finds where the length has one segment, by 32-bit divisions: a block may have only one tile to do.
__device__ __forceinline__ ScanBlock few_states_block(const MambaSelectiveScan& p, int channels_per_block) {
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

// Where a lane's steps lie of a channel in a tensor (B, D, L), or of a group's first state in B or C.
template <typename T>
__device__ __forceinline__ T* lane_row(T* data, int64_t batch, int64_t batch_stride, int64_t row, int64_t stride, int place) {
    return data + batch * batch_stride + row * stride + place;
}

// A tile of B and C on its way, while the one before it is read.
template <typename T>
struct WaitingMatrices {
    WaitingSteps<T, kChannelLanes> B[2][kMostFewStates], C[2][kMostFewStates];
};

// Where a warp fetches B and C of the state of its number: even lanes B, odd ones C.
template <typename T, RowAccess kAccess>
struct GroupRows {
    const T* at;
    bool exist;

    __device__ __forceinline__ GroupRows(const MambaSelectiveScan& p, const ScanBlock& block, int place) {
        const int state = threadIdx.x / 32;
        const T* const B =
            lane_row(static_cast<const T*>(p.B), block.batch, p.B_batch_stride, block.group, p.B_group_stride, place);
        const T* const C =
            lane_row(static_cast<const T*>(p.C), block.batch, p.C_batch_stride, block.group, p.C_group_stride, place);
        at = channel_of_warp() != 0 ? C + state * p.C_dstate_stride : B + state * p.B_dstate_stride;
        exist = state < static_cast<int>(p.dstate);
    }

    // Of a tile, and moves on.
    __device__ __forceinline__ void fetch(WaitingMatrices<T>& to, int stage, const LaneSteps<kAccess>& steps, int tile_first,
                                          int places) {
        if (exist) {
            const int state = threadIdx.x / 32;
            auto& matrix = channel_of_warp() != 0 ? to.C[stage][state] : to.B[stage][state];
            matrix.fetch(channel_lane(), steps, at, steps.count(tile_first));
        }
        at = opaque(at + places);
    }
};

}  // namespace mamba
