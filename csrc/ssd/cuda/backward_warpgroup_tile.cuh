// What backward_warpgroup.cuh is made of: its shared memory, and what a warp does with tiles.
#pragma once

#include "ssd/cuda/backward_tile.cuh"
#include "ssd/cuda/warpgroup.cuh"

namespace mamba {

constexpr int kWarpgroupBackwardThreads = 512;
// Registers of a thread. A block of 512 threads starts with 128 each. Three warpgroups hold up to 64 accumulators over all
// items and as many of one item's products, and spill with less; the last one has no accumulators, and runs with what they
// leave.
constexpr int kHelperRegisters = 56;
constexpr int kWalkRegisters = 152;
static_assert(kHelperRegisters + 3 * kWalkRegisters <= 512, "a multiprocessor has 64 Ki");
using WarpgroupDecays = BackwardDecays<kWarpgroupSteps>;
using BlockTile = SwizzledTile<kWarpgroupSteps>;

// What the gradients of a chunk's steps are made of, see store_step_gradients; and what else warpgroups pass on.
struct WarpgroupSums {
    float row_pairs[4][kWarpgroupSteps];  // by the warp that has s
    float column_pairs[kWarpgroupSteps];
    float own_pair[kWarpgroupSteps];
    float from_state[kWarpgroupSteps];
    float to_state[kWarpgroupSteps];
    float state_product[4];
    float D[kForwardRows];  // of the item's rows of headdim

    __device__ __forceinline__ StepSums at(int t) const {
        StepSums sums;
        sums.column = column_pairs[t];
        sums.into = to_state[t];
        sums.own = own_pair[t] + sums.column + sums.into;
        sums.out_of = (row_pairs[0][t] + row_pairs[1][t]) + (row_pairs[2][t] + row_pairs[3][t]) + from_state[t];
        return sums;
    }
    __device__ __forceinline__ float state_products() const {
        return (state_product[0] + state_product[1]) + (state_product[2] + state_product[3]);
    }
};

// Up to 128 states are one slice. 256 are two, a block each, which has dB, dC and H of its slice, and dx of half of the item's
// rows of headdim, for which it needs dH' of all states.
template <typename T, int kStates_, int kSlices_>
struct SliceTiles {
    static constexpr int kStates = kStates_;
    static constexpr int kSlices = kSlices_;
    // Elements of a tile: steps x headdim, steps x states, headdim x states.
    static constexpr int kX = kWarpgroupSteps * kForwardRows;
    static constexpr int kB = kWarpgroupSteps * kStates;
    static constexpr int kH = kForwardRows * kStates;
    static constexpr int kColumns = kForwardRows / kSlices;  // of dx
};

// A block's shared memory. Tiles come in stages: an item's x and dout are needed in two intervals (backward_warpgroup.cuh draws
// them), its states in one, its decays in three.
template <typename T, int kStates, int kSlices>
struct BackwardSharedMemory {
    using Tiles = SliceTiles<T, kStates, kSlices>;
    static constexpr int kM = kWarpgroupSteps * kWarpgroupSteps;
    static constexpr int kXStages = kSlices == 1 ? 4 : 3;
    static constexpr int kAhead = kXStages - 2;  // intervals that x and dout come before they are needed
    static constexpr int kHStages = kSlices == 1 ? 3 : 2;
    static constexpr int kDecays = kXStages + 1;
    static constexpr int kSums = 3;
    struct Inputs {
        T x[Tiles::kX];  // steps x headdim; dx leaves from here
        T dout[Tiles::kX];
    };
    struct States {
        T H[Tiles::kH];  // headdim x states of the block's slice
        T dH[kSlices * Tiles::kH];
    };
    static_assert(Tiles::kB <= 2 * kM, "C of another slice has room in M");

    alignas(1024) T C[Tiles::kB];            // SwizzledTile of the block's slice
    alignas(1024) T B[kSlices * Tiles::kB];  // PairedTile of all
    alignas(1024) Inputs inputs[kXStages];
    alignas(1024) States states[kHStages];
    alignas(1024)
        T M_tiles[2 * kM];  // steps s (PairedTile) x t; at first C of the other slice, in the end the sum of dG over heads
    WarpgroupDecays decays[kDecays];
    WarpgroupSums sums[kSums];
    uint64_t BC_arrived, states_arrived[kHStages], decays_arrived[kDecays];  // mbarriers

