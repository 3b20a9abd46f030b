// Tiles of a head's q and k for Mamba-3's backward scan: the group's rows with the head's bias, turned.
#pragma once

#include "mamba3/cuda/backward/chunk.cuh"

namespace mamba {

// Cosine and sine of a count of turns: series in the distance to the nearest quarter.
__device__ __forceinline__ float2 cos_sin_of_count(uint32_t turn) {
    const uint32_t quarter = (turn + 0x20000000u) >> 30;
    const float x = static_cast<float>(static_cast<int32_t>(turn - (quarter << 30))) * 1.46291808e-9f;  // 2 pi / 2^32
    const float z = x * x;
    float s = fmaf(2.7557319e-6f, z, -1.9841270e-4f);
    s = fmaf(s, z, 8.3333333e-3f);
    s = fmaf(s, z, -1.6666667e-1f);
    s = fmaf(x * z, s, x);
    float c = fmaf(-2.7557319e-7f, z, 2.4801587e-5f);
    c = fmaf(c, z, -1.3888889e-3f);
    c = fmaf(c, z, 4.1666667e-2f);
    c = fmaf(c, z, -0.5f);
    c = fmaf(c, z, 1.0f);
    const float cos = quarter % 2 != 0 ? s : c, sin = quarter % 2 != 0 ? c : s;
    return make_float2(quarter == 1 || quarter == 2 ? -cos : cos, quarter >= 2 ? -sin : sin);
}

// The same for factors of T: those of 16 bits are rounded to less than the special functions' precision.
template <typename T>
__device__ __forceinline__ float2 cos_sin_for(uint32_t turn) {
    const float radians = turns_of_count(turn) * 6.2831853f;
    return make_float2(cos_fast(radians), sin_fast(radians));
}
template <>
__device__ __forceinline__ float2 cos_sin_for<float>(uint32_t turn) {
    return cos_sin_of_count(turn);
}

// How a block's threads share angles and steps: lanes along angles, parts of the steps beside each other.
struct TurnShare {
    int lanes, parts, lane, part;
    int begin, end;  // steps of this thread's part
};
template <int kThreads>
__device__ __forceinline__ TurnShare share_turns(const MambaMamba3& p, int steps) {
    TurnShare share;
    share.lanes = 8;
    while (share.lanes < p.nangles) {
        share.lanes *= 2;
    }
    share.parts = kThreads / share.lanes;
    share.lane = static_cast<int>(threadIdx.x) % share.lanes;
    share.part = static_cast<int>(threadIdx.x) / share.lanes;
    const int each = ceil_div(steps, share.parts);
    share.begin = share.part * each < steps ? share.part * each : steps;
    share.end = share.begin + each < steps ? share.begin + each : steps;
    return share;
}

// Sums over the steps of each part; see TurnShare.
template <int kThreads>
struct PartSumsOfTurns {
    uint32_t sum[kThreads];
    int restarts[kThreads];  // by part: whether a run begins in it
};

// Elements (a, b) of a row that an angle turns. pairs: neighbours, at a multiple of their size.
template <typename T>
__device__ __forceinline__ float2 load_two(const T* row, int a, int b, bool pairs) {
    return pairs ? load_pair<T>(row + a) : make_float2(to_float(row[a]), to_float(row[b]));
}

// One of q and k, for one head and chunk.
template <typename T>
struct TurnSource {
    const T* rows;      // the group's, from the chunk's first step on
    const float* bias;  // (R, N)
    T* tile;
    int64_t len_stride, rank_stride;
    bool pairs;
};
template <typename T>
__device__ __forceinline__ TurnSource<T> q_source(const MambaMamba3& p, const Mamba3BackwardLaunch& launch,
                                                  const Mamba3Chunk& chunk, int64_t head, int64_t group, T* tile) {
    const T* const rows =
        static_cast<const T*>(p.q) + chunk.row * p.q_batch_stride + chunk.first * p.q_len_stride + group * p.q_group_stride;
    return {rows, p.q_bias + head * p.rank * p.dstate, tile, p.q_len_stride, p.q_rank_stride, launch.q_pairs != 0};
}
template <typename T>
__device__ __forceinline__ TurnSource<T> k_source(const MambaMamba3& p, const Mamba3BackwardLaunch& launch,
                                                  const Mamba3Chunk& chunk, int64_t head, int64_t group, T* tile) {
    const T* const rows =
        static_cast<const T*>(p.k) + chunk.row * p.k_batch_stride + chunk.first * p.k_len_stride + group * p.k_group_stride;
    return {rows, p.k_bias + head * p.rank * p.dstate, tile, p.k_len_stride, p.k_rank_stride, launch.k_pairs != 0};
}

// Some rows of a thread's part, as they are in memory: all loads are on their way before the first is used.
template <int kSources>
struct TurnRows {
    static constexpr int kAtOnce = 8;
    float2 raw[kSources][kAtOnce], bias[kSources][kAtOnce];
    float speed[kAtOnce];
};

// Where the speeds of a chunk's steps lie: in global or shared memory.
struct TurnSpeeds {
    const float* first;
    int64_t stride;  // to the next step's
};
__device__ __forceinline__ TurnSpeeds speeds_of(const MambaMamba3& p, const Mamba3BackwardLaunch& launch,
                                                const Mamba3Chunk& chunk, int64_t head) {
    return {launch.chunks.speeds + mamba3_speeds_index(p, chunk.row, chunk.first, head),
            p.angles_of_heads != 0 ? p.nheads * p.nangles : p.nangles};
}

// value / divisor of small numbers.
__device__ __forceinline__ int divide_small(int value, float inverse) {
    return static_cast<int>((static_cast<float>(value) + 0.5f) * inverse);
}

template <typename T, int kSources>
__device__ __forceinline__ void load_turn_rows(TurnRows<kSources>& rows, const MambaMamba3& p,
                                               const TurnSource<T> (&sources)[kSources], const TurnSpeeds& speeds, int lane,
                                               int first, int end, float inverse_rank) {
    const int rank = static_cast<int>(p.rank), dstate = static_cast<int>(p.dstate);
    const int a = p.pairwise != 0 ? 2 * lane : lane, b = p.pairwise != 0 ? a + 1 : a + dstate / 2;
#pragma unroll
    for (int i = 0; i < TurnRows<kSources>::kAtOnce; ++i) {
        if (first + i < end) {
            const int step = divide_small(first + i, inverse_rank), r = first + i - step * rank;
            rows.speed[i] = speeds.first[step * speeds.stride + lane];
#pragma unroll
            for (int m = 0; m < kSources; ++m) {
                const TurnSource<T>& source = sources[m];
                rows.raw[m][i] =
                    load_two<T>(source.rows + step * source.len_stride + r * source.rank_stride, a, b, source.pairs);
                if (i == 0 || rank > 1) {
                    rows.bias[m][i] = make_float2(source.bias[r * dstate + a], source.bias[r * dstate + b]);
                } else {
                    rows.bias[m][i] = rows.bias[m][0];
                }
            }
        }
    }
}

// What no angle turns, and zeros behind dstate and `rows`: lanes lie along pairs of columns, warps share the rows.
template <typename T, class Tiles, int kSources>
__device__ __forceinline__ void copy_unturned(const MambaMamba3& p, const TurnSource<T> (&sources)[kSources], int rows,
                                              float inverse_rank) {
    constexpr int kPitch = Tiles::kStates + kTilePad;
    constexpr int kWarps = Tiles::kThreads / 32;
    constexpr int kEach = Tiles::kRows / kWarps;
    constexpr int kAtOnce = kEach < 4 ? kEach : 4;
    const int rank = static_cast<int>(p.rank), dstate = static_cast<int>(p.dstate);
    const int warp = threadIdx.x / 32;
#pragma unroll 1
    for (int pair = static_cast<int>(p.nangles + threadIdx.x % 32); pair < Tiles::kStates / 2; pair += 32) {
        const int column = 2 * pair, a = element_of_column(p, column), b = element_of_column(p, column + 1);
        const bool first_exists = column < dstate, both = column + 1 < dstate;
#pragma unroll 1
        for (int first = 0; first < kEach; first += kAtOnce) {
            float2 value[kSources][kAtOnce], bias[kSources][kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {  // all loads are on their way before the first is used
                const int row = (first + i) * kWarps + warp, step = divide_small(row, inverse_rank), r = row - step * rank;
#pragma unroll
                for (int m = 0; m < kSources; ++m) {
                    const TurnSource<T>& source = sources[m];
                    value[m][i] = bias[m][i] = make_float2(0.0f, 0.0f);
                    if (row < rows && first_exists) {
                        const T* const from = source.rows + step * source.len_stride + r * source.rank_stride;
                        value[m][i] = both ? load_two<T>(from, a, b, source.pairs) : make_float2(to_float(from[a]), 0.0f);
                        if (i == 0 || rank > 1) {
                            bias[m][i] = make_float2(source.bias[r * dstate + a], both ? source.bias[r * dstate + b] : 0.0f);
                        } else {
                            bias[m][i] = bias[m][0];
                        }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
                for (int m = 0; m < kSources; ++m) {
                    store_pair<T>(sources[m].tile + ((first + i) * kWarps + warp) * kPitch + column,
                                  value[m][i].x + bias[m][i].x, value[m][i].y + bias[m][i].y);
                }
            }
        }
    }
}

// Makes tiles of kRows x kStates of q, k or both: biased and turned, zeros behind the chunk's steps and dstate. steps: in
// shared memory, complete behind the block's next barrier, which this function passes. table: (steps, kStates / 2) cos and sin,
// or NULL. The tiles are complete behind the barrier after it.
template <typename T, class Tiles, int kSources>
__device__ __forceinline__ void turn_tiles(const MambaMamba3& p, const Mamba3BackwardLaunch& launch, const Mamba3Chunk& chunk,
                                           int64_t slot, int64_t head, const ChunkSteps<Tiles::kRows>& steps,
                                           const TurnSource<T> (&sources)[kSources], const TurnSpeeds& speeds, float2* table,
                                           PartSumsOfTurns<Tiles::kThreads>& sums) {
    constexpr int kPitch = Tiles::kStates + kTilePad;
    constexpr int kPairs = Tiles::kStates / 2;
    constexpr int kAtOnce = TurnRows<kSources>::kAtOnce;
    const int rank = static_cast<int>(p.rank), angles = static_cast<int>(p.nangles);
    const float inverse_rank = 1.0f / static_cast<float>(rank);
    const TurnShare share = share_turns<Tiles::kThreads>(p, chunk.steps);
    const bool active = share.lane < angles;
    const int end = share.end * rank;
    TurnRows<kSources> loaded;
    uint32_t turn = 0;
    if (active) {
        load_turn_rows<T, kSources>(loaded, p, sources, speeds, share.lane, share.begin * rank, end, inverse_rank);
        turn = launch.chunks.turns[mamba3_turns_index(p, slot, head) + share.lane];
    }
    const int rows = chunk.steps * rank;
    copy_unturned<T, Tiles, kSources>(p, sources, rows, inverse_rank);
    __syncthreads();
    if (angles == 0) {
        return;
    }
    for (int i = rows * angles + threadIdx.x; i < Tiles::kRows * angles; i += Tiles::kThreads) {
#pragma unroll
        for (int m = 0; m < kSources; ++m) {
            store_pair<T>(sources[m].tile + i / angles * kPitch + 2 * (i % angles), 0.0f, 0.0f);
        }
    }
    uint32_t sum = 0;
    bool restarts = false;
    for (int first = share.begin; first < share.end; first += kAtOnce) {
        float speed[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            speed[i] = active && first + i < share.end ? speeds.first[(first + i) * speeds.stride + share.lane] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int t = first + i;
            if (t < share.end) {
                const bool starts = steps.run[t * rank] == t * rank;
                restarts = restarts || starts;
                sum = (starts ? 0 : sum) + count_of_turns(turn_of_step(speed[i], steps.dt[t * rank]));
            }
        }
    }
    sums.sum[threadIdx.x] = sum;
    if (share.lane == 0) {
        sums.restarts[share.part] = restarts ? 1 : 0;
    }
    __syncthreads();
    if (!active) {
        return;
    }
    for (int part = 0; part < share.part; ++part) {
        const uint32_t before = sums.sum[part * share.lanes + share.lane];
        turn = sums.restarts[part] != 0 ? before : turn + before;
    }
    float2 turned = make_float2(1.0f, 0.0f);
    for (int first = share.begin * rank; first < end; first += kAtOnce) {
        if (first > share.begin * rank) {
            load_turn_rows<T, kSources>(loaded, p, sources, speeds, share.lane, first, end, inverse_rank);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = first + i;
            if (row < end) {
                const int t = divide_small(row, inverse_rank);
                if (row == t * rank) {
                    const uint32_t add = count_of_turns(turn_of_step(loaded.speed[i], steps.dt[row]));
                    turn = steps.run[row] == row ? add : turn + add;
                    turned = cos_sin_for<T>(turn);
                    if (table != nullptr) {
                        table[t * kPairs + share.lane] = turned;
                    }
                }
#pragma unroll
                for (int m = 0; m < kSources; ++m) {
                    const float x = loaded.raw[m][i].x + loaded.bias[m][i].x, y = loaded.raw[m][i].y + loaded.bias[m][i].y;
                    store_pair<T>(sources[m].tile + row * kPitch + 2 * share.lane, x * turned.x - y * turned.y,
                                  x * turned.y + y * turned.x);
                }
            }
        }
    }
}

}  // namespace mamba
