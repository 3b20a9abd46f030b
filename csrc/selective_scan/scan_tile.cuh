// The layout that both directions of the CUDA scan share: who owns which channel, state and time step, how tiles are read
// from global memory, and how sums cross lanes.
//
// A block takes kChannels channels of one batch and group and walks the length in tiles of kTile steps. kLanes neighbouring
// lanes share one channel, kStates states each; time runs inside the thread. B and C are staged once a tile in shared memory
// and serve every channel of the block. Rows in shared memory run along time, so one 16-byte read gives a thread four steps.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/cuda_vector.cuh"

namespace mamba {

template <int kLanes_, int kStates_, int kTile_, int kWarps_>
struct ScanLayout {
    static constexpr int kLanes = kLanes_;                    // lanes that share a channel
    static constexpr int kStates = kStates_;                  // states a lane holds: lane k has states k, k + kLanes, ...
    static constexpr int kTile = kTile_;                      // time steps staged at once
    static constexpr int kWarps = kWarps_;                    // warps a block
    static constexpr int kThreads = 32 * kWarps;              // threads a block
    static constexpr int kSlice = kLanes * kStates;           // states handled at once; a larger dstate takes several slices
    static constexpr int kWarpChannels = 32 / kLanes;         // channels a warp
    static constexpr int kChannels = kWarpChannels * kWarps;  // channels a block
    static constexpr int kRow = kTile + 4;                    // floats a row: 16-byte aligned, rows four banks apart
    // Element-wise work on a warp's own (kWarpChannels, kTile) elements: kPasses times kVector steps of one row a lane.
    static constexpr int kVector = kTile / kLanes < 8 ? kTile / kLanes : 8;
    static constexpr int kRowLanes = kTile / kVector;
    static constexpr int kPassRows = 32 / kRowLanes;
    static constexpr int kPasses = kWarpChannels / kPassRows;
    // Staging of (kSlice, kTile) of B and of C by the whole block.
    static constexpr int kStage = kSlice * kTile / kThreads;
    static constexpr int kStageVector = kStage < 8 ? kStage : 8;
    static constexpr int kStagePasses = kStage / kStageVector;
    static_assert(kPasses * kPassRows == kWarpChannels, "the element-wise passes must cover the warp's rows");
    static_assert(kStagePasses * kStageVector * kThreads == kSlice * kTile, "staging must cover the tile");
    static_assert(kLanes >= 4, "sums over states are transposed over four lanes");
};

// The channels of one block.
struct ScanBlock {
    int64_t batch;
    int64_t group;
    int64_t index;          // this block's number within its group
    int64_t first_channel;  // global channel number
    int channels;           // how many of the block's channels exist
};

__device__ __forceinline__ ScanBlock scan_block(const MambaSelectiveScan& p, int channels_per_block) {
    const int64_t group_channels = p.dim / p.ngroups;
    const int64_t group_blocks = (group_channels + channels_per_block - 1) / channels_per_block;
    ScanBlock block;
    int64_t rest = blockIdx.x;
    block.index = rest % group_blocks;
    rest /= group_blocks;
    block.group = rest % p.ngroups;
    block.batch = rest / p.ngroups;
    block.first_channel = block.group * group_channels + block.index * channels_per_block;
    const int64_t left = group_channels - block.index * channels_per_block;
    block.channels = static_cast<int>(left < channels_per_block ? left : channels_per_block);
    return block;
}

inline int64_t scan_grid(const MambaSelectiveScan& p, int channels_per_block) {
    const int64_t group_channels = p.dim / p.ngroups;
    return p.batch * p.ngroups * ((group_channels + channels_per_block - 1) / channels_per_block);
}

// ---- tiles ---------------------------------------------------------------------------------------------------------

// row[step ... step + kCount), zero from `length` on. aligned: row and steps allow vector access.
template <typename T, int kCount>
__device__ __forceinline__ Packed<T, kCount> load_steps(const T* row, int64_t step, int64_t length, bool aligned) {
    if (aligned && step + kCount <= length) {
        return packed_load<T, kCount>(row + step);
    }
    float values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        values[i] = step + i < length ? to_float(row[step + i]) : 0.0f;
    }
    return pack<T, kCount>(values);
}

template <typename T, int kCount>
__device__ __forceinline__ void store_steps(T* row, int64_t step, int64_t length, bool aligned, const float (&values)[kCount]) {
    if (aligned && step + kCount <= length) {
        packed_store<T, kCount>(row + step, pack<T, kCount>(values));
        return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (step + i < length) {
            row[step + i] = from_float<T>(values[i]);
        }
    }
}

