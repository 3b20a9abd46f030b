// The layout that both directions of the CUDA scan share: who owns which channel, state and time step, how tiles are read
// from global memory, and how sums cross lanes.
//
// A block takes kChannels channels of one batch and group and walks the length in tiles of kTile steps. kLanes neighbouring
// lanes share one channel, kStates states each; time runs inside the thread. B and C are staged once a tile in shared memory
// and serve every channel of the block. Rows in shared memory run along time, so one 16-byte read gives a thread four steps.
#pragma once

#include "selective_scan/cuda/access.cuh"
#include "selective_scan/cuda/lanes.cuh"

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

// Where the step `step` of the scan and the count - 1 behind it begin in a row of memory, or in a tile that begins it.
// A block counts steps as they are scanned, whichever way it goes; only memory has them in the opposite order with `reverse`.
template <class Layout>
__device__ __forceinline__ bool is_reverse(const MambaSelectiveScan& p) {
    return Layout::kCall == ScanCall::kAny ? p.reverse != 0 : Layout::kCall == ScanCall::kMambaReverse;
}
template <class Layout>
__device__ __forceinline__ int64_t place_of(const MambaSelectiveScan& p, int64_t step, int count) {
    return is_reverse<Layout>(p) ? p.seqlen - count - step : step;
}
template <class Layout>
__device__ __forceinline__ int place_in_tile(const MambaSelectiveScan& p, int step, int count) {
    return is_reverse<Layout>(p) ? Layout::kTile - count - step : step;
}

// Whether a tensor has elements around the rows of a batch entry, as many as vectors that hold elements of these may reach to.
__device__ __forceinline__ bool has_neighbours(const void* data, int64_t batch_stride, const MambaSelectiveScan& p,
                                               const ScanBlock& block) {
    const bool begins = block.batch > 0 || reinterpret_cast<uintptr_t>(data) % 16 == 0;
    return data == nullptr || (begins && block.batch + 1 < p.batch && batch_stride >= 8);
}
template <class Layout>
__device__ __forceinline__ bool inputs_have_neighbours(const MambaSelectiveScan& p, const ScanBlock& block) {
    return has_neighbours(p.u, p.u_batch_stride, p, block) && has_neighbours(p.delta, p.delta_batch_stride, p, block) &&
           has_neighbours(p.z, p.z_batch_stride, p, block) &&
           has_neighbours(Layout::kMamba || p.variable_B ? p.B : nullptr, p.B_batch_stride, p, block) &&
           has_neighbours(Layout::kMamba || p.variable_C ? p.C : nullptr, p.C_batch_stride, p, block);
}

// What a call has, of which the layouts of Mamba's calls know that it does.
template <class Layout>
__device__ __forceinline__ bool is_gated(const MambaSelectiveScan& p) {
    return Layout::kMamba || p.z != nullptr;
}
template <class Layout>
__device__ __forceinline__ bool has_softplus(const MambaSelectiveScan& p) {
    return Layout::kMamba || p.delta_softplus != 0;
}
// Whether results are added to what is there: with reverse alone.
template <class Layout>
__device__ __forceinline__ bool adds(const MambaSelectiveScan& p) {
    return (Layout::kCall == ScanCall::kAny || Layout::kCall == ScanCall::kMambaReverse) && p.add != 0;
}

inline int64_t scan_grid(const MambaSelectiveScan& p, int channels_per_block, int64_t segments) {
    return segments * p.batch * p.ngroups * ceil_div(p.dim / p.ngroups, channels_per_block);
}

// What a segment passes on, in the workspace: the state it would end with (in backward: begin with) if it started from zero,
// and the factor by which it multiplies what it starts with. A factor below 0 stands for a restart, which passes nothing on.
__device__ __forceinline__ int64_t workspace_at(const MambaSelectiveScan& p, int64_t segment, int64_t state) {
    return segment * 2 * p.batch * p.dim * p.dstate + state;
}

// The numbers of a lane's states in the workspace, and whether they exist.
template <class Layout>
struct SegmentStates {
    int64_t state[Layout::kEach][Layout::kStates];
    bool exists[Layout::kEach][Layout::kStates];
};

// Takes a lane's states through `count` segments: segment, segment + step, ... Reads of several are under way at once.
template <class Layout>
__device__ __forceinline__ void pass_through_segments(const MambaSelectiveScan& p, Chains<Layout>& carry,
                                                      const SegmentStates<Layout>& at, int64_t segment, int step, int count) {
    constexpr int kAtOnce = 16 / Layout::kStates;
#pragma unroll
    for (int c = 0; c < Layout::kEach; ++c) {
        for (int first = 0; first < count; first += kAtOnce) {
            float value[kAtOnce][Layout::kStates], factor[kAtOnce][Layout::kStates];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    const int64_t from = workspace_at(p, segment + (first + i) * step, at.state[c][s]);
                    const bool exists = first + i < count && at.exists[c][s];
                    value[i][s] = exists ? p.workspace[from] : 0.0f;
                    factor[i][s] = exists ? p.workspace[from + p.batch * p.dim * p.dstate] : 1.0f;
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    // A carry of zero passes zero on even where the factor has overflowed, as it would step by step.
                    const bool fresh = factor[i][s] < 0.0f || carry[c][s] == 0.0f;
                    carry[c][s] = fresh ? value[i][s] : fmaf(factor[i][s], carry[c][s], value[i][s]);
                }
            }
        }
    }
}