    __device__ __forceinline__ T* x(int item) { return inputs[item % kXStages].x; }
    __device__ __forceinline__ T* dout(int item) { return inputs[item % kXStages].dout; }
    __device__ __forceinline__ T* H(int item) { return states[item % kHStages].H; }
    __device__ __forceinline__ T* dH(int item) { return states[item % kHStages].dH; }
    __device__ __forceinline__ T* M(int item) { return M_tiles + item % 2 * kM; }
    __device__ __forceinline__ WarpgroupDecays& decays_of(int item) { return decays[item % kDecays]; }
    __device__ __forceinline__ WarpgroupSums& sums_of(int item) { return sums[item % kSums]; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A (m, k) *= above for rows m = g, below for rows g + 8.
template <typename T>
__device__ __forceinline__ void weight_rows(Operand<T>& a, float above, float below) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float weight = i % 2 == 0 ? above : below;
        const float2 value = unpack2<T>(a.r[0][i]);
        a.r[0][i] = pack2<T>(value.x * weight, value.y * weight);
    }
}

// Adds to dot, for both rows of each lane, the dot product of that row of the accumulators with that of a tile, which is read
// again: there are too few registers to keep it.
template <typename T, int kGroups>
__device__ __forceinline__ void add_dots(float (&dot)[2], const float (&c)[kGroups][4], const T* tile) {
#pragma unroll
    for (int k = 0; k < kGroups / 2; ++k) {
        Operand<T> a;
        ldmatrix_x4(a.r[0], columns_on(tile, k));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 value = unpack2<T>(a.r[0][i]);
            const float(&row)[4] = c[2 * k + i / 2];
            dot[i % 2] = fmaf(value.x, row[i % 2 * 2], fmaf(value.y, row[i % 2 * 2 + 1], dot[i % 2]));
        }
    }
    dot[0] = add_over_row(dot[0]);
    dot[1] = add_over_row(dot[1]);
}

// The diagonal of 16 x 16 accumulators, two 16 x 8 side by side: of element (g, g) and (g + 8, g + 8) the lane with 2t or
// 2t + 1 = g has both, the others get zeros.
__device__ __forceinline__ float2 diagonal(const float (&left)[4], const float (&right)[4], int lane) {
    const int i = lane / 4 - lane % 4 * 2;
    return make_float2(i == 0 ? left[0] : i == 1 ? left[1] : 0.0f, i == 0 ? right[2] : i == 1 ? right[3] : 0.0f);
}

