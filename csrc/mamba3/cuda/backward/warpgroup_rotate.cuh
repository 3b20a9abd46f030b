// What the threads of backward_warpgroup.cuh do between products: turns there and back, and what angles get.
#pragma once

#include "mamba3/cuda/backward/warpgroup_block.cuh"

namespace mamba {

// Of a warp's steps, an angle each lane: speeds, which all heads share, and the turns before its rows: before the chunk, and
// from there on.
template <int kSteps>
struct Mamba3WarpAngles {
    float speed[kSteps];
    uint32_t before, part;
};
// Of the block of 32 angles. All loads are on their way before the first is used: best a phase before.
template <typename T, int kRank>
__device__ __forceinline__ void load_angles(Mamba3WarpAngles<Mamba3WarpgroupShared<T>::kWarpRows / kRank>& to,
                                            const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item, int block) {
    constexpr int kSteps = Mamba3Walk<T, kRank>::kWarpSteps;
    const Mamba3Stand own = walk.stand();
    const Mamba3ChunkPlaces<T>& places = walk.shared.places;
    const int angles = walk.angles(), angle = 32 * block + own.lane, first_step = kSteps * own.warp;
    const float* const speeds = places.speeds + (first_step * angles + angle);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
        to.speed[j] = first_step + j < places.steps && angle < angles ? speeds[j * angles] : 0.0f;
    }
    to.before = to.part = 0;
    if (angle < angles) {
        const int at = item.slot * angles + angle;
        to.before = places.turns[at];
        to.part = places.part_turns[own.warp * places.part_turns_stride + at];
    }
}

// A warp's rows of 64 columns of q and k, of which angles turn some (kTurns) or none, with the head's biases. Rows that do not
// exist become zero. Places of a warp's rows differ in few bits, so that each is one operation.
template <bool kTurns, typename T, int kRank>
__device__ __forceinline__ void turn_block(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item, const Mamba3Stand& own,
                                           int block,
                                           const Mamba3WarpAngles<Mamba3WarpgroupShared<T>::kWarpRows / kRank>& angles) {
    using Shared = Mamba3WarpgroupShared<T>;
    using Tile = SwizzledTile<kWarpgroupSteps>;
    constexpr int kWarpRows = Shared::kWarpRows, kSteps = kWarpRows / kRank;
    static_assert(kWarpRows == 4, "rows of a warp differ in the lower bits of a row of a tile");
    constexpr int kNextRow = 64 ^ 8;
    auto& shared = walk.shared;
    const int first_row = kWarpRows * own.warp, first_step = kSteps * own.warp, angle = 32 * block + own.lane;
    float2 cos_sin[kSteps];
    if (kTurns) {
        const float* const dt =
            shared.values[item.number % 2] + kMamba3Dt * static_cast<int>(walk.launch.chunks.pitch) + first_step;
        float turned = turns_of_count(angles.before + angles.part);
        const int at = Tile::at(first_step, 2 * own.lane);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
            cos_sin[j] = cos_sin_after_step(turned, angles.speed[j], dt[j]);
            shared.turned[(block * Shared::kBlock + (at ^ kNextRow * j)) / 2] = pack2<__half>(cos_sin[j].x, cos_sin[j].y);
        }
    }
    const int at = Tile::at(first_row, 2 * own.lane);
    const auto place = [&](int i) { return block * Shared::kBlock + (at ^ kNextRow * i); };
    uint32_t raw[2][kWarpRows];  // all on their way before the first is used
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
        raw[0][i] = *reinterpret_cast<const uint32_t*>(shared.group_q + place(i));
        raw[1][i] = *reinterpret_cast<const uint32_t*>(shared.group_k + place(i));
    }
    float2 bias[2][kRank];
#pragma unroll
    for (int r = 0; r < kRank; ++r) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const float* const from = shared.bias[m][r];
            bias[m][r] = kRank == 1 ? *reinterpret_cast<const float2*>(from + 2 * angle)
                                    : make_float2(from[angle], from[angle + Shared::kStates / 2]);
        }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        T* const to = m == 0 ? shared.q : shared.k;
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {
            const float2 value = unpack2<T>(raw[m][i]);
            float x = value.x + bias[m][i % kRank].x, y = value.y + bias[m][i % kRank].y;
            if (kTurns) {
                const float2 turn = cos_sin[i / kRank];
                const float before = x;
                x = before * turn.x - y * turn.y;
                y = before * turn.y + y * turn.x;
            }
            store_pair<T>(to + place(i), x, y);
        }
    }
    if (first_row + kWarpRows > shared.places.rows) {
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {
            if (first_row + i >= shared.places.rows) {
                store_pair<T>(shared.q + place(i), 0.0f, 0.0f);
                store_pair<T>(shared.k + place(i), 0.0f, 0.0f);
            }
        }
    }
}

template <typename T, int kRank>
__device__ __forceinline__ void turn(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item,
                                     Mamba3WarpAngles<Mamba3WarpgroupShared<T>::kWarpRows / kRank> angles) {
    const Mamba3Stand own = walk.stand();
#pragma unroll(kRank == 4 ? 2 : 1)
    for (int block = 0; block < 2; ++block) {
        if (32 * block < walk.angles()) {
            if (block > 0) {
                load_angles(angles, walk, item, block);
            }
            turn_block<true>(walk, item, own, block, angles);
        } else {
            turn_block<false>(walk, item, own, block, angles);
        }
    }
}

