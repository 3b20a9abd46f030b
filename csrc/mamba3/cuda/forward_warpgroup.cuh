// The forward scan on Hopper, for 16-bit dtypes and up to 128 states: a block walks the chunks of 64 rows of one head's state,
// as in forward.cuh, but with two warpgroups. One turns q and k of the next chunk (make_tiles_warpgroup.cuh), the other one
// multiplies and finishes the present one's. chunks.cuh has the formulas. Backward walks the same way (Mamba3Pass).
#pragma once

#include "mamba3/cuda/finish_warpgroup.cuh"
#include "mamba3/cuda/forward_tile.cuh"
#include "mamba3/cuda/backward/gate_warpgroup.cuh"
#include "mamba3/cuda/make_tiles_warpgroup.cuh"
#include "mamba3/cuda/state_warpgroup.cuh"
#include "ssd/cuda/chunk_tile.cuh"

namespace mamba {

// Registers of a thread of each warpgroup; two blocks a multiprocessor. Of halves with fewer for products ptxas waits behind
// each (C7512), of neighbours with more the warpgroup that turns spills.
template <bool kPairwise>
constexpr int kMamba3TurnRegisters = kPairwise ? 88 : 96;
template <bool kPairwise>
constexpr int kMamba3MultiplyRegisters = 256 - kMamba3TurnRegisters<kPairwise>;
constexpr int kMamba3WarpgroupThreads = 2 * kMamba3Threads;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kCount>
__device__ __forceinline__ void clear(float (&values)[kCount][4]) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
        values[j][0] = values[j][1] = values[j][2] = values[j][3] = 0.0f;
    }
}

// M (row t, row s) = (q_t . k_s) times what s counts in t, for the warp's 16 rows t, as operands of 16 rows s each; those
// behind the warp's own are zero.
template <typename T>
__device__ __forceinline__ void mix_mamba3_rows(Operand<T> (&M)[kMamba3ChunkRows / 16], const float (&products)[8][4],
                                                const Mamba3ChunkValues& values, int ranks_log2, int warp, int lane) {
    const int t = 16 * warp + lane / 4;
    const float high[2] = {values.of[kMamba3High][t], values.of[kMamba3High][t + 8]},
                low[2] = {values.of[kMamba3Low][t], values.of[kMamba3Low][t + 8]};
#pragma unroll
    for (int k = 0; k < kMamba3ChunkRows / 16; ++k) {
        if (k > warp) {
            M[k].r[0][0] = M[k].r[0][1] = M[k].r[0][2] = M[k].r[0][3] = 0u;
            continue;
        }
        float weights[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int half = i % 2, s = 16 * k + i / 2 * 8 + lane % 4 * 2;
            const float2 from_high = *reinterpret_cast<const float2*>(&values.of[kMamba3High][s]);
            const float2 from_low = *reinterpret_cast<const float2*>(&values.of[kMamba3Low][s]);
            const float2 scale = *reinterpret_cast<const float2*>(&values.of[kMamba3Scale][s]);
            weights[i][0] = exp2_fast((high[half] - from_high.x) + (low[half] - from_low.x)) * scale.x;
            weights[i][1] = weights[i][0];
            if (ranks_log2 == 0) {  // else both rows are of one step
                weights[i][1] = exp2_fast((high[half] - from_high.y) + (low[half] - from_low.y)) * scale.y;
            }
        }
        float mixed[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                mixed[i][j] = products[2 * k + i / 2][i % 2 * 2 + j] * weights[i][j];
            }
        }
        if (k == warp) {  // the steps of these rows are not all earlier ones
            const float gamma[2] = {values.of[kMamba3Gamma][t], values.of[kMamba3Gamma][t + 8]};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i % 2;
                const int own = (lane / 4 + 8 * half) >> ranks_log2;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int from = (i / 2 * 8 + lane % 4 * 2 + j) >> ranks_log2;
                    const float same = products[2 * k + i / 2][half * 2 + j] * gamma[half];
                    mixed[i][j] = from < own ? mixed[i][j] : from == own ? same : 0.0f;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            set_pair<T>(M[k], i, mixed[i][0], mixed[i][1]);
        }
    }
}

// The same of one rank, but what the pairs count is found while the tensor cores multiply them. From rows of the tiles of 16
// before the warp's own, the decay is that to the tile's last row, and from there on: neither overflows unless the decay of
// some pair does.
struct Mamba3PairCounts {
    static constexpr int kTiles = kMamba3ChunkRows / 16;
    const float* near;    // of the lane's first columns: the decay to the tile's last row, times scale
    float on[kTiles][2];  // from there to the lane's rows
    // In the warp's own tile: of columns and rows that are both among the first eight or the last, and of the first columns in
    // the last rows.
    float2 beside[2], below;

