// Tiles of the forward scan in shared memory: what there is of a chunk's rows, M, and the rows of x; and what a launch is told.
#pragma once

#include "mamba3/cuda/forward/general_output.cuh"
#include "mamba3/cuda/forward/rotate_rows.cuh"
#include "mamba3/cuda/forward/walk.cuh"
#include "ssd/cuda/chunk_tile.cuh"

namespace mamba {

// kStates: dstate is at most that. kRows: of a chunk, its steps times the rank.
template <int kStates_, int kRows_>
struct Mamba3Sizes {
    static constexpr int kStates = kStates_;
    static constexpr int kRows = kRows_;
};

struct Mamba3ForwardLaunch : Mamba3WalkLaunch {
    float* rows;             // (B, L, R, H, P), or NULL: the rows of y, for mamba3_finish_kernel
    int32_t results;         // out and the final state; else a segment's state at its end from zero, and its decay
    int32_t ranks_log2;      // rows of a step in a tile
    int32_t q_rank, k_rank;  // the first of them
    int32_t adds;            // to rows and final_ssm
    int32_t words;           // pairs or halves of them are aligned pairs of neighbours in memory
    int32_t q_vectors, k_vectors, v_vectors;  // see load_tile
    Mamba3FinishVectors vectors;
};

// Pitches of the tiles of (rows, headdim), in elements.
constexpr int kMamba3XPitch = kMamba3StateRows + kTilePad;

// What M and the products need of each row of a chunk.
template <int kRows>
struct alignas(16) Mamba3RowValues {
    float high[kRows], low[kRows], gamma[kRows], scale[kRows], entering[kRows];
    float adding[kRows];  // what x k^T counts in the state behind the chunk
    int own[kRows];       // first row of the row's step
    int run[kRows];       // first row of its run, 0 or less for one that began before the chunk
    // Of each step.
    float dt[kMamba3MostSteps];
    float keep[kMamba3MostSteps];  // 0 where the step restarts, else 1
    int start[kMamba3MostSteps];
    float carry;
};

// Where M's 16 x 16 tiles (i, j) on and below the diagonal lie: row i beside row kTiles - 1 - i.
template <int kRows>
struct Mamba3MixTiles {
    static constexpr int kTiles = kRows / 16;
    static constexpr int kCount = kTiles * (kTiles + 1) / 2;
    static constexpr int kPitch = 16 * (kTiles + 1) + kTilePad;
    static constexpr int kSize = 16 * ((kTiles + 1) / 2) * kPitch;

    static __device__ __forceinline__ int offset(int i, int j) {
        const bool lower = i >= kTiles / 2;
        return 16 * ((lower ? kTiles - 1 - i : i) * kPitch + (lower ? j : kTiles - i + j));
    }
    static __device__ __forceinline__ int row(int tile) { return row_of_triangle<kTiles>(tile); }
};

// Shared memory of a block. The rows of y take the place of q and M. Behind it v's steps, where x's rows are not v's.
template <typename T, class Layout>
struct Mamba3ForwardShared {
    static constexpr int kRows = Layout::kRows;
    struct Scores {
        T q[kRows * PaddedTile<Layout::kStates>::kPitch];
        T M[Mamba3MixTiles<kRows>::kSize];
    };
    union {
        Scores scores;
        float y[kRows * kMamba3YPitch];
    };
    T k[kRows * PaddedTile<Layout::kStates>::kPitch];
    T x[kRows * kMamba3XPitch];
    typename Mamba3TurnSum<T>::Value turn_sums[kMamba3TurnSums<Layout::kStates>];
    Mamba3RowValues<kRows> values;

    __device__ __forceinline__ T* v(bool projects) { return projects ? reinterpret_cast<T*>(this + 1) : x; }
    static constexpr int64_t bytes(bool projects, int64_t steps) {
        const int64_t fixed = sizeof(Mamba3ForwardShared);
        return fixed + (projects ? steps * kMamba3XPitch * static_cast<int64_t>(sizeof(T)) : 0);
    }
    static constexpr int64_t bytes_at_most() { return bytes(true, kRows); }
};

// Blocks that a multiprocessor shall hold, see forward_blocks in ssd/cuda/forward.cuh.
template <class Layout>
constexpr int mamba3_forward_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100
    return Layout::kStates <= 128 ? 4 : 2;
#else
    return 2;
#endif
}

// What a thread loads of them: of the step of its row, and of the step of its number.
template <int kRows>
struct Mamba3RowLoads {
    float row[kMamba3Dt];
    float dt, carry;
    int start;
    bool has_row, has_step, exists;

