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
        const T* const from = matrix.from + column;
        T* const to = tile + Tile::at(first, column);
#pragma unroll 8
        for (int i = 0; i < kRows; i += kTogether) {
            const int step = rows.step_of(first + i);
            const int rank = first + i - step * rows.ranks;
            const bool valid = step < steps && rank < existing && column < columns;
            if (first + i < tile_rows) {
                copy_async<16>(to + i * Tile::kPitch,
                               valid ? from + step * matrix.len_stride + rank * matrix.rank_stride : matrix.from, valid);
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
    __device__ __forceinline__ void add_step(float speed, float dt) {
        const float turns = speed * dt;
        value += turns - rintf(turns);
    }
    __device__ __forceinline__ float2 cos_sin() const {
        const float radians = (value - rintf(value)) * 6.2831853f;
        return make_float2(cos_fast(radians), sin_fast(radians));
    }
};
template <>
struct Mamba3TurnSum<float> {
    using Value = uint32_t;
    Value value;

    __device__ __forceinline__ void start(uint32_t count) { value = count; }
    __device__ __forceinline__ void add_step(float speed, float dt) { value += count_of_turns(turn_of_step(speed, dt)); }
    __device__ __forceinline__ float2 cos_sin() const { return cos_sin_of_turns(turns_of_count(value)); }
};

// The four elements of a row that a lane turns, as two pairs. In words, where pairs or halves of them are pairs of neighbours
// in memory; else one by one.
struct Mamba3Pairs {
    int first[2], second[2];  // elements; of words the first of each: first[0] and first[1]. -1: none
    int angle[2];             // -1: none turns the pair
};

template <bool kWords>
__device__ __forceinline__ Mamba3Pairs mamba3_pairs(int index, int lane, int dstate, int angles, bool pairwise) {
    Mamba3Pairs pairs;
    const int half = dstate / 2;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int unit = 64 * index + 32 * e + lane;
        if (kWords && !pairwise) {
            const int at = 2 * (32 * index + lane);
            pairs.first[e] = at < half ? at + e * half : -1;
            pairs.second[e] = pairs.first[e];
            pairs.angle[e] = at + e < angles ? at + e : -1;
        } else {
            const bool alone = !pairwise && unit == half && dstate % 2 != 0;  // the last one of an odd dstate
            const int first = pairwise ? 2 * unit : alone ? dstate - 1 : unit;
            const int second = pairwise ? 2 * unit + 1 : unit + half;
            const bool exists = pairwise ? first < dstate : unit < half || alone;
            pairs.first[e] = exists ? first : -1;
            pairs.second[e] = exists && !alone && second < dstate ? second : -1;
            pairs.angle[e] = unit < angles ? unit : -1;
        }
    }
    return pairs;
}

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

// Words hold (x, y) of a pair, or x of both in one and y of both in the other.
__device__ __forceinline__ void exchange(Mamba3Quad& quad, bool pairwise) {
    if (!pairwise) {
        const float second = quad.pair[0].y;
        quad.pair[0].y = quad.pair[1].x;
        quad.pair[1].x = second;
    }
}

template <bool kWords, typename T>
__device__ __forceinline__ Mamba3Quad load_quad(const T* row, const Mamba3Pairs& pairs, bool pairwise) {
    Mamba3Quad quad;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        quad.pair[e] = make_float2(0.0f, 0.0f);
        if (kWords) {
            if (pairs.first[e] >= 0) {
                quad.pair[e] = load_word<T>(row + pairs.first[e]);
            }
        } else {
            quad.pair[e].x = pairs.first[e] >= 0 ? to_float(row[pairs.first[e]]) : 0.0f;
            quad.pair[e].y = pairs.second[e] >= 0 ? to_float(row[pairs.second[e]]) : 0.0f;
        }
    }
    if (kWords) {
        exchange(quad, pairwise);
    }
    return quad;
}

