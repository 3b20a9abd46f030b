// The rows of q and k of a chunk in shared memory: copied from the group's, then the head's bias added and turned in place.
#pragma once

#include "mamba3/cuda/chunks.cuh"
#include "ssd/cuda/tensor_core.cuh"

namespace mamba {

constexpr int kMamba3Threads = 128;
constexpr int kMamba3Warps = kMamba3Threads / 32;

// Rows are the steps' ranks, as many as a power of two: row = step * ranks + rank.
struct Mamba3RankRows {
    int log2, ranks;
    __device__ __forceinline__ explicit Mamba3RankRows(int log2_of_ranks) : log2(log2_of_ranks), ranks(1 << log2_of_ranks) {}
    __device__ __forceinline__ int step_of(int row) const { return row >> log2; }
};

// Where the rows of q or k lie in memory, from a chunk's first step and the launch's first rank on.
template <typename T>
struct Mamba3Matrix {
    const T* from;
    int64_t len_stride, rank_stride;
};

// Starts to copy the rows of `steps` steps, `existing` ranks of each, into the first tile_rows of a tile; zeros elsewhere.
// vectors: as in load_tile.
template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void load_rank_rows(T* tile, const Mamba3Matrix<T>& matrix, const Mamba3RankRows& rows,
                                               int tile_rows, int existing, int steps, int columns, bool vectors) {
    using Tile = PaddedTile<kColumns>;
    if (vectors) {
        constexpr int kVector = 16 / sizeof(T);
        constexpr int kRowVectors = kColumns / kVector;
        constexpr int kTogether = kMamba3Threads / kRowVectors;
        static_assert(kMamba3Threads % kRowVectors == 0 && kRows % kTogether == 0, "a thread's column stays the same");
        const int column = threadIdx.x % kRowVectors * kVector;
        const int first = threadIdx.x / kRowVectors;
        const int step = rows.step_of(first), rank = first - step * rows.ranks;
        const T* at = matrix.from + step * matrix.len_stride + rank * matrix.rank_stride + column;
        T* const to = tile + Tile::at(first, column);
        if (rows.ranks <= kTogether && steps * rows.ranks == tile_rows) {  // a thread's rank stays the same
            const int64_t pass = (kTogether >> rows.log2) * matrix.len_stride;
            const bool valid = column < columns && rank < existing;
#pragma unroll
            for (int i = 0; i < kRows; i += kTogether) {
                if (first + i < tile_rows) {
                    cp_async<16>(to + i * Tile::kPitch, valid ? at : matrix.from, valid);
                    at += pass;
                }
            }
            return;
        }
#pragma unroll 1
        for (int i = 0; i < kRows; i += kTogether) {
            const int own_step = rows.step_of(first + i);
            const int own_rank = first + i - own_step * rows.ranks;
            const bool valid = own_step < steps && own_rank < existing && column < columns;
            if (first + i < tile_rows) {
                at = matrix.from + own_step * matrix.len_stride + own_rank * matrix.rank_stride + column;
                cp_async<16>(to + i * Tile::kPitch, valid ? at : matrix.from, valid);
            }
        }
    } else {
        for (int i = threadIdx.x; i < tile_rows * kColumns; i += kMamba3Threads) {
            const int column = i % kColumns;
            const int step = rows.step_of(i / kColumns);
            const int rank = i / kColumns - step * rows.ranks;
            const bool valid = step < steps && rank < existing && column < columns;
            tile[Tile::at(i / kColumns, column)] =
                valid ? matrix.from[step * matrix.len_stride + rank * matrix.rank_stride + column] : from_float<T>(0.0f);
        }
    }
}

// ---- turns of a chunk's steps ----------------------------------------------------------------------------------------

// A sum of turns: for 16-bit factors a float, whose angles go through the special functions; for float32 a count.
template <typename T>
struct Mamba3TurnSum {
    using Value = float;
    Value value;

    __device__ __forceinline__ void start(uint32_t count) { value = turns_of_count(count); }
    // keep: 0 where the step restarts, else 1.
    __device__ __forceinline__ void add_step(float speed, float dt, float keep) {
        const float sum = fmaf(speed, dt, value * keep);
        value = sum - rintf(sum);
    }
    __device__ __forceinline__ float2 cos_sin() const {
        return make_float2(cos_fast(value * 6.2831853f), sin_fast(value * 6.2831853f));
    }
};
template <>
struct Mamba3TurnSum<float> {
    using Value = uint32_t;
    Value value;

    __device__ __forceinline__ void start(uint32_t count) { value = count; }
    __device__ __forceinline__ void add_step(float speed, float dt, float keep) {
        value = (keep != 0.0f ? value : 0u) + count_of_turns(turn_of_step(speed, dt));
    }
    __device__ __forceinline__ float2 cos_sin() const { return cos_sin_of_turns(turns_of_count(value)); }
};

// Two neighbouring pairs, and where their elements are; -1: there is none, or no angle turns the pair. With an odd dstate the
// last element of halves is alone.
struct Mamba3Pairs {
    int first[2], second[2];
    int angle[2];
    bool pairwise;