// H . dH': the diagonal of H dH'^T, 16 rows a warp.
template <typename T, int kStates>
__device__ __forceinline__ void add_state_product(WarpgroupSums& sums, const T* H, const T* dH, int warp, int lane) {
    H += BlockTile::at(16 * warp + lane % 16, lane / 16 * 8);
    dH += BlockTile::at(16 * warp + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
    float left[2][4];  // two sums of each, so that products need not wait for each other
    float right[2][4];
    set_to_zero(left);
    set_to_zero(right);
#pragma unroll 2
    for (int k = 0; k < kStates / 16; ++k) {
        Operand<T> a;
        Operand<T> b;
        ldmatrix_x4(a.r[0], columns_on(H, k));
        ldmatrix_x4(b.r[0], columns_on(dH, k));
        multiply_add<T>(left[k % 2], a, b, 0);
        multiply_add<T>(right[k % 2], a, b, 1);
    }
    const float2 one = diagonal(left[0], right[0], lane);
    const float2 other = diagonal(left[1], right[1], lane);
    const float sum = add_over_column(add_over_row((one.x + one.y) + (other.x + other.y)));
    if (lane == 0) {
        sums.state_product[warp] = sum;
    }
}

// sum_t dout_t x_t: the diagonal of dout^T x, 16 rows of headdim a warp, of which `rows` exist from the item's first one on.
template <typename T>
__device__ __forceinline__ void store_dD(float* dD, const T* dout, const T* x, int rows, int warp, int lane) {
    float left[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float right[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const int row = 16 * warp;
    dout += BlockTile::at(lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8);
    x += BlockTile::at(lane % 16, row + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < kWarpgroupSteps / 16; ++k) {
        Operand<T> a;
        Operand<T> b;
        ldmatrix_x4_trans(a.r[0], dout + 16 * k * kForwardRows);
        ldmatrix_x4_trans(b.r[0], x + 16 * k * kForwardRows);
        multiply_add<T>(left, a, b, 0);
        multiply_add<T>(right, a, b, 1);
    }
    const float2 both = diagonal(left, right, lane);
    const int at = row + lane / 4;
    if (lane / 4 / 2 == lane % 4) {
        if (at < rows) {
            dD[at] = both.x;
        }
        if (at + 8 < rows) {
            dD[at + 8] = both.y;
        }
    }
}

// A lane and the one 2 kLeft away each add up half of 2 kLeft values, which both have.
template <int kLeft>
__device__ __forceinline__ void add_halves(float (&values)[16], int lane) {
    const bool upper = (lane & 2 * kLeft) != 0;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
        const float kept = upper ? values[i + kLeft] : values[i];
        const float given = upper ? values[i] : values[i + kLeft];
        values[i] = kept + __shfl_xor_sync(0xffffffffu, given, 2 * kLeft);
    }
}

// Of the pairs of steps s <= t of one run: M_st = L_ts G_ts as operands, dG += L_ts dt_s R_st, and the sums of
// f_ts = L_ts G_ts R_st, unless another block counts them. Of the second row of each lane the first half of the columns lies
// before the diagonal.
template <typename T>
__device__ __forceinline__ void mix_pairs(Operand<T> (&M)[4], float (&dG)[8][4], const float (&R)[8][4], const float (&G)[8][4],
                                          const WarpgroupDecays& now, WarpgroupSums& sums, bool counted, const int (&s)[2],
                                          int warp, int lane) {
    const float cs[2] = {now.log2_decay[s[0]], now.log2_decay[s[1]]};  // not log2_rest: see kLeastDecay
    const float dt[2] = {now.dt[s[0]], now.dt[s[1]]};
    float column[2] = {0.0f, 0.0f};  // sums over t
    float own[2] = {0.0f, 0.0f};
    float row[16];  // sums over s, of t = 8 j + 2 (lane % 4) + i in row[2 j + i]
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int t = 8 * j + lane % 4 * 2;
        const float2 t_cs = *reinterpret_cast<const float2*>(&now.log2_decay[t]);
        const int2 t_start = *reinterpret_cast<const int2*>(&now.run_start[t]);
        float mixed[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        row[2 * j] = row[2 * j + 1] = 0.0f;
#pragma unroll
        for (int half = 0; half < (j < 4 ? 1 : 2); ++half) {
            const bool diagonal = half == j / 4;  // may be in this group
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = 2 * half + i;
                const bool counts = s[half] <= t + i && s[half] >= (i == 0 ? t_start.x : t_start.y);
                const float decay = counts ? exp2_fast((i == 0 ? t_cs.x : t_cs.y) - cs[half]) : 0.0f;
                mixed[at] = decay * G[j][at];
                const float f = mixed[at] * R[j][at];
                dG[j][at] = fmaf(decay * dt[half], R[j][at], dG[j][at]);
                // A step's own pair takes no decay. With strong decay it is the largest, and would hide the others.
                const bool is_own = diagonal && s[half] == t + i;
                own[half] = is_own ? f : own[half];
                const float earlier = is_own ? 0.0f : f;
                column[half] += earlier;
                row[2 * j + i] = fmaf(dt[half], earlier, row[2 * j + i]);
            }
        }
        M[j / 2].r[0][j % 2 * 2] = pack2<T>(mixed[0], mixed[1]);
        M[j / 2].r[0][j % 2 * 2 + 1] = pack2<T>(mixed[2], mixed[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float column_sum = add_over_row(column[half]);
        const float own_sum = add_over_row(own[half]);
        if (lane % 4 == 0) {
            sums.column_pairs[s[half]] = counted ? column_sum : 0.0f;
            sums.own_pair[s[half]] = counted ? own_sum : 0.0f;
        }
    }
    // Over the eight lanes of a column: each ends with the sums of its two steps.
    add_halves<8>(row, lane);
    add_halves<4>(row, lane);
    add_halves<2>(row, lane);
    *reinterpret_cast<float2*>(&sums.row_pairs[warp][2 * lane]) =
        counted ? make_float2(row[0], row[1]) : make_float2(0.0f, 0.0f);
}

#endif

}  // namespace mamba
