// What the threads of backward_warpgroup.cuh do between products: turns there and back, and what angles get.
#pragma once

#include "mamba3/cuda/backward_warpgroup_walk.cuh"

namespace mamba {

// Each of 2 kLeft values is added up over the lanes that differ by kDistance, of which each keeps half of the sums: the upper
// lane the second half.
template <int kLeft, int kDistance, int kCount>
__device__ __forceinline__ void fold(float (&values)[kCount], int lane) {
    const bool upper = (lane & kDistance) != 0;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
        const float kept = upper ? values[i + kLeft] : values[i];
        const float given = upper ? values[i] : values[i + kLeft];
        values[i] = kept + __shfl_xor_sync(0xffffffffu, given, kDistance);
    }
}

// A warp's rows of 64 columns of q and k, of which angles turn some (kTurns) or none, with the head's biases. Rows that do not
// exist become zero.
template <bool kTurns, typename T>
__device__ __forceinline__ void turn_block(const Mamba3Walk<T>& walk, const Mamba3Item& item, const Mamba3Stand& own,
                                           int angle) {
    using Tile = SwizzledTile<kWarpgroupSteps>;
    constexpr int kWarpRows = Mamba3WarpgroupShared<T>::kWarpRows;
    auto& shared = walk.shared;
    const ChunkSteps<kWarpgroupSteps>& steps = shared.steps[item.number % 2];
    const int first_row = kWarpRows * own.warp, column = 2 * angle, rows = shared.places.rows;
    const int rank = walk.rank(), rank_log2 = walk.rank_log2(), angles = walk.angles();
    float2 cos_sin[kWarpRows];
    if (kTurns) {
        const float* const speeds = shared.places.speeds + angle;
        float speed[kWarpRows];
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {
            const int row = first_row + i;
            const bool counts = walk.begins_step(row) && row < rows && angle < angles;
            speed[i] = counts ? speeds[(row >> rank_log2) * angles] : 0.0f;
        }
        float turned = angle < angles ? shared.first_turns[own.warp][angle] : 0.0f;
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {
            const int row = first_row + i;
            if (walk.begins_step(row)) {
                const float sum = fmaf(speed[i], steps.dt[row], turned);
                turned = sum - rintf(sum);
                cos_sin[i] = make_float2(cos_fast(turned * 6.2831853f), sin_fast(turned * 6.2831853f));
                shared.turned[Tile::at(row >> rank_log2, column) / 2] = pack2<__half>(cos_sin[i].x, cos_sin[i].y);
            } else {
                cos_sin[i] = cos_sin[i > 0 ? i - 1 : 0];
            }
        }
    }
    const int at = Tile::at(first_row, column);
    static_assert(kWarpRows == 4, "rows of a warp differ in the lower bits of a row of a tile");
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const T* const from = m == 0 ? shared.group_q : shared.group_k;
        T* const to = m == 0 ? shared.q : shared.k;
        float2 bias;
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {
            const int row = first_row + i, place = (at + 64 * i) ^ (8 * i);
            if (i == 0 || rank > 1) {
                bias = *reinterpret_cast<const float2*>(&shared.bias[m][row & (rank - 1)][column]);
            }
            const float2 raw = load_pair<T>(from + place);
            float x = raw.x + bias.x, y = raw.y + bias.y;
            if (kTurns) {
                const float before = x;
                x = before * cos_sin[i].x - y * cos_sin[i].y;
                y = before * cos_sin[i].y + y * cos_sin[i].x;
            }
            *reinterpret_cast<uint32_t*>(to + place) = row < rows ? pack2<T>(x, y) : 0u;
        }
    }
}

template <typename T>
__device__ __forceinline__ void turn(const Mamba3Walk<T>& walk, const Mamba3Item& item) {
    const Mamba3Stand own = walk.stand();
#pragma unroll 1
    for (int angle = own.lane; angle < 64; angle += 32) {
        if (angle - own.lane < walk.angles()) {
            turn_block<true>(walk, item, own, angle);
        } else {
            turn_block<false>(walk, item, own, angle);
        }
    }
}

// Of 16 rows of dq or dk, from `row` on, and 64 columns: what the angles get of them (kTurns), then they are turned back, and
// added to the sums over heads. pairs: get the sums of both of a lane's rows, by column. tile: of q or k, the same columns.
template <bool kTurns, typename T>
__device__ __forceinline__ void turn_back(const Mamba3Walk<T>& walk, float (&d)[8][4], float (&sum)[8][4], float (&pairs)[16],
                                          const T* tile, float* dturns, int block, int row, int lane) {
    using Shared = Mamba3WarpgroupShared<T>;
    using Tile = SwizzledTile<kWarpgroupSteps>;
    const int own = lane % 16 + row;
    const T* const tile_at = tile + Tile::at(own, lane / 16 * 8);
    const __half* const turned_at = reinterpret_cast<const __half*>(walk.shared.turned) + block * Shared::kBlock +
                                    Tile::at(own >> walk.rank_log2(), lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (kTurns) {
            uint32_t values[4], turns[4];
            load_matrices(values, columns_on(tile_at, k));
            load_matrices(turns, columns_on(turned_at, k));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = d[2 * k + i / 2][i % 2 * 2];
                float& y = d[2 * k + i / 2][i % 2 * 2 + 1];
                const float2 value = unpack2<T>(values[i]);
                dturns[Shared::dturn_at(row + lane / 4 + i % 2 * 8, block, 8 * k + i / 2 * 4 + lane % 4)] =
                    value.x * y - value.y * x;
                const float2 cos_sin = unpack2<__half>(turns[i]);
                const float back = x * cos_sin.x + y * cos_sin.y;
                y = y * cos_sin.x - x * cos_sin.y;
                x = back;
            }
        }
#pragma unroll
        for (int j = 2 * k; j < 2 * k + 2; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[j][i] += d[j][i];
            }
            pairs[2 * j] = d[j][0] + d[j][2];
            pairs[2 * j + 1] = d[j][1] + d[j][3];
        }
    }
}

