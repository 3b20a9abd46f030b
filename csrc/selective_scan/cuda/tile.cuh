// The layout that both directions of the CUDA scan share: who owns which channel, state and time step, how tiles are read
// from global memory, and how sums cross lanes.
//
// A block takes kChannels channels of one batch and group and walks the length in tiles of kTile steps. kLanes neighbouring
// lanes share one channel, kStates states each; time runs inside the thread. B and C are staged once a tile in shared memory
// and serve every channel of the block. Rows in shared memory run along time, so one 16-byte read gives a thread four steps.
#pragma once

#include "selective_scan/cuda/access.cuh"
#include "selective_scan/cuda/block.cuh"

namespace mamba {

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

// A slice of B and C to shared memory, and where seq_idx changes. kOne: only B, as float32.
template <typename T, class Layout, bool kOne>
__device__ __forceinline__ void stage_matrices(MatrixTile<T, Layout>& BC, StagedTile<T, Layout>& B, StagedTile<T, Layout>& C,
                                               int* resets, const int32_t* seq_idx, int64_t first_step,
                                               const MambaSelectiveScan& p) {
    if (is_reverse<Layout>(p)) {
        B.mirror();
        C.mirror();
    }
    __syncthreads();  // all have read the last ones
    if constexpr (kOne) {
        BC.put_one(B);
    } else {
        BC.put(B, C);
    }
    if (seq_idx != nullptr) {
        stage_resets<Layout>(resets, Layout::kTile, seq_idx, first_step, p);
    }
    __syncthreads();
}

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

}  // namespace mamba