// Of 16 rows of dq or dk, from `row` on, and 64 columns: what the angles get of them (kTurns), then they are turned back, and
// added to the sums over heads. pairs: get the sums of both of a lane's rows, by column. tile: of q or k, the same columns.
template <bool kTurns, typename T, int kRank>
__device__ __forceinline__ void turn_back(const Mamba3Walk<T, kRank>& walk, float (&d)[8][4], float (&sum)[8][4],
                                          float (&pairs)[16], const T* tile, float* dturns, int block, int row, int lane) {
    using Shared = Mamba3WarpgroupShared<T>;
    using Tile = SwizzledTile<kWarpgroupSteps>;
    const int own = lane % 16 + row;
    const T* const tile_at = tile + Tile::at(own, lane / 16 * 8);
    const __half* const turned_at = reinterpret_cast<const __half*>(walk.shared.turned) + block * Shared::kBlock +
                                    Tile::at(own >> walk.kRankLog2, lane / 16 * 8);
    const int dturns_at = Shared::dturn_at(row + lane / 4, block, lane % 4);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (kTurns) {
            uint32_t values[4], turns[4];
            ldmatrix_x4(values, columns_on(tile_at, k));
            ldmatrix_x4(turns, columns_on(turned_at, k));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = d[2 * k + i / 2][i % 2 * 2];
                float& y = d[2 * k + i / 2][i % 2 * 2 + 1];
                const float2 value = unpack2<T>(values[i]);
                dturns[(dturns_at ^ (8 * k + i / 2 * 4)) + i % 2 * (8 * 32)] = value.x * y - value.y * x;
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
template <typename T, int kRank>
__device__ __forceinline__ void sum_rows(const Mamba3Walk<T, kRank>& walk, float (&values)[16], float* to, int lane) {
    constexpr int kStates = Mamba3WarpgroupShared<T>::kStates;
    float* const at = to + (lane / 4 & (kRank - 1)) * kStates + lane % 4 * 2;
    const auto store = [&](int group, int i) {
        *reinterpret_cast<float2*>(at + 8 * group) = make_float2(values[2 * i], values[2 * i + 1]);
    };
    transpose_sum<16, 16, 16>(values, lane);
    const int first = lane / 16 * 4;
    if (kRank == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            store(first + i, i);
        }
        return;
    }
    transpose_sum<8, 8, 4>(values, lane);
    const int second = first + lane / 8 % 2 * 2;
    store(second + lane / 4 % 2, 0);
}

// What each step's rows give to its angles, of q and k, to memory; and each eight rows' sums to shared memory. Two warps take
// eight rows, each 16 of 32 angles.
template <typename T, int kRank>
__device__ __forceinline__ void store_dturns(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    Shared& shared = walk.shared;
    const Mamba3Stand own = walk.stand();
    const int eighth = own.warp / 2, row = 8 * eighth + own.lane / 4 % 2 * 4 + own.lane / 8;  // lanes use all banks so
    const int step = row >> walk.kRankLog2, first = own.warp % 2 * 16 + own.lane % 4 * 4;
    const int summed = first + own.lane / 16 * 2 + own.lane / 8 % 2;  // the angle that a lane has a sum of
    const bool adds = item.tile > 0;
#pragma unroll 1
    for (int block = 0; 32 * block < walk.angles(); ++block) {
        const int at = Shared::dturn_at(row, block, first), end = walk.angles() - 32 * block;
        const float4 of_q = *reinterpret_cast<const float4*>(shared.dturns(item.number, 0) + at);
        const float4 of_k = *reinterpret_cast<const float4*>(shared.dturns(item.number, 1) + at);
        float values[4] = {of_q.x + of_k.x, of_q.y + of_k.y, of_q.z + of_k.z, of_q.w + of_k.w};
        float* const to = shared.places.dturns + item.slot * static_cast<int64_t>(shared.places.dturns_stride) +
                          (step * shared.places.dturns_pitch + 32 * block);
        if (kRank == 1 && step < shared.places.steps && first < end) {
            float4* const all = reinterpret_cast<float4*>(to + first);
            const float4 before = adds ? *all : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            *all = make_float4(values[0] + before.x, values[1] + before.y, values[2] + before.z, values[3] + before.w);
        }
        transpose_sum<4, 16, 8>(values, own.lane);
        if (kRank > 1 && step < shared.places.steps && summed < end) {
            to[summed] = adds ? to[summed] + values[0] : values[0];
        }
        const float sum = values[0] + __shfl_xor_sync(0xffffffffu, values[0], 4);
        if (own.lane / 4 % 2 == 0) {
            shared.turn_parts[eighth][32 * block + summed] = sum;
        }
    }
}

// Then, behind a barrier and by one warp, the sums over the chunk.
template <typename T, int kRank>
__device__ __forceinline__ void store_angle_totals(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
#pragma unroll 1
    for (int angle = walk.stand().lane; angle < walk.angles(); angle += 32) {
        float* const to = walk.shared.places.angle_totals + item.slot * walk.angles() + angle;
        float sum = item.tile > 0 ? *to : 0.0f;
#pragma unroll
        for (int part = 0; part < Shared::kWarps / 2; ++part) {
            sum += walk.shared.turn_parts[part][angle];
        }
        *to = sum;
    }
}

}  // namespace mamba
