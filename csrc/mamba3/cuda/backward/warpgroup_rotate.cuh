// What the threads of backward_warpgroup.cuh do between products: turns there and back, and what angles get.
#pragma once

#include "mamba3/cuda/backward/warpgroup_block.cuh"

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

// Of a warp's steps, an angle each lane: speeds, which all heads share, and what heads before have added to the gradients.
template <int kSteps>
struct Mamba3WarpAngles {
    float speed[kSteps], total[kSteps];
};
// Of the block of 32 angles. adds: whether there are heads before. All loads are on their way before the first is used: best a
// phase before.
template <typename T, int kRank>
__device__ __forceinline__ void load_angles(Mamba3WarpAngles<Mamba3WarpgroupShared<T>::kWarpRows / kRank>& to,
                                            const Mamba3Walk<T, kRank>& walk, int block, bool adds) {
    constexpr int kSteps = Mamba3Walk<T, kRank>::kWarpSteps;
    const Mamba3Stand own = walk.stand();
    const int angles = walk.angles(), angle = 32 * block + own.lane, first_step = kSteps * own.warp;
    const float* const speeds = walk.shared.places.speeds + (first_step * angles + angle);
    const float* const dangles = walk.shared.places.dangles + (first_step * angles + angle);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
        const bool counts = first_step + j < walk.shared.places.steps && angle < angles;
        to.speed[j] = counts ? speeds[j * angles] : 0.0f;
        to.total[j] = counts && adds ? dangles[j * angles] : 0.0f;
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
        const ChunkSteps<kWarpgroupSteps>& steps = shared.steps[item.number % 2];
        float turned = turns_of_count(shared.turns[angle] + shared.part_turns[own.warp][angle]);
        const int at = Tile::at(first_step, 2 * own.lane);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
            cos_sin[j] = cos_sin_after_step(turned, angles.speed[j], steps.dt[first_row + j * kRank]);
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
        bias[0][r] = *reinterpret_cast<const float2*>(&shared.bias[0][r][2 * angle]);
        bias[1][r] = *reinterpret_cast<const float2*>(&shared.bias[1][r][2 * angle]);
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
                load_angles(angles, walk, block, false);
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
    fold<8, 16>(values, lane);
    const int first = lane / 16 * 4;
    if (kRank == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            store(first + i, i);
        }
        return;
    }
    fold<4, 8>(values, lane);
    const int second = first + lane / 8 % 2 * 2;
    fold<2, 4>(values, lane);
    store(second + lane / 4 % 2, 0);
}

// What a warp's rows hand to the angles of earlier steps.
template <typename T, int kRank>
__device__ __forceinline__ void sum_later(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item) {
    using Shared = Mamba3WarpgroupShared<T>;
    Shared& shared = walk.shared;
    const Mamba3Stand own = walk.stand();
#pragma unroll 1
    for (int block = 0; 32 * block < walk.angles(); ++block) {
        const int at = Shared::dturn_at(Shared::kWarpRows * own.warp, block, own.lane);
        float sum = 0.0f;
#pragma unroll
        for (int i = Shared::kWarpRows - 1; i >= 0; --i) {
            sum += shared.dturn(item.number, at, i);
        }
        shared.part_later(own.warp)[32 * block + own.lane] = sum;
    }
}

// Then, behind a barrier, the sums over the rows of later steps: what each of a warp's steps gives to its angles' gradients,
// over all heads, and to the gradient of its dt.
template <typename T, int kRank>
__device__ __forceinline__ void finish_angles(const Mamba3Walk<T, kRank>& walk, const Mamba3Item& item,
                                              Mamba3WarpAngles<Mamba3WarpgroupShared<T>::kWarpRows / kRank> own_angles) {
    using Shared = Mamba3WarpgroupShared<T>;
    constexpr int kWarpRows = Shared::kWarpRows, kSteps = kWarpRows / kRank;
    Shared& shared = walk.shared;
    const Mamba3Stand own = walk.stand();
    const ChunkSteps<kWarpgroupSteps>& steps = shared.steps[item.number % 2];
    const int angles = walk.angles(), first_row = kWarpRows * own.warp, first_step = kSteps * own.warp;
    float of_dt[4] = {};
#pragma unroll 1
    for (int block = 0; 32 * block < angles; ++block) {
        if (block > 0) {
            load_angles(own_angles, walk, block, walk.adds_angles(item));
        }
        const int angle = 32 * block + own.lane;
        float* const dangles = shared.places.dangles + (first_step * angles + angle);
        float behind = 0.0f;
#pragma unroll 4
        for (int part = Shared::kWarps - 1; part > own.warp; --part) {
            behind += shared.part_later(part)[angle];
        }
        const int at = Shared::dturn_at(first_row, block, own.lane);
#pragma unroll
        for (int i = kWarpRows - 1; i >= 0; --i) {
            behind += shared.dturn(item.number, at, i);
            const int j = i / kRank;
            const float speed = own_angles.speed[j];
            if (i % kRank == 0 && first_step + j < shared.places.steps && angle < angles) {
                dangles[j * angles] =
                    fmaf((1.0f - 4.0f * speed * speed) * 3.14159265f * steps.dt[first_row + i], behind, own_angles.total[j]);
                of_dt[j] = fmaf(speed, behind, of_dt[j]);
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
    const int step = own.lane / 16 * 2 + own.lane / 8 % 2;
    if (own.lane % 8 == 0 && step < kSteps) {
        shared.sums[item.number % 2].angles[first_step + step] = 6.28318531f * sum;
    }
}

}  // namespace mamba