// ---- tiles ---------------------------------------------------------------------------------------------------------

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

// delta, of dtype T, becomes dt: bias and softplus, and 0 from `valid` on, which leaves the state as it is.
template <typename T, int kCount>
__device__ __forceinline__ void time_steps(float (&dt)[kCount], float bias, bool use_softplus, int valid) {
    if (use_softplus) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            dt[i] = kIs16Bit<T> ? softplus_short(dt[i] + bias) : softplus(dt[i] + bias);
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
    template <Access kAccess>
    __device__ __forceinline__ void fetch(const T* at, int64_t dstate_stride, int states, int steps, bool reverse) {
        const int left = kAccess == Access::kShifted ? Layout::kStageVector : steps - first_step();
#pragma unroll
        for (int pass = 0; pass < Layout::kStagePasses; ++pass) {
            const bool exists = Layout::kWhole || first_state() + pass * kPassStates < states;
            raw[pass] = load_steps<T, Layout::kStageVector, kAccess>(at + pass * kPassStates * dstate_stride, exists ? left : 0,
                                                                     reverse);
        }
    }

    // From the order of memory to that of the scan, where they are not the same.
    __device__ __forceinline__ void mirror() {
#pragma unroll
        for (int pass = 0; pass < Layout::kStagePasses; ++pass) {
            mamba::mirror(raw[pass]);
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int pass = 0; pass < Layout::kStagePasses; ++pass) {
            raw[pass] = packed_zero<T, Layout::kStageVector>();
        }
    }
};

// Where a thread's first elements of variable B and C lie, in a tile that begins memory's rows.
template <typename T, class Layout>
struct MatrixRows {
    const T* B;
    const T* C;

    __device__ __forceinline__ MatrixRows(const MambaSelectiveScan& p, const ScanBlock& block) {
        using Staged = StagedTile<T, Layout>;
        const int place = place_in_tile<Layout>(p, Staged::first_step(), Layout::kStageVector);
        B = static_cast<const T*>(p.B) + block.batch * p.B_batch_stride + block.group * p.B_group_stride +
            Staged::first_state() * p.B_dstate_stride + place;
        C = static_cast<const T*>(p.C) + block.batch * p.C_batch_stride + block.group * p.C_group_stride +
            Staged::first_state() * p.C_dstate_stride + place;
    }
};

// Fetches a tile of B and C; one that does not vary over time, or is not wanted, has no part in it. place: of the tile.
template <Access kAccess, typename T, class Layout>
__device__ __forceinline__ void fetch_BC(StagedTile<T, Layout>& B, StagedTile<T, Layout>& C, const MambaSelectiveScan& p,
                                         const MatrixRows<T, Layout>& rows, int first_state, int64_t place, int steps,
                                         bool want_B = true, bool want_C = true) {
    const int states = static_cast<int>(p.dstate) - first_state;
    if (want_B && (Layout::kMamba || p.variable_B)) {
        B.template fetch<kAccess>(rows.B + first_state * p.B_dstate_stride + place, p.B_dstate_stride, states, steps,
                                  is_reverse<Layout>(p));
    } else {
        B.clear();
    }
    if (want_C && (Layout::kMamba || p.variable_C)) {
        C.template fetch<kAccess>(rows.C + first_state * p.C_dstate_stride + place, p.C_dstate_stride, states, steps,
                                  is_reverse<Layout>(p));
    } else {
        C.clear();
    }
}

// B and C of a tile in shared memory. Where the scan is bound by how much it reads from there, 16-bit elements stay as they
// are, B in the low and C in the high half of a word.
template <typename T, class Layout>
struct MatrixTile {
    static constexpr bool kPaired = kIs16Bit<T> && Layout::kPairs;
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

    // Four steps of one state, from a place in words on.
    static __device__ __forceinline__ void read(const float* at, Steps4& B, Steps4& C) {
        B = read4(at);
        if constexpr (kPaired) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 pair = unpack2<T>(__float_as_uint(B.at[j]));
                B.at[j] = pair.x;
                C.at[j] = pair.y;
            }
        } else {
            C = read4(at + kSize);
        }
    }

    static __device__ __forceinline__ Steps4 read_B(const float* at) {
        Steps4 B = read4(at);
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
    static __device__ __forceinline__ Steps4 read_one(const float* at) { return read4(at); }
};