// A warp's sums over its rows of each rank, 64 columns, from turn_back's: to (R, kStates) from the block's first column on.
template <typename T>
__device__ __forceinline__ void sum_rows(const Mamba3Walk<T>& walk, float (&values)[16], float* to, int lane) {
    constexpr int kStates = Mamba3WarpgroupShared<T>::kStates;
    const int rank = walk.rank();
    float* const at = to + (lane / 4 & (rank - 1)) * kStates + lane % 4 * 2;
    const auto store = [&](int group, int i) {
        *reinterpret_cast<float2*>(at + 8 * group) = make_float2(values[2 * i], values[2 * i + 1]);
    };
    fold<8, 16>(values, lane);
    const int first = lane / 16 * 4;
    if (rank == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            store(first + i, i);
        }
        return;
    }
    fold<4, 8>(values, lane);
    const int second = first + lane / 8 % 2 * 2;
    if (rank == 2) {
        store(second, 0);
        store(second + 1, 1);
        return;
    }
    fold<2, 4>(values, lane);
    store(second + lane / 4 % 2, 0);
}

// What a warp's rows hand to the angles of earlier steps.
template <typename T>
__device__ __forceinline__ void sum_later(const Mamba3Walk<T>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    Shared& shared = walk.shared;
    const Mamba3Stand own = walk.stand();
    const float* const of_q = shared.dturns(item.number, 0);
    const float* const of_k = shared.dturns(item.number, 1);
#pragma unroll 1
    for (int block = 0; 32 * block < walk.angles(); ++block) {
        float sum = 0.0f;
#pragma unroll
        for (int i = Shared::kWarpRows - 1; i >= 0; --i) {
            const int row = Shared::kWarpRows * own.warp + i, at = Shared::dturn_at(row, block, own.lane);
            sum += row < shared.places.rows ? of_q[at] + of_k[at] : 0.0f;
        }
        shared.part_later(own.warp)[32 * block + own.lane] = sum;
    }
}

// Then, behind a barrier, the sums over the rows of later steps: what each of a warp's steps gives to its angles' gradients,
// over all heads, and to the gradient of its dt.
template <typename T>
__device__ __forceinline__ void finish_angles(const Mamba3Walk<T>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    constexpr int kWarpRows = Shared::kWarpRows;
    Shared& shared = walk.shared;
    const Mamba3Stand own = walk.stand();
    const float* const of_q = shared.dturns(item.number, 0);
    const float* const of_k = shared.dturns(item.number, 1);
    const ChunkSteps<kWarpgroupSteps>& steps = shared.steps[item.number % 2];
    const int angles = walk.angles(), first_row = kWarpRows * own.warp, rows = shared.places.rows;
    const bool adds = item.number > 0 || walk.launch.first_head > 0;
    float of_dt[kWarpRows] = {};
#pragma unroll 1
    for (int block = 0; 32 * block < angles; ++block) {
        const int angle = 32 * block + own.lane;
        const float* const speeds = shared.places.speeds + angle;
        float* const dangles = shared.places.dangles + angle;
        float speed[kWarpRows], total[kWarpRows];
        bool counts[kWarpRows];
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {  // all loads are on their way before the first is used
            const int row = first_row + i, at = (row >> walk.rank_log2()) * angles;
            counts[i] = walk.begins_step(row) && row < rows && angle < angles;
            speed[i] = counts[i] ? speeds[at] : 0.0f;
            total[i] = counts[i] && adds ? dangles[at] : 0.0f;
        }
        float behind = 0.0f;
#pragma unroll 4
        for (int part = Shared::kWarps - 1; part > own.warp; --part) {
            behind += shared.part_later(part)[angle];
        }
#pragma unroll
        for (int i = kWarpRows - 1; i >= 0; --i) {
            const int row = first_row + i, at = Shared::dturn_at(row, block, own.lane);
            behind += row < rows ? of_q[at] + of_k[at] : 0.0f;
            if (counts[i]) {
                dangles[(row >> walk.rank_log2()) * angles] =
                    fmaf((1.0f - 4.0f * speed[i] * speed[i]) * 3.14159265f * steps.dt[row], behind, total[i]);
                of_dt[i] = fmaf(speed[i], behind, of_dt[i]);
            }
        }
        if (own.warp == 0 && angle < angles) {
            const int64_t tile = item.tile * walk.launch.chunks.slots * walk.p().nheads;
            shared.places.angle_totals[(tile + item.slot) * angles + angle] = behind;
        }
    }
    fold<2, 16>(of_dt, own.lane);
    fold<1, 8>(of_dt, own.lane);
    const float sum = add_over_row(of_dt[0] + __shfl_xor_sync(0xffffffffu, of_dt[0], 4));
    const int row = first_row + own.lane / 16 * 2 + own.lane / 8 % 2;
    if (own.lane % 8 == 0 && walk.begins_step(row)) {
        shared.sums[item.number % 2].angles[row >> walk.rank_log2()] = 6.28318531f * sum;
    }
}

}  // namespace mamba
