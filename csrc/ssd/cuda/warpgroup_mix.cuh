// M of a chunk, for forward_warpgroup.cuh: each of its four warps makes 16 rows of it, from what products.cuh has left.
#pragma once

#include "ssd/cuda/chunk_tile.cuh"
#include "ssd/cuda/warpgroup.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace mamba {

// A warp's part of M and of C_t . B_s: its short row of groups and its long one, from their first columns to the diagonal.
// Nine groups of 8 x 8 for every warp, without a branch around any: so the compiler can work on several at once.
constexpr int kMixGroups = kStepGroups + 1;
struct MixGroup {
    int j;      // of columns
    bool late;  // in the long row
    __device__ __forceinline__ MixGroup(int number, int warp) : late(number >= kStepGroups / 2 || number > warp) {
        j = late ? number - (warp + 1) : number;
    }
};

// products: the chunk's, see ProductTiles.
__device__ __forceinline__ void load_CB(float2 (&loaded)[kMixGroups], const float* products, int warp, int lane) {
    const int group[2] = {warp, kStepGroups - 1 - warp};
    const float* row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = group[half] / 2;
        row[half] = products + i * (i + 1) / 2 * 256 + lane * 2 + group[half] % 2 * 64;
    }
#pragma unroll
    for (int i = 0; i < kMixGroups; ++i) {
        const MixGroup own(i, warp);
        loaded[i] = *reinterpret_cast<const float2*>((own.late ? row[1] : row[0]) + own.j * 128);
    }
}

// M_ts = (C_t . B_s) exp(cs_t - cs_s) dt_s for s <= t of one run, for a warp's 16 rows. Groups of columns that lie above the
// diagonal are not written. at: shared_address of the lane's first element. column: its column.
template <typename T, class Decays>
__device__ __forceinline__ void mix_rows(uint32_t at, const float2 (&CB)[kMixGroups], const Decays& decays, int warp,
                                         int column, int lane) {
    // Not log2_rest: see kLeastDecay.
    const float cs[2] = {decays.log2_decay[8 * warp + lane / 4], decays.log2_decay[8 * (kStepGroups - 1 - warp) + lane / 4]};
    const bool left_above = column > lane / 4;  // in the group at the diagonal
    const bool right_above = column + 1 > lane / 4;
    // All loads before the first store, which they would not pass.
    float2 earlier[kMixGroups];
    float2 dt[kMixGroups];
#pragma unroll
    for (int i = 0; i < kMixGroups; ++i) {
        const int s = 8 * MixGroup(i, warp).j + column;
        earlier[i] = *reinterpret_cast<const float2*>(&decays.log2_decay[s]);
        dt[i] = *reinterpret_cast<const float2*>(&decays.dt[s]);
    }
    uint32_t mixed[kMixGroups];
#pragma unroll
    for (int i = 0; i < kMixGroups; ++i) {
        const float own_cs = MixGroup(i, warp).late ? cs[1] : cs[0];
        float left = exp2_fast(own_cs - earlier[i].x) * dt[i].x * CB[i].x;
        float right = exp2_fast(own_cs - earlier[i].y) * dt[i].y * CB[i].y;
        if (i < kStepGroups / 2 || i == kMixGroups - 1) {
            const bool diagonal = i == kMixGroups - 1 || i == warp;
            left = diagonal && left_above ? 0.0f : left;
            right = diagonal && right_above ? 0.0f : right;
        }
        mixed[i] = pack2<T>(left, right);
    }
#pragma unroll
    for (int i = 0; i < kMixGroups; ++i) {
        const MixGroup own(i, warp);
        st_shared_b32((own.late ? at + 8 * PairedTile::kRowBytes : at) ^ 16 * own.j, mixed[i]);
    }
}

// Takes what lies before the start of its row's run out of the warp's rows of M.
template <typename T, class Decays>
__device__ __forceinline__ void end_rows_at_restarts(T* M_tile, const Decays& decays, int warp, int lane) {
    __syncwarp();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const int group = half == 0 ? warp : kStepGroups - 1 - warp;
        const int start = decays.run_start[8 * group + lane / 4];
        for (int s = lane % 4; s < start && s < 8 * kStepGroups; s += 4) {
            M_tile[SwizzledTile<8 * kStepGroups>::at(16 * warp + 8 * half + lane / 4, s)] = from_float<T>(0.0f);
        }
    }
    __syncwarp();
}

}  // namespace mamba

#endif
