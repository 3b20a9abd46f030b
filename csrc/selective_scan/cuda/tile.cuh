// The layout that both directions of the CUDA scan share: who owns which channel, state and time step, how tiles are read
// from global memory, and how sums cross lanes.
//
// A block takes kChannels channels of one batch and group and walks the length in tiles of kTile steps. kLanes neighbouring
// lanes share one channel, kStates states each; time runs inside the thread. B and C are staged once a tile in shared memory
// and serve every channel of the block. Rows in shared memory run along time, so one 16-byte read gives a thread four steps.
#pragma once

#include "common/cuda_vector.cuh"
#include "selective_scan/layouts.h"

namespace mamba {

// The channels and the part of the length that one block takes.
struct ScanBlock {
    int64_t batch;
    int64_t group;
    int64_t index;          // this block's number within its group
    int64_t first_channel;  // global channel number
    int channels;           // how many of the block's channels exist
    int64_t segment;        // 0 <= segment < p.segments
    int64_t begin;          // first step of the segment
    int64_t end;            // its end
};

// Steps a segment: whole checkpoints.
__host__ __device__ inline int64_t segment_steps(int64_t seqlen, int64_t segments) {
    const int64_t tiles = ceil_div(seqlen, MAMBA_SCAN_CHECKPOINT);
    return ceil_div(tiles, segments) * MAMBA_SCAN_CHECKPOINT;
}

__device__ __forceinline__ ScanBlock scan_block(const MambaSelectiveScan& p, int channels_per_block, int64_t first_segment) {
    const int64_t group_channels = p.dim / p.ngroups;
    const int64_t group_blocks = ceil_div(group_channels, channels_per_block);
    ScanBlock block;
    int64_t rest = blockIdx.x;
    block.index = rest % group_blocks;
    rest /= group_blocks;
    block.group = rest % p.ngroups;
    rest /= p.ngroups;
    block.batch = rest % p.batch;
    block.segment = rest / p.batch + first_segment;
    block.first_channel = block.group * group_channels + block.index * channels_per_block;
    const int64_t left = group_channels - block.index * channels_per_block;
    block.channels = static_cast<int>(left < channels_per_block ? left : channels_per_block);
    const int64_t steps = segment_steps(p.seqlen, p.segments);
    block.begin = block.segment * steps;
    block.end = block.begin + steps < p.seqlen ? block.begin + steps : p.seqlen;
    return block;
}

inline int64_t scan_grid(const MambaSelectiveScan& p, int channels_per_block, int64_t segments) {
    return segments * p.batch * p.ngroups * ceil_div(p.dim / p.ngroups, channels_per_block);
}

// What a segment passes on, in the workspace: the state it would end with (in backward: begin with) if it started from zero,
// and the factor by which it multiplies what it starts with. A factor below 0 stands for a restart, which passes nothing on.
__device__ __forceinline__ int64_t workspace_at(const MambaSelectiveScan& p, int64_t segment, int64_t state) {
    return segment * 2 * p.batch * p.dim * p.dstate + state;
}

// Takes a lane's states through `count` segments: segment, segment + step, ... state: number of its first one; the s-th lies
// s * kLanes further and exists where that is below `states`. Reads of several segments are under way at once.
template <class Layout>
__device__ __forceinline__ void pass_through_segments(const MambaSelectiveScan& p, float (&carry)[Layout::kStates],
                                                      int64_t segment, int step, int count, int64_t state, int states) {
    constexpr int kAtOnce = 16 / Layout::kStates;
    for (int first = 0; first < count; first += kAtOnce) {
        float value[kAtOnce][Layout::kStates], factor[kAtOnce][Layout::kStates];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t at = workspace_at(p, segment + (first + i) * step, state);
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                const bool exists = first + i < count && s * Layout::kLanes < states;
                value[i][s] = exists ? p.workspace[at + s * Layout::kLanes] : 0.0f;
                factor[i][s] = exists ? p.workspace[at + s * Layout::kLanes + p.batch * p.dim * p.dstate] : 1.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                // A carry of zero passes zero on even where the factor has overflowed, as it would step by step.
                const bool fresh = factor[i][s] < 0.0f || carry[s] == 0.0f;
                carry[s] = fresh ? value[i][s] : fmaf(factor[i][s], carry[s], value[i][s]);
            }
        }
    }
}