    __device__ __forceinline__ Mamba3PairCounts(const Mamba3ChunkValues& values, const float* own_near, int warp, int lane)
        : near(own_near + lane % 4 * 2) {
        const int row = lane / 4, column = lane % 4 * 2, t = 16 * warp + row;
        const float high[2] = {values.of[kMamba3High][t], values.of[kMamba3High][t + 8]},
                    low[2] = {values.of[kMamba3Low][t], values.of[kMamba3Low][t + 8]};
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
            if (k < warp) {
                const float last_high = values.of[kMamba3High][16 * k + 15], last_low = values.of[kMamba3Low][16 * k + 15];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    on[k][half] = exp2_fast((high[half] - last_high) + (low[half] - last_low));
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int s = 16 * warp + 8 * half + column;
            const float2 from_high = *reinterpret_cast<const float2*>(&values.of[kMamba3High][s]);
            const float2 from_low = *reinterpret_cast<const float2*>(&values.of[kMamba3Low][s]);
            const float2 scale = *reinterpret_cast<const float2*>(&values.of[kMamba3Scale][s]);
            const auto count = [&](int to) {
                return make_float2(exp2_fast((high[to] - from_high.x) + (low[to] - from_low.x)) * scale.x,
                                   exp2_fast((high[to] - from_high.y) + (low[to] - from_low.y)) * scale.y);
            };
            if (half == 0) {
                below = count(1);
            }
            const float gamma = values.of[kMamba3Gamma][t + 8 * half];
            const float2 earlier = count(half);
            beside[half].x = column < row ? earlier.x : column == row ? gamma : 0.0f;
            beside[half].y = column + 1 < row ? earlier.y : column + 1 == row ? gamma : 0.0f;
        }
    }
    template <typename T>
    __device__ __forceinline__ void mix(Operand<T> (&M)[kTiles], const float (&products)[8][4], int warp) const {
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
            M[k].r[0][0] = M[k].r[0][1] = M[k].r[0][2] = M[k].r[0][3] = 0u;
            const auto set = [&](int half, int side, float x, float y) {
                const float(&own)[4] = products[2 * k + side];
                set_pair<T>(M[k], 2 * side + half, own[2 * half] * x, own[2 * half + 1] * y);
            };
            if (k == warp) {
                set(0, 0, beside[0].x, beside[0].y);
                set(1, 0, below.x, below.y);
                set(1, 1, beside[1].x, beside[1].y);
            } else if (k < warp) {
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const float2 from = *reinterpret_cast<const float2*>(near + 16 * k + 8 * side);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        set(half, side, from.x * on[k][half], from.y * on[k][half]);
                    }
                }
            }
        }
    }
};