    __device__ __forceinline__ Mamba3RowLoads(const Mamba3Chunks& chunks, const float* from, const Mamba3RankRows& rows) {
        static_assert(kRows <= kMamba3Threads && kMamba3MostSteps <= kMamba3Threads, "a thread each");
        const int thread = static_cast<int>(threadIdx.x), steps = static_cast<int>(chunks.steps);
        const int pitch = static_cast<int>(chunks.pitch);
        const int step = rows.step_of(thread);
        has_row = thread < kRows;
        has_step = thread < pitch;
        exists = step < steps;
        if (has_row) {
#pragma unroll
            for (int i = 0; i < kMamba3Dt; ++i) {
                row[i] = from[i * pitch + (exists ? step : steps - 1)];
            }
        }
        if (has_step) {
            dt = from[kMamba3Dt * pitch + thread];
            start = __float_as_int(from[kMamba3Start * pitch + thread]);
        }
        if (thread == 0) {
            carry = from[kMamba3Entering * pitch + steps - 1];
        }
    }
    __device__ __forceinline__ void store(Mamba3RowValues<kRows>& values, const Mamba3RankRows& rows) const {
        const int thread = static_cast<int>(threadIdx.x);
        if (has_row) {
            const float scale = exists ? row[kMamba3Scale] : 0.0f;
            values.high[thread] = row[kMamba3High];
            values.low[thread] = row[kMamba3Low];
            values.gamma[thread] = exists ? row[kMamba3Gamma] : 0.0f;
            values.scale[thread] = scale;
            values.entering[thread] = row[kMamba3Entering];
            values.adding[thread] = row[kMamba3Leaving] != 0.0f ? row[kMamba3Leaving] * scale : 0.0f;  // a NaN stays there
            values.own[thread] = rows.step_of(thread) * rows.ranks;
            values.run[thread] = __float_as_int(row[kMamba3Start]) * rows.ranks;
        }
        if (has_step) {
            values.dt[thread] = dt;
            values.start[thread] = start;
            values.keep[thread] = start == thread ? 0.0f : 1.0f;
        }
        if (thread == 0) {
            values.carry = carry;
        }
    }
};

// x's rows from v's: times mimo_v.
template <typename T>
__device__ __forceinline__ void project_rows(T* x_tile, const T* v_tile, const Mamba3RankRows& rows, int tile_rows,
                                             const float* weight, int64_t weight_pitch, int ranks, int steps, int columns) {
    constexpr int kVector = 8;
    constexpr int kRowVectors = kMamba3StateRows / kVector;
    for (int i = threadIdx.x; i < tile_rows * kRowVectors; i += kMamba3Threads) {
        const int row = i / kRowVectors, column = i % kRowVectors * kVector;
        const int step = rows.step_of(row), rank = row - step * rows.ranks;
        float values[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            values[j] = 0.0f;
        }
        if (step < steps && rank < ranks) {
            unpack<T, kVector>(packed_load<T, kVector>(v_tile + step * kMamba3XPitch + column), values);
            if (weight != nullptr) {
#pragma unroll
                for (int j = 0; j < kVector; ++j) {
                    values[j] *= column + j < columns ? weight[rank * weight_pitch + column + j] : 0.0f;
                }
            }
        }
        const Packed<T, kVector> packed = pack<T, kVector>(values);
#pragma unroll
        for (int j = 0; j < static_cast<int>(sizeof(packed.word) / 16); ++j) {
            reinterpret_cast<uint4*>(x_tile + row * kMamba3XPitch + column)[j] =
                make_uint4(packed.word[4 * j], packed.word[4 * j + 1], packed.word[4 * j + 2], packed.word[4 * j + 3]);
        }
    }
}

// M (row t, row s) = (q_t . k_s) times what s counts in t.
template <typename T, class Layout>
__device__ __forceinline__ void mix_rows(T* M_tile, const T* q_tile, const T* k_tile,
                                         const Mamba3RowValues<Layout::kRows>& values, int ranks, int warp, int lane) {
    using Mix = Mamba3MixTiles<Layout::kRows>;
    constexpr int kPitch = PaddedTile<Layout::kStates>::kPitch;
#pragma unroll 1
    for (int tile = warp; tile < Mix::kCount; tile += kMamba3Warps) {
        const int i = Mix::row(tile);
        const int j = tile - i * (i + 1) / 2;
        float sums[4][4] = {};  // two of each half, so that products need not wait for each other
#pragma unroll
        for (int k = 0; k < Layout::kStates / 16; ++k) {
            Operand<T> a, b;
            load_a<T>(a, q_tile + 16 * i * kPitch + 16 * k, kPitch, lane);
            load_b<T>(b, k_tile + 16 * j * kPitch + 16 * k, kPitch, lane);
            multiply_add<T>(sums[k % 2], a, b, 0);
            multiply_add<T>(sums[2 + k % 2], a, b, 1);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + 8 * half;
            const int t = 16 * i + row;
            const float high = values.high[t], low = values.low[t], gamma = values.gamma[t];
            const int own = values.own[t], run = values.run[t];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int column = 8 * side + lane % 4 * 2;
                const int s = 16 * j + column;
                const float2 earlier = *reinterpret_cast<const float2*>(&values.high[s]);
                const float2 earlier_low = *reinterpret_cast<const float2*>(&values.low[s]);
                const float2 scale = *reinterpret_cast<const float2*>(&values.scale[s]);
                const auto weigh = [&](int from, float from_high, float from_low, float from_scale, float sum) {
                    const float decay = exp2_fast((high - from_high) + (low - from_low)) * from_scale;
                    const float earlier_step = from >= run ? decay : 0.0f;
                    const float weight = from < own ? earlier_step : gamma;
                    return from < own + ranks ? weight * sum : 0.0f;
                };
                const float left = sums[2 * side][2 * half] + sums[2 * side + 1][2 * half];
                const float right = sums[2 * side][2 * half + 1] + sums[2 * side + 1][2 * half + 1];
                store_pair<T>(M_tile + Mix::offset(i, j) + row * Mix::kPitch + column,
                              weigh(s, earlier.x, earlier_low.x, scale.x, left),
                              weigh(s + 1, earlier.y, earlier_low.y, scale.y, right));
            }
        }
    }
}

}  // namespace mamba