// ---- tiles ---------------------------------------------------------------------------------------------------------

// kCount elements from `at` on, zero from `valid` on (which may be negative). kAligned: `at` is a multiple of 16 bytes (or of
// kCount elements) and valid of kCount, so that one predicated access does.
template <typename T, int kCount, bool kAligned>
__device__ __forceinline__ Packed<T, kCount> load_steps(const T* at, int valid) {
    if constexpr (kAligned) {
        Packed<T, kCount> packed = packed_zero<T, kCount>();
        if (valid > 0) {
            packed = packed_load<T, kCount>(at);
        }
        return packed;
    } else {
        float values[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = i < valid ? to_float(at[i]) : 0.0f;
        }
        return pack<T, kCount>(values);
    }
}

template <typename T, int kCount>
__device__ __forceinline__ void store_steps(T* at, int valid, bool aligned, const float (&values)[kCount]) {
    if (aligned) {
        if (valid > 0) {
            packed_store<T, kCount>(at, pack<T, kCount>(values));
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i < valid) {
            at[i] = from_float<T>(values[i]);
        }
    }
}

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

// A in base 2, and finite, so that a step past the end, whose dt is 0, leaves the state as it is.
__device__ __forceinline__ float decay_exponent(float A) {
    const float exponent = A * kLog2e;
    return exponent < -3.4e38f ? -3.4e38f : exponent;  // NaN stays
}

// delta becomes dt: bias and softplus, and 0 from `valid` on, which leaves the state as it is.
template <int kCount>
__device__ __forceinline__ void time_steps(float (&dt)[kCount], float bias, bool use_softplus, int valid) {
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
    if (valid < kCount) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            dt[i] = i < valid ? dt[i] : 0.0f;
        }
    }
}

// B's or C's (slice, tile) on its way to shared memory, fetched into registers early.
template <typename T, class Layout>
struct StagedTile {
    Packed<T, Layout::kStageVector> raw[Layout::kStagePasses];

    // The thread's first element of a tile, and the states between its passes.
    static constexpr int kPassStates = Layout::kThreads * Layout::kStageVector / Layout::kTile;
    static __device__ __forceinline__ int first_state() { return threadIdx.x * Layout::kStageVector / Layout::kTile; }
    static __device__ __forceinline__ int first_step() { return threadIdx.x * Layout::kStageVector % Layout::kTile; }

    // at: the thread's first element; states, steps: how many of the tile exist.
    template <bool kAligned>
    __device__ __forceinline__ void fetch(const T* at, int64_t dstate_stride, int states, int steps) {
#pragma unroll
        for (int pass = 0; pass < Layout::kStagePasses; ++pass) {
            const bool exists = first_state() + pass * kPassStates < states;
            raw[pass] = load_steps<T, Layout::kStageVector, kAligned>(at + pass * kPassStates * dstate_stride,
                                                                      exists ? steps - first_step() : 0);
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int pass = 0; pass < Layout::kStagePasses; ++pass) {
            raw[pass] = packed_zero<T, Layout::kStageVector>();
        }
    }
};

// Where a thread's first elements of variable B and C lie, at the tensors' first step.
template <typename T, class Layout>
struct MatrixRows {
    const T* B;
    const T* C;