// All of a block's chunks.
template <typename T, int kStates, bool kPairwise, Mamba3Pass kPass>
__device__ __forceinline__ void multiply_mamba3_tiles(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                      const Mamba3Block<kPass == kMamba3After>& block, T* tiles,
                                                      const Mamba3ChunkValues* values, const float* weights) {
    using Tiles = Mamba3WarpgroupTiles<kStates, kPass>;
    constexpr bool kOneRank = kPairwise;  // what choose_mamba3_warpgroups lets come
    constexpr bool kRows = mamba3_finds_rows(kPass), kKeeps = mamba3_keeps_states(kPass), kFromEnd = kPass == kMamba3After;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0) & 3;
    const int row = 16 * warp;
    const int dstate = static_cast<int>(p.dstate), ranks = 1 << launch.ranks_log2;
    const bool has_initial = !kFromEnd && block.segment == 0 && p.ssm_state != nullptr;
    const int64_t state_size = p.headdim * p.dstate;
    const int64_t state_index =
        (block.sequence * p.nheads + block.head) * state_size + static_cast<int64_t>(block.row0) * p.dstate;
    const int64_t ends_row = p.sequences * p.nheads * state_size;

    float state[kStates / 8][4];
    const float* from = kFromEnd ? launch.backward.dfinal : has_initial ? p.ssm_state : nullptr;
    if (block.segment > 0) {
        from = kPass == kMamba3Output ? launch.ends + (block.segment - 1) * ends_row : nullptr;
    }
    if (from != nullptr) {
        load_pair_state<kPairwise>(state, from + state_index, row, block.columns, dstate, lane);
    } else {
        clear(state);
    }
    if (has_initial && block.chunks > 0) {
        add_pairs_before<kPairwise>(state, p, block.sequence, block.range, block.head, ranks, block.row0, row, block.columns,
                                    lane);
    }
    T* const state_tile = tiles + Tiles::kStateAt;
    // Of stmatrix_x4 and ldmatrix_x4. Found again each time: it would be spilled.
    const auto own_rows = [&] {
        const int own = opaque(lane) & 31;
        return Mamba3XTile::at(row + own % 16, own / 16 * 8);
    };
    [[maybe_unused]] const auto show_state = [&] {
        T* const state_at = state_tile + own_rows();
#pragma unroll
        for (int k = 0; k < kStates / 16; ++k) {
            Operand<T> part;
            a_from_accumulators<T>(part, state[2 * k], state[2 * k + 1]);
            stmatrix_x4(columns_on(state_at, k), part.r[0]);
        }
        fence_proxy_async();
    };
    if constexpr (kPass != kMamba3Ends) {
        show_state();
    }
    [[maybe_unused]] T* kept =
        static_cast<T*>(launch.backward.states) + (block.slot * block.tiles + block.tile) * (kMamba3StateRows * kStates);
    [[maybe_unused]] Mamba3Finisher<T, kOneRank> finisher(p, launch, block, tiles + Tiles::kZAt, warp, lane);
    [[maybe_unused]] const float* const near = weights + Tiles::weight_rows(1) * kMamba3WeightPitch;
    [[maybe_unused]] const bool plain =
        (kOneRank || p.rank == 1) && p.norm_weight == nullptr && p.mimo_z == nullptr && p.mimo_out == nullptr;
    [[maybe_unused]] const bool four_ranks = p.rank == 4 && p.norm_weight == nullptr && p.z != nullptr && p.mimo_out != nullptr;
    [[maybe_unused]] Mamba3GateBack<T> gate_back(p, launch, block, warp, lane);

    float carried = 1.0f;
    for (int i = 0; i < block.chunks; ++i) {
        __syncthreads();  // the chunk's tiles are there
        if constexpr (kKeeps) {
            if (threadIdx.x == 0) {
                cp_async_bulk_store(kept, state_tile, kMamba3StateRows * kStates * static_cast<int>(sizeof(T)));
            }
            kept += (kFromEnd ? -1 : 1) * block.tiles * (kMamba3StateRows * kStates);
        }
        const Mamba3ChunkValues& now = values[i % 2];
        const T* const q_tile = tiles + i % 2 * Tiles::kQK;
        const T* const x_tile = tiles + Tiles::kXAt + i % 2 * kMamba3XTile;
        const uint64_t k_rows = tile_descriptor(q_tile + Tiles::kQ, kBlock * 16);
        [[maybe_unused]] const uint64_t x = tile_descriptor(x_tile, kBlock * 16);
        const float carry = now.of[kMamba3Entering][kMamba3ChunkRows - 1];
        [[maybe_unused]] float y[8][4];
        [[maybe_unused]] Operand<T> M[kMamba3ChunkRows / 16];
        Operand<T> weighted[kMamba3ChunkRows / 16];
        const auto weigh_x = [&] {
            const int own = opaque(lane) & 31;
            const T* const from = x_tile + Mamba3XTile::at(own / 16 * 8 + own % 8, row + own / 8 % 2 * 8);
#pragma unroll
            for (int k = 0; k < kMamba3ChunkRows / 16; ++k) {
                ldmatrix_x4_trans(weighted[k].r[0], from + 16 * k * kMamba3StateRows);
                weight_a<T>(weighted[k], now.of[kMamba3Adding] + 16 * k, own);
            }
        };
        if constexpr (kRows) {
            const uint64_t q_rows = tile_descriptor(q_tile, kBlock * 16);
            const uint64_t H = tile_descriptor(state_tile, kBlock * 16);
            float products[8][4];
            clear(products);
            warpgroup_fence_operand(products);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kStates / 16; ++k) {  // q_t . k_s
                const int at = k / 4 * kBlock + k % 4 * kColumns16;
                wgmma<T, 0>(products, q_rows + at, k_rows + at);
            }
            wgmma_commit_group();
            finisher.begin_z_copies();
            if constexpr (kPass == kMamba3GateBack) {
                gate_back.begin_copies(launch.backward, finisher, lane);
            }
            if constexpr (kOneRank) {
                const Mamba3PairCounts counts(now, near + i % 2 * kMamba3ChunkRows, warp, opaque(lane) & 31);
                wgmma_wait_group<0>();
                warpgroup_fence_operand(products);
                counts.mix(M, products, warp);
            } else {
                wgmma_wait_group<0>();
                warpgroup_fence_operand(products);
                mix_mamba3_rows<T>(M, products, now, launch.ranks_log2, warp, lane);
            }
            clear(y);
            warpgroup_fence_operand(y);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kStates / 16; ++k) {  // H q_t
                const int at = k / 4 * kBlock + k % 4 * kColumns16;
                wgmma<T, 0>(y, q_rows + at, H + at);
            }
            wgmma_commit_group();
            if constexpr (kOneRank) {
                __syncwarp();  // or what follows is begun between the products
            }
        } else if (kPass == kMamba3Ends) {
            carried *= carry;
        }
        weigh_x();
        scale_rows(state, carry, carry);
        if constexpr (kRows) {
            const float above = now.of[kMamba3Entering][row + lane / 4], below = now.of[kMamba3Entering][row + lane / 4 + 8];
            wgmma_wait_group<0>();
            warpgroup_fence_operand(y);
            scale_rows(y, above, below);
            warpgroup_fence_operand(y);
            warpgroup_fence_operand(M);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kMamba3ChunkRows / 16; ++k) {  // M x
                wgmma<T, 1>(y, M[k].r[0], x + k * kRows16);
            }
            wgmma_commit_group();
        }
        warpgroup_fence_operand(state);
        warpgroup_fence_operand(weighted);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kMamba3ChunkRows / 16; ++k) {  // H' = carry H + x^T k
            wgmma<T, 1>(state, weighted[k].r[0], k_rows + k * kRows16);
        }
        wgmma_commit_group();
        if constexpr (kRows) {
            wgmma_wait_group<1>();
            warpgroup_fence_operand(y);
            warpgroup_fence_operand(M);
            cp_async_wait_group<0>();
            __syncwarp();
            const T* const own_x = x_tile + own_rows();
            if constexpr (kPass == kMamba3GateBack) {
                gate_back.finish(p, launch.backward, finisher, y, own_x, weights, lane);
            } else if (!kOneRank && four_ranks) {
                finish_four_ranks(finisher, y, own_x, weights, lane);
            } else {
                if (!plain) {
                    finish_rows(p, finisher, y, own_x, weights, lane);
                } else if (finisher.has_z) {
                    finish_plain_rows<true>(finisher, y, own_x, lane);
                } else {
                    finish_plain_rows<false>(finisher, y, own_x, lane);
                }
                __syncwarp();
                finisher.store_results();
            }
            finisher.next_chunk();
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operand(state);
        warpgroup_fence_operand(weighted);
        if constexpr (kPass != kMamba3Ends) {
            if (kKeeps && threadIdx.x == 0) {
                cp_async_bulk_wait_group_read();
            }
            warpgroup_barrier_sync();  // all have read the state before the chunk
            show_state();
        }
    }

    if constexpr (kPass == kMamba3Ends) {
        store_pair_state<kPairwise>(launch.ends + block.segment * ends_row + state_index, state, row, block.columns, dstate,
                                    lane);
        if (threadIdx.x == 0 && block.row0 == 0) {
            launch.decays[(block.segment * p.sequences + block.sequence) * p.nheads + block.head] = carried;
        }
    } else if constexpr (kPass == kMamba3GateBack) {
        gate_back.store_sums(p, launch, block, reinterpret_cast<float*>(tiles), warp, lane);
    } else if constexpr (kPass != kMamba3Before) {
        float* const to = kFromEnd ? launch.backward.dinitial : p.final_ssm;
        if (to != nullptr && (kFromEnd || block.segment == launch.segments - 1)) {
            store_pair_state<kPairwise>(to + state_index, state, row, block.columns, dstate, lane);
        }
    }
}