// kCount floats to or from a row in shared memory, with accesses of up to 16 bytes.
template <int kCount>
__device__ __forceinline__ void write_row(float* row, const float (&values)[kCount]) {
    packed_store<float, kCount>(row, pack<float, kCount>(values));
}

template <int kCount>
__device__ __forceinline__ void read_row(float (&values)[kCount], const float* row) {
    unpack<float, kCount>(packed_load<float, kCount>(row), values);
}

// delta becomes dt: bias and softplus, and 0 from `valid` on, which leaves the state as it is.
template <int kCount>
__device__ __forceinline__ void time_steps(float (&dt)[kCount], float bias, bool use_softplus, int64_t valid) {
    if (use_softplus) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            dt[i] = softplus(dt[i] + bias);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            dt[i] += bias;
        }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        dt[i] = i < valid ? dt[i] : 0.0f;
    }
}

// B's or C's (slice, tile) on its way to shared memory: fetch() reads into registers early, put() converts and stores.
template <typename T, class Layout>
struct StagedTile {
    Packed<T, Layout::kStageVector> raw[Layout::kStagePasses];

    __device__ __forceinline__ void fetch(const T* base, int64_t dstate_stride, int64_t first_state, int64_t dstate,
                                          int64_t first_step, int64_t seqlen, bool aligned) {
#pragma unroll
        for (int pass = 0; pass < Layout::kStagePasses; ++pass) {
            const int item = (pass * Layout::kThreads + threadIdx.x) * Layout::kStageVector;
            const int64_t state = first_state + item / Layout::kTile;
            const int64_t step = first_step + item % Layout::kTile;
            raw[pass] =
                load_steps<T, Layout::kStageVector>(base + state * dstate_stride, step, state < dstate ? seqlen : 0, aligned);
        }
    }

    __device__ __forceinline__ void put(float* tile) const {
#pragma unroll
        for (int pass = 0; pass < Layout::kStagePasses; ++pass) {
            const int item = (pass * Layout::kThreads + threadIdx.x) * Layout::kStageVector;
            float wide[Layout::kStageVector];
            unpack<T, Layout::kStageVector>(raw[pass], wide);
            write_row(tile + item / Layout::kTile * Layout::kRow + item % Layout::kTile, wide);
        }
    }
};

struct Steps4 {
    float at[4];
};

__device__ __forceinline__ Steps4 read4(const float* row) {
    const float4 v = *reinterpret_cast<const float4*>(row);
    return Steps4{{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ Steps4 same4(float value) {
    return Steps4{{value, value, value, value}};
}

// Marks the tile's steps at which seq_idx changes. flags has kTile entries.
__device__ __forceinline__ void stage_resets(int* flags, int tile, const int32_t* seq_idx, int64_t first_step, int64_t seqlen) {
    for (int i = threadIdx.x; i < tile; i += blockDim.x) {
        const int64_t step = first_step + i;
        flags[i] = step > 0 && step < seqlen && seq_idx[step] != seq_idx[step - 1];
    }
}

// ---- sums across lanes -----------------------------------------------------------------------------------------------

// Adds four values over the lanes that differ in the bits kBit and 2 kBit; each lane keeps the sum number (lane / kBit) % 4.
// Three shuffles instead of eight.
template <int kBit>
__device__ __forceinline__ float transpose_sum4(const float (&v)[4], int lane) {
    const bool high = (lane & (2 * kBit)) != 0;
    float first = high ? v[2] : v[0];
    float second = high ? v[3] : v[1];
    first += __shfl_xor_sync(0xffffffffu, high ? v[0] : v[2], 2 * kBit);
    second += __shfl_xor_sync(0xffffffffu, high ? v[1] : v[3], 2 * kBit);
    const bool low = (lane & kBit) != 0;
    return (low ? second : first) + __shfl_xor_sync(0xffffffffu, low ? first : second, kBit);
}

// Sums four steps over the kLanes lanes of a channel; lane k < 4 of the channel returns the sum of step k.
template <int kLanes>
__device__ __forceinline__ float sum_over_states(const float (&v)[4], int lane) {
    float sum = transpose_sum4<1>(v, lane);
#pragma unroll
    for (int bit = 4; bit < kLanes; bit *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    }
    return sum;
}

}  // namespace mamba