    __device__ __forceinline__ MatrixRows(const MambaSelectiveScan& p, const ScanBlock& block) {
        using Staged = StagedTile<T, Layout>;
        B = static_cast<const T*>(p.B) + block.batch * p.B_batch_stride + block.group * p.B_group_stride +
            Staged::first_state() * p.B_dstate_stride + Staged::first_step();
        C = static_cast<const T*>(p.C) + block.batch * p.C_batch_stride + block.group * p.C_group_stride +
            Staged::first_state() * p.C_dstate_stride + Staged::first_step();
    }
};

// Fetches a tile of B and C; one that does not vary over time, or is not wanted, has no part in it.
template <typename T, class Layout, bool kAligned>
__device__ __forceinline__ void fetch_BC(StagedTile<T, Layout>& B, StagedTile<T, Layout>& C, const MambaSelectiveScan& p,
                                         const MatrixRows<T, Layout>& rows, int first_state, int64_t first_step, int steps,
                                         bool want_B = true, bool want_C = true) {
    const int states = static_cast<int>(p.dstate) - first_state;
    if (want_B && p.variable_B) {
        B.template fetch<kAligned>(rows.B + first_state * p.B_dstate_stride + first_step, p.B_dstate_stride, states, steps);
    } else {
        B.clear();
    }
    if (want_C && p.variable_C) {
        C.template fetch<kAligned>(rows.C + first_state * p.C_dstate_stride + first_step, p.C_dstate_stride, states, steps);
    } else {
        C.clear();
    }
}

// B and C of a tile in shared memory. The scan is bound by how much it reads from there, so 16-bit elements stay as they are,
// B in the low and C in the high half of a word.
template <typename T, class Layout>
struct MatrixTile {
    static constexpr bool kPaired = sizeof(T) == 2;
    static constexpr int kSize = Layout::kSlice * Layout::kRow;
    float words[kPaired ? kSize : 2 * kSize];

    // kCount steps of one state to element `at` of the tile.
    template <int kCount>
    __device__ __forceinline__ void put_steps(int at, const Packed<T, kCount>& B, const Packed<T, kCount>& C) {
        float wide[kCount];
        if constexpr (kPaired) {
#pragma unroll
            for (int i = 0; i < kCount / 2; ++i) {
                wide[2 * i] = __uint_as_float(__byte_perm(B.word[i], C.word[i], 0x5410));
                wide[2 * i + 1] = __uint_as_float(__byte_perm(B.word[i], C.word[i], 0x7632));
            }
            write_row(words + at, wide);
        } else {
            unpack<T, kCount>(B, wide);
            write_row(words + at, wide);
            unpack<T, kCount>(C, wide);
            write_row(words + kSize + at, wide);
        }
    }

    __device__ __forceinline__ void put(const StagedTile<T, Layout>& B, const StagedTile<T, Layout>& C) {
#pragma unroll
        for (int pass = 0; pass < Layout::kStagePasses; ++pass) {
            const int item = (pass * Layout::kThreads + threadIdx.x) * Layout::kStageVector;
            put_steps<Layout::kStageVector>(item / Layout::kTile * Layout::kRow + item % Layout::kTile, B.raw[pass],
                                            C.raw[pass]);
        }
    }

    // Four steps of one state from element `at` of the tile.
    __device__ __forceinline__ void read(int at, Steps4& B, Steps4& C) const {
        B = read4(words + at);
        if constexpr (kPaired) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 pair = unpack2<T>(__float_as_uint(B.at[j]));
                B.at[j] = pair.x;
                C.at[j] = pair.y;
            }
        } else {
            C = read4(words + kSize + at);
        }
    }

    __device__ __forceinline__ Steps4 read_B(int at) const {
        Steps4 B = read4(words + at);
        if constexpr (kPaired) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                B.at[j] = unpack2<T>(__float_as_uint(B.at[j])).x;
            }
        }
        return B;
    }

    // Where only one of the two is wanted it lies here as float32.
    __device__ __forceinline__ void put_one(const StagedTile<T, Layout>& matrix) {
#pragma unroll
        for (int pass = 0; pass < Layout::kStagePasses; ++pass) {
            const int item = (pass * Layout::kThreads + threadIdx.x) * Layout::kStageVector;
            float wide[Layout::kStageVector];
            unpack<T, Layout::kStageVector>(matrix.raw[pass], wide);
            write_row(words + item / Layout::kTile * Layout::kRow + item % Layout::kTile, wide);
        }
    }
    __device__ __forceinline__ Steps4 read_one(int at) const { return read4(words + at); }
};