#endif

template <typename T, int kStates, bool kPairwise, Mamba3Pass kPass>
__global__ void __launch_bounds__(kMamba3WarpgroupThreads, 2)
    mamba3_warpgroup_kernel(const MambaMamba3 p, const Mamba3WarpgroupLaunch launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Tiles = Mamba3WarpgroupTiles<kStates, kPass>;
    MAMBA_DYNAMIC_SHARED(1024, unsigned char, mamba3_warpgroup_shared);
    T* const tiles = reinterpret_cast<T*>(mamba3_warpgroup_shared);
    Mamba3ChunkValues* const values = reinterpret_cast<Mamba3ChunkValues*>(mamba3_warpgroup_shared + Tiles::kValuesAt);
    float* const biases = reinterpret_cast<float*>(mamba3_warpgroup_shared + Tiles::kBiasesAt);
    float* const weights = reinterpret_cast<float*>(mamba3_warpgroup_shared + Tiles::kWeightsAt);
    const int thread = threadIdx.x;
    const Mamba3Block<kPass == kMamba3After> block(p, launch);
    // What nothing is written to stays zero: ranks beyond p.rank, columns beyond dstate.
    static_assert(Tiles::kXAt == 2 * Tiles::kQK, "x lies behind q and k");
    for (int i = thread; i < Tiles::kStateAt / 8; i += kMamba3WarpgroupThreads) {
        reinterpret_cast<uint4*>(tiles)[i] = make_uint4(0, 0, 0, 0);
    }
    if (kPairwise) {
        for (int i = thread; i < 2 * kStates; i += kMamba3WarpgroupThreads) {
            const float* const bias = i / kStates == 0 || kPass == kMamba3After ? p.q_bias : p.k_bias;
            biases[i] = i % kStates < p.dstate ? bias[block.head * p.dstate + i % kStates] : 0.0f;
        }
    }
    const int ranks = 1 << launch.ranks_log2, mimo_v_row = Tiles::weight_rows(ranks);
    const int rows = mimo_v_row + (ranks == kMamba3RanksInShared ? ranks : 0);
    for (int i = thread; i < rows * kMamba3StateRows; i += kMamba3WarpgroupThreads) {
        const int column = i % kMamba3StateRows, row = i / kMamba3StateRows;
        const bool of_v = row >= mimo_v_row, norms = row == 0 && !of_v;
        const int rank = of_v ? row - mimo_v_row : (row - 1) & (ranks - 1);
        const float* const mimo = of_v ? p.mimo_v : row > ranks ? p.mimo_out : p.mimo_z;
        float weight = 1.0f;
        if (column >= block.columns || (!norms && rank >= p.rank)) {
            weight = 0.0f;
        } else if (norms) {
            weight = p.norm_weight != nullptr ? p.norm_weight[block.head * p.headdim + block.row0 + column] : 1.0f;
        } else if (mimo != nullptr) {
            weight = mimo[(block.head * p.rank + rank) * p.headdim + block.row0 + column];
        }
        weights[row * kMamba3WeightPitch + (of_v ? place_of_mimo_v(column) : column)] = weight;
    }
    fence_proxy_async();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    __syncthreads();
    if (thread < kMamba3Threads) {
        setmaxnreg_inc<kMamba3MultiplyRegisters<kPairwise>>();
        multiply_mamba3_tiles<T, kStates, kPairwise, kPass>(p, launch, block, tiles, values, weights);
    } else {
        setmaxnreg_dec<kMamba3TurnRegisters<kPairwise>>();
        make_mamba3_tiles<T, kStates, kPairwise, kPass>(p, launch, block, tiles, values, biases,
                                                        weights + mimo_v_row * kMamba3WeightPitch,
                                                        mamba3_warpgroup_shared + launch.steps_at, thread - kMamba3Threads);
    }
#else
    (void)p;
    (void)launch;
    __trap();
#endif
}

template <typename T, int kStates, bool kPairwise, Mamba3Pass kPass>
cudaError_t launch_mamba3_warpgroups(const MambaMamba3& p, Mamba3WarpgroupLaunch launch, int64_t segments) {
    const auto kernel = mamba3_warpgroup_kernel<T, kStates, kPairwise, kPass>;
    int64_t shared = Mamba3WarpgroupTiles<kStates, kPass>::bytes(1 << launch.ranks_log2);
    if (kPass == kMamba3After && mamba3_steps_turn(p)) {
        launch.steps_at = static_cast<int32_t>(shared);
        shared += kMamba3Warps * Mamba3StepsShared<1>::kBytes;
    }
    const cudaError_t error = allow_shared(kernel, shared);
    if (error != cudaSuccess) {
        return error;
    }
    launch.segments = segments;
    const int64_t blocks = ceil_div(p.headdim, kMamba3StateRows) * launch.group_heads * p.ngroups * segments * p.sequences;
    return launch_programmatic_dependent(kernel, static_cast<unsigned>(blocks), kMamba3WarpgroupThreads,
                                         static_cast<size_t>(shared), p.run.stream, p, launch);
}

}  // namespace mamba