    __device__ __forceinline__ Mamba3Pairs(int index, int lane, int dstate, int angles, bool are_neighbours)
        : pairwise(are_neighbours) {
        const int half = dstate / 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int pair = 2 * (32 * index + lane) + e;
            const bool whole = pair < half, alone = pair == half && dstate % 2 != 0;
            first[e] = whole ? (pairwise ? 2 * pair : pair) : alone ? dstate - 1 : -1;
            second[e] = !whole ? -1 : pairwise ? 2 * pair + 1 : pair + half;
            angle[e] = pair < angles ? pair : -1;
        }
    }
    __device__ __forceinline__ bool none() const { return first[0] < 0; }
    // Of neighbours a word of two elements is a pair, of halves the first or second ones of both.
    __device__ __forceinline__ int second_word() const { return pairwise ? first[1] : second[0]; }
};

// A lane's four elements, as (x, y) of its two pairs.
struct Mamba3Quad {
    float2 pair[2];
};

template <typename T>
__device__ __forceinline__ float2 load_word(const T* word) {
    return unpack2<T>(*reinterpret_cast<const uint32_t*>(word));
}
template <>
__device__ __forceinline__ float2 load_word<float>(const float* word) {
    return *reinterpret_cast<const float2*>(word);
}
template <typename T>
__device__ __forceinline__ void store_word(T* word, float2 value) {
    *reinterpret_cast<uint32_t*>(word) = pack2<T>(value.x, value.y);
}
template <>
__device__ __forceinline__ void store_word<float>(float* word, float2 value) {
    *reinterpret_cast<float2*>(word) = value;
}

// kWords: dstate is a multiple of four and rows are aligned to words; else one by one. Not of lanes that have none().
template <bool kWords, typename T>
__device__ __forceinline__ Mamba3Quad load_quad(const T* row, const Mamba3Pairs& pairs) {
    Mamba3Quad quad;
    if constexpr (kWords) {
        const float2 one = load_word<T>(row + pairs.first[0]), other = load_word<T>(row + pairs.second_word());
        quad.pair[0] = pairs.pairwise ? one : make_float2(one.x, other.x);
        quad.pair[1] = pairs.pairwise ? other : make_float2(one.y, other.y);
    } else {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            quad.pair[e].x = pairs.first[e] >= 0 ? to_float(row[pairs.first[e]]) : 0.0f;
            quad.pair[e].y = pairs.second[e] >= 0 ? to_float(row[pairs.second[e]]) : 0.0f;
        }
    }
    return quad;
}
template <bool kWords, typename T>
__device__ __forceinline__ void store_quad(T* row, const Mamba3Quad& quad, const Mamba3Pairs& pairs) {
    const float2 one = quad.pair[0], other = quad.pair[1];
    if constexpr (kWords) {
        store_word<T>(row + pairs.first[0], pairs.pairwise ? one : make_float2(one.x, other.x));
        store_word<T>(row + pairs.second_word(), pairs.pairwise ? other : make_float2(one.y, other.y));
    } else {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (pairs.first[e] >= 0) {
                row[pairs.first[e]] = from_float<T>(quad.pair[e].x);
            }
            if (pairs.second[e] >= 0) {
                row[pairs.second[e]] = from_float<T>(quad.pair[e].y);
            }
        }
    }
}

// What a block needs to turn a chunk's rows. Pointers are the head's.
struct Mamba3Turning {
    const float* speeds;    // of the chunk's first step
    int speeds_stride;      // to the next step's
    const uint32_t* turns;  // before the chunk
    const float* dt;        // of the steps, in shared memory, as keep and start
    const float* keep;
    const int* start;
    int steps;    // that exist
    int quarter;  // of a chunk's steps, rounded up: a warp's
    int dstate, angles;
    bool pairwise, packed;  // packed: start is to be looked at

    __device__ __forceinline__ int first_step(int warp) const {
        const int first = warp * quarter;
        return first < steps ? first : steps;
    }
    __device__ __forceinline__ float speed(const float* of_angle, int step) const {
        return of_angle[(step < steps ? step : steps - 1) * speeds_stride];
    }
};

template <int kStates>
constexpr int kMamba3QuadsOfLane = kStates < 128 ? 1 : kStates / 128;
// Floats, or counts, of shared memory for the sums of quarters.
template <int kStates>
constexpr int kMamba3TurnSums = kMamba3QuadsOfLane<kStates> * 2 * kMamba3Threads;