template <bool kWords, typename T>
__device__ __forceinline__ void store_quad(T* row, Mamba3Quad quad, const Mamba3Pairs& pairs, bool pairwise) {
    if (kWords) {
        exchange(quad, pairwise);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        if (kWords) {
            if (pairs.first[e] >= 0) {
                store_word<T>(row + pairs.first[e], quad.pair[e]);
            }
        } else {
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
    int64_t speeds_stride;  // to the next step's
    const uint32_t* turns;  // before the chunk
    const float* dt;        // of the steps, in shared memory, as start
    const int* start;
    int steps;  // that exist
    int dstate, angles;
    bool pairwise;

    // A warp takes a quarter of the steps.
    __device__ __forceinline__ int first_step(int warp) const {
        const int first = warp * ((steps + kMamba3Warps - 1) / kMamba3Warps);
        return first < steps ? first : steps;
    }
};

template <int kStates>
constexpr int kMamba3QuadsOfLane = kStates < 128 ? 1 : kStates / 128;
// Floats, or counts, of shared memory for the sums of quarters.
template <int kStates>
constexpr int kMamba3TurnSums = kMamba3QuadsOfLane<kStates> * 2 * kMamba3Threads;

// First what each warp's steps turn, from the last restart in them on: sums (quads, 2, threads) in shared memory.
template <typename T, int kStates, bool kWords>
__device__ __forceinline__ void sum_turns(typename Mamba3TurnSum<T>::Value* sums, const Mamba3Turning& turning, int warp,
                                          int lane) {
    const int first = turning.first_step(warp), last = turning.first_step(warp + 1);
#pragma unroll
    for (int index = 0; index < kMamba3QuadsOfLane<kStates>; ++index) {
        const Mamba3Pairs pairs = mamba3_pairs<kWords>(index, lane, turning.dstate, turning.angles, turning.pairwise);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (!__any_sync(0xffffffffu, pairs.angle[e] >= 0)) {
                continue;
            }
            Mamba3TurnSum<T> sum = {};
            const float* speed = turning.speeds + (pairs.angle[e] >= 0 ? pairs.angle[e] : 0);
#pragma unroll 4
            for (int step = first; step < last; ++step) {
                if (turning.start[step] == step) {
                    sum = {};
                }
                sum.add_step(speed[step * turning.speeds_stride], turning.dt[step]);
            }
            sums[(2 * index + e) * kMamba3Threads + threadIdx.x] = sum.value;
        }
    }
}

// Then, behind a barrier, adds the biases to this warp's rows and turns them. With kWithQ q's and k's, else k's alone.
template <typename T, int kStates, bool kWords, bool kWithQ>
__device__ __forceinline__ void turn_rows(T* q_tile, T* k_tile, const typename Mamba3TurnSum<T>::Value* sums,
                                          const Mamba3Turning& turning, const float* q_bias, const float* k_bias, int ranks,
                                          int q_ranks, int k_ranks, int warp, int lane) {
    constexpr int kPitch = PaddedTile<kStates>::kPitch;
    constexpr int kGroup = 4;  // steps at a time
    const int first = turning.first_step(warp), last = turning.first_step(warp + 1);
#pragma unroll 1
    for (int index = 0; index < kMamba3QuadsOfLane<kStates>; ++index) {
        const Mamba3Pairs pairs = mamba3_pairs<kWords>(index, lane, turning.dstate, turning.angles, turning.pairwise);
        Mamba3TurnSum<T> sum[2];
        bool turns[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            turns[e] = __any_sync(0xffffffffu, pairs.angle[e] >= 0);
            sum[e].start(pairs.angle[e] >= 0 ? turning.turns[pairs.angle[e]] : 0u);
            for (int before = 0; turns[e] && before < warp; ++before) {
                const typename Mamba3TurnSum<T>::Value other = sums[(2 * index + e) * kMamba3Threads + 32 * before + lane];
                const int begin = turning.first_step(before), end = turning.first_step(before + 1);
                const bool restarts = end > begin && turning.start[end - 1] >= begin;
                sum[e].value = restarts ? other : sum[e].value + other;
            }
        }
#pragma unroll 1
        for (int group = first; group < last; group += kGroup) {
            float2 cos_sin[kGroup][2];
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
                const int step = group + i;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    cos_sin[i][e] = make_float2(1.0f, 0.0f);
                    if (turns[e] && step < last) {
                        if (turning.start[step] == step) {
                            sum[e] = {};
                        }
                        const bool turned = pairs.angle[e] >= 0;
                        sum[e].add_step(turning.speeds[step * turning.speeds_stride + (turned ? pairs.angle[e] : 0)],
                                        turning.dt[step]);
                        const float2 found = sum[e].cos_sin();
                        cos_sin[i][e] = turned ? found : cos_sin[i][e];
                    }
                }
            }
#pragma unroll 1
            for (int rank = 0; rank < ranks; ++rank) {
                Mamba3Quad bias[2];
#pragma unroll
                for (int side = kWithQ ? 0 : 1; side < 2; ++side) {
                    const float* const from = side == 0 ? q_bias : k_bias;
                    const bool exists = rank < (side == 0 ? q_ranks : k_ranks);
                    bias[side] = load_quad<kWords, float>(from + (exists ? rank : 0) * turning.dstate, pairs, turning.pairwise);
                }
#pragma unroll
                for (int side = kWithQ ? 0 : 1; side < 2; ++side) {
                    if (rank >= (side == 0 ? q_ranks : k_ranks)) {
                        continue;
                    }
                    T* const tile = side == 0 ? q_tile : k_tile;
#pragma unroll
                    for (int i = 0; i < kGroup; ++i) {
                        if (group + i < last) {
                            T* const row = tile + ((group + i) * ranks + rank) * kPitch;
                            Mamba3Quad quad = load_quad<kWords, T>(row, pairs, turning.pairwise);
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const float a = quad.pair[e].x + bias[side].pair[e].x;
                                const float b = quad.pair[e].y + bias[side].pair[e].y;
                                const float2 turn = cos_sin[i][e];
                                quad.pair[e] = make_float2(a * turn.x - b * turn.y, a * turn.y + b * turn.x);
                            }
                            store_quad<kWords, T>(row, quad, pairs, turning.pairwise);
                        }
                    }
                }
            }
        }
    }
}

}  // namespace mamba