// Where the elements of a lane lie in u, delta and z, in a tile that begins memory's rows: row `pass` is kPassRows channels
// further.
template <typename T, class Layout>
struct ElementRows {
    const T* u;
    const T* delta;
    const T* z;
    int64_t first_channel;
    int tile_row;  // row in the block's tiles
    int step;      // first step of the lane in a tile
    int place;     // of the lane's steps in a tile of memory
    bool reverse;
    bool exists[Layout::kPasses];

    __device__ __forceinline__ ElementRows(const MambaSelectiveScan& p, const ScanBlock& block) {
        const int lane = threadIdx.x % 32;
        step = lane % Layout::kRowLanes * Layout::kVector;
        place = place_in_tile<Layout>(p, step, Layout::kVector);
        reverse = is_reverse<Layout>(p);
        tile_row = threadIdx.x / 32 * Layout::kWarpChannels + lane / Layout::kRowLanes;
        first_channel = block.first_channel + tile_row;
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            exists[pass] = Layout::kWhole || row(pass) < block.channels;
        }
        u = at(static_cast<const T*>(p.u), block, p.u_batch_stride, p.u_dim_stride);
        delta = at(static_cast<const T*>(p.delta), block, p.delta_batch_stride, p.delta_dim_stride);
        z = at(static_cast<const T*>(p.z), block, p.z_batch_stride, p.z_dim_stride);
    }

    __device__ __forceinline__ int row(int pass) const { return tile_row + pass * Layout::kPassRows; }
    __device__ __forceinline__ int64_t channel(int pass) const { return first_channel + pass * Layout::kPassRows; }
    // Where they lie in another tensor.
    template <typename Element>
    __device__ __forceinline__ Element* at(Element* tensor, const ScanBlock& block, int64_t batch_stride,
                                           int64_t dim_stride) const {
        return tensor + block.batch * batch_stride + first_channel * dim_stride + place;
    }
    // How many of the lane's elements exist in a tile of so many steps; of steps alone, in a row that exists.
    __device__ __forceinline__ int valid(int pass, int steps) const { return exists[pass] ? valid_steps(steps) : 0; }
    __device__ __forceinline__ int valid_steps(int steps) const { return Layout::kWhole ? Layout::kVector : steps - step; }
};

// A lane's elements of a tile in one tensor. at: where they would lie if the tile began its row. tile: where that lies.
template <typename T, class Layout>
struct TileElements {
    Packed<T, Layout::kVector> row[Layout::kPasses];

    template <Access kAccess>
    __device__ __forceinline__ void fetch(const ElementRows<T, Layout>& rows, const T* at, int64_t dim_stride, int64_t tile,
                                          int steps) {
        const int left = kAccess == Access::kShifted ? Layout::kVector : rows.valid_steps(steps);
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            row[pass] = load_steps<T, Layout::kVector, kAccess>(at + tile + pass * Layout::kPassRows * dim_stride,
                                                                rows.exists[pass] ? left : 0, rows.reverse);
        }
    }
    // From the order of memory to that of the scan, where they are not the same.
    __device__ __forceinline__ void mirror() {
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            mamba::mirror(row[pass]);
        }
    }
    __device__ __forceinline__ void read(float (&values)[Layout::kVector], int pass) const {
        unpack<T, Layout::kVector>(row[pass], values);
    }
};

// Asks for a lane's elements of a tile to come into the L2 cache.
template <typename T, class Layout>
__device__ __forceinline__ void prefetch_elements(const ElementRows<T, Layout>& rows, const T* at, int64_t dim_stride,
                                                  int64_t tile) {
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        if (rows.exists[pass]) {
            prefetch_to_L2(at + tile + pass * Layout::kPassRows * dim_stride);
        }
    }
}

// A parameter of the block's channels (D), 0 without it.
template <class Layout>
__device__ __forceinline__ void stage_parameter(float* to, const float* parameter, const ScanBlock& block) {
    for (int i = threadIdx.x; i < Layout::kChannels; i += Layout::kThreads) {
        to[i] = i < block.channels && parameter != nullptr ? parameter[block.first_channel + i] : 0.0f;
    }
}

template <class Layout>
__device__ __forceinline__ void clear_resets(int* flags) {
    for (int i = threadIdx.x; i < Layout::kTile; i += Layout::kThreads) {
        flags[i] = 0;
    }
}

// Marks the tile's steps at which seq_idx changes. flags has kTile entries.
template <class Layout>
__device__ __forceinline__ void stage_resets(int* flags, int tile, const int32_t* seq_idx, int64_t first_step,
                                             const MambaSelectiveScan& p) {
    for (int i = threadIdx.x; i < tile; i += blockDim.x) {
        const int64_t step = first_step + i;
        flags[i] =
            step > 0 && step < p.seqlen && seq_idx[place_of<Layout>(p, step, 1)] != seq_idx[place_of<Layout>(p, step - 1, 1)];
    }
}

}  // namespace mamba