// First what each warp's steps turn, from the last restart in them on: sums (quads, 2, threads) in shared memory. kGroup: steps
// at a time, of which a quarter has a multiple.
template <typename T, int kStates, int kGroup>
__device__ __forceinline__ void sum_turns(typename Mamba3TurnSum<T>::Value* sums, const Mamba3Turning& turning, int warp,
                                          int lane) {
    const int last = turning.first_step(warp + 1);
#pragma unroll
    for (int index = 0; index < kMamba3QuadsOfLane<kStates>; ++index) {
        const Mamba3Pairs pairs(index, lane, turning.dstate, turning.angles, turning.pairwise);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (!__any_sync(0xffffffffu, pairs.angle[e] >= 0)) {
                continue;
            }
            Mamba3TurnSum<T> sum = {};
            const float* const speed = turning.speeds + (pairs.angle[e] >= 0 ? pairs.angle[e] : 0);
#pragma unroll 1
            for (int group = turning.first_step(warp); group < last; group += kGroup) {
#pragma unroll
                for (int i = 0; i < kGroup; ++i) {
                    sum.add_step(turning.speed(speed, group + i), turning.dt[group + i], turning.keep[group + i]);
                }
            }
            sums[(2 * index + e) * kMamba3Threads + threadIdx.x] = sum.value;
        }
    }
}

// What a warp's steps have been turned by when they begin.
template <typename T>
__device__ __forceinline__ Mamba3TurnSum<T> turns_before(const typename Mamba3TurnSum<T>::Value* sums,
                                                         const Mamba3Turning& turning, int angle, int warp) {
    Mamba3TurnSum<T> sum;
    sum.start(angle >= 0 ? turning.turns[angle] : 0u);
    for (int before = 0; before < warp; ++before) {
        const typename Mamba3TurnSum<T>::Value other = sums[32 * before];
        const int begin = turning.first_step(before), end = turning.first_step(before + 1);
        const bool restarts = turning.packed && end > begin && turning.start[end - 1] >= begin;
        sum.value = restarts ? other : sum.value + other;
    }
    return sum;
}

// Then, behind a barrier, adds the biases to this warp's rows and turns them: q's and k's, or with_q = false k's alone. Rows of
// steps that do not exist may get anything finite.
template <typename T, int kStates, bool kWords, int kGroup>
__device__ __forceinline__ void rotate_rows(T* q_tile, T* k_tile, const typename Mamba3TurnSum<T>::Value* sums,
                                            const Mamba3Turning& turning, const float* q_bias, const float* k_bias, int ranks,
                                            int q_ranks, int k_ranks, bool with_q, int warp, int lane) {
    constexpr int kPitch = PaddedTile<kStates>::kPitch;
    const int last = turning.first_step(warp + 1);
#pragma unroll 1
    for (int index = 0; index < kMamba3QuadsOfLane<kStates>; ++index) {
        const Mamba3Pairs pairs(index, lane, turning.dstate, turning.angles, turning.pairwise);
        bool turns[2];
        Mamba3TurnSum<T> sum[2];
        const float* speed[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            turns[e] = __any_sync(0xffffffffu, pairs.angle[e] >= 0);
            speed[e] = turning.speeds + (pairs.angle[e] >= 0 ? pairs.angle[e] : 0);
            sum[e] = {};
            if (turns[e]) {
                sum[e] = turns_before<T>(sums + (2 * index + e) * kMamba3Threads + lane, turning, pairs.angle[e], warp);
            }
        }
#pragma unroll 1
        for (int group = turning.first_step(warp); group < last; group += kGroup) {
            float2 cos_sin[kGroup][2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (turns[e]) {
#pragma unroll
                    for (int i = 0; i < kGroup; ++i) {
                        sum[e].add_step(turning.speed(speed[e], group + i), turning.dt[group + i], turning.keep[group + i]);
                        const float2 found = sum[e].cos_sin();
                        cos_sin[i][e] = pairs.angle[e] >= 0 ? found : make_float2(1.0f, 0.0f);
                    }
                }
            }
            if (pairs.none()) {
                continue;
            }
#pragma unroll 1
            for (int side = with_q ? 0 : 1; side < 2; ++side) {
                T* const tile = side == 0 ? q_tile : k_tile;
                const float* bias_row = side == 0 ? q_bias : k_bias;
                const int own_ranks = side == 0 ? q_ranks : k_ranks;
#pragma unroll 1
                for (int rank = 0; rank < ranks && rank < own_ranks; ++rank, bias_row += turning.dstate) {
                    const Mamba3Quad bias = load_quad<kWords, float>(bias_row, pairs);
                    T* const row = tile + (group * ranks + rank) * kPitch;
                    Mamba3Quad quads[kGroup];  // all loads before the first store, which they would not pass
#pragma unroll
                    for (int i = 0; i < kGroup; ++i) {
                        quads[i] = load_quad<kWords, T>(row + i * ranks * kPitch, pairs);
                    }
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
#pragma unroll
                        for (int i = 0; i < kGroup; ++i) {
                            float2& pair = quads[i].pair[e];
                            pair = turns[e] ? rotate_pair(pair, bias.pair[e], cos_sin[i][e])
                                            : make_float2(pair.x + bias.pair[e].x, pair.y + bias.pair[e].y);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < kGroup; ++i) {
                        store_quad<kWords, T>(row + i * ranks * kPitch, quads[i], pairs);
                    }
                }
            }
        }
    }
}

}  // namespace mamba