// A lane's share of the element-wise rows. at: its first element in each row; valid: how many elements from there exist.
template <typename T, class Layout, bool kAligned>
__device__ __forceinline__ void fetch_rows(Packed<T, Layout::kVector> (&out)[Layout::kPasses],
                                           const T* const (&at)[Layout::kPasses], int64_t first_step,
                                           const int (&valid)[Layout::kPasses]) {
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        out[pass] = load_steps<T, Layout::kVector, kAligned>(at[pass] + first_step, valid[pass]);
    }
}

// Marks the tile's steps at which seq_idx changes. flags has kTile entries.
__device__ __forceinline__ void stage_resets(int* flags, int tile, const int32_t* seq_idx, int64_t first_step, int64_t seqlen) {
    for (int i = threadIdx.x; i < tile; i += blockDim.x) {
        const int64_t step = first_step + i;
        flags[i] = step > 0 && step < seqlen && seq_idx[step] != seq_idx[step - 1];
    }
}

// ---- sums across lanes -----------------------------------------------------------------------------------------------

// Sums kValues values over the lanes that differ in the bits kBit, kBit / 2, ..., kLow. While a lane holds several values,
// it hands half of them to its partner and keeps the other half, so that n values take n shuffles instead of n a bit.
template <int kValues, int kBit, int kLow, int kCapacity>
__device__ __forceinline__ void transpose_sum(float (&v)[kCapacity], int lane) {
    if constexpr (kBit >= kLow && kValues > 1) {
        constexpr int kHalf = kValues / 2;
        const bool high = (lane & kBit) != 0;
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            const float keep = high ? v[i + kHalf] : v[i];
            const float give = high ? v[i] : v[i + kHalf];
            v[i] = keep + __shfl_xor_sync(0xffffffffu, give, kBit);
        }
        transpose_sum<kHalf, kBit / 2, kLow>(v, lane);
    } else if constexpr (kBit >= kLow) {
        v[0] += __shfl_xor_sync(0xffffffffu, v[0], kBit);
        transpose_sum<1, kBit / 2, kLow>(v, lane);
    }
}

// Stores what transpose_sum left of kSteps steps' sums over kMembers lanes that are kSpacing apart: into (add: onto)
// row[0 ... kSteps).
template <int kSteps, int kMembers, int kSpacing>
__device__ __forceinline__ void store_sums(float* row, const float (&v)[kSteps], int lane, bool add) {
    constexpr int kLeft = kSteps > kMembers ? kSteps / kMembers : 1;    // sums a lane holds
    constexpr int kCopies = kMembers > kSteps ? kMembers / kSteps : 1;  // lanes that hold the same sum
    const int member = lane / kSpacing % kMembers;
    if (member % kCopies == 0) {
        float* to = row + member / kCopies * kLeft;
        float sums[kLeft];
#pragma unroll
        for (int i = 0; i < kLeft; ++i) {
            sums[i] = add ? to[i] + v[i] : v[i];
        }
        write_row(to, sums);
    }
}

// Sums kSteps steps over kMembers lanes that are kSpacing apart and puts the sums into (add: onto) row[0 ... kSteps).
template <int kSteps, int kMembers, int kSpacing>
__device__ __forceinline__ void sum_to_row(float* row, float (&v)[kSteps], int lane, bool add) {
    transpose_sum<kSteps, kMembers * kSpacing / 2, kSpacing>(v, lane);
    store_sums<kSteps, kMembers, kSpacing>(row, v, lane, add);
}

}  // namespace mamba
