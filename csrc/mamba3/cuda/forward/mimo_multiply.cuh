// One of the two warpgroups of forward/mimo.cuh: it multiplies the tiles that the other one makes, and finishes the
// rows. Its rows are k's, or columns of headdim, so that a lane has all ranks of a step of q.
#pragma once

#include "mamba3/cuda/backward/gate_ranks_warpgroup.cuh"
#include "mamba3/cuda/forward/general_tile.cuh"
#include "mamba3/cuda/forward/state.cuh"
#include "ssd/cuda/chunk_tile.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What steps s count in steps t, of all ranks: [half of s][half of t][t]. s is lane / 4 or eight more, t is lane % 4 * 2 or the
// next one, or eight more.
__device__ __forceinline__ void find_step_counts(float (&counts)[2][2][2], const Mamba3RanksValues& values, int lane) {
    const int s = lane / 4, t = lane % 4 * 2;
    float2 high[2], low[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        high[c] = *reinterpret_cast<const float2*>(&values.of[kMamba3High][t + 8 * c]);
        low[c] = *reinterpret_cast<const float2*>(&values.of[kMamba3Low][t + 8 * c]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float from_high = values.of[kMamba3High][s + 8 * half], from_low = values.of[kMamba3Low][s + 8 * half];
        const float scale = values.of[kMamba3Scale][s + 8 * half], gamma = values.of[kMamba3Gamma][s + 8 * half];
        const auto count = [&](float to_high, float to_low) {
            return exp2_fast((to_high - from_high) + (to_low - from_low)) * scale;
        };
#pragma unroll
        for (int c = half; c < 2; ++c) {
            counts[half][c][0] = count(high[c].x, low[c].x);
            counts[half][c][1] = count(high[c].y, low[c].y);
        }
        counts[half][half][0] = s < t ? counts[half][half][0] : s == t ? gamma : 0.0f;
        counts[half][half][1] = s < t + 1 ? counts[half][half][1] : s == t + 1 ? gamma : 0.0f;
    }
    counts[1][0][0] = counts[1][0][1] = 0.0f;
}

template <typename T>
__device__ __forceinline__ void unpack_words(float2 (&values)[4], const uint32_t (&words)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        values[n] = unpack2<T>(words[n]);
    }
}

// x^T: v times the ranks' weights, as operands of a rank's steps each, rows are the warp's columns. v: of the lane's columns
// (n % 2) and steps (n / 2).
template <typename T>
__device__ __forceinline__ void weigh_ranks(Operand<T> (&x)[4], const float2 (&v)[4], const float4 (&weights)[2]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float by = rank_of(weights[n % 2], k);
            set_pair<T>(x[k], n, v[n].x * by, v[n].y * by);
        }
    }
}

// M^T of all ranks of q, rows of a warp's rank of k: products times counts, whose other half is zero.
template <typename T>
__device__ __forceinline__ void store_mixed(T* at, const float (&products)[8][4], const float (&counts)[2][2][2]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // of q
        Operand<T> mixed;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int half = n % 2, c = n / 2;
            if (c < half) {
                mixed.r[0][n] = 0u;
            } else {
                const float(&own_products)[4] = products[2 * k + c];
                set_pair<T>(mixed, n, own_products[2 * half] * counts[half][c][0],
                            own_products[2 * half + 1] * counts[half][c][1]);
            }
        }
        stmatrix_x4(columns_on(at, k), mixed.r[0]);
    }
}

// H q: what of the state before the chunk is left at each step.
__device__ __forceinline__ void decay_to_steps(float (&y)[8][4], const Mamba3RanksValues& values, int step) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const float2 entering = *reinterpret_cast<const float2*>(&values.of[kMamba3Entering][step + 8 * c]);
#pragma unroll
        for (int j = c; j < 8; j += 2) {
            y[j][0] *= entering.x;
            y[j][1] *= entering.y;
            y[j][2] *= entering.x;
            y[j][3] *= entering.y;
        }
    }
}

// What the ranks' rows add up to: each with its D, gate and projection.
template <typename T>
__device__ __forceinline__ void add_ranks(float2 (&sums)[4], const float (&y)[8][4], const float2 (&v)[4],
                                          const uint32_t (&z_words)[4], const float4* weights, float D) {
    float2 z[4];
    unpack_words<T>(z, z_words);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        sums[n] = make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float4 rank_v = weights[kMamba3RankV * kMamba3StateRows + 8 * half];
        const float4 rank_z = weights[kMamba3RankZ * kMamba3StateRows + 8 * half];
        const float4 rank_out = weights[kMamba3RankOut * kMamba3StateRows + 8 * half];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float by_D = D * rank_of(rank_v, k);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int n = 2 * c + half;
                const auto add = [&](float& sum, float row_of_y, float value, float gate) {
                    const float open = reciprocal_fast(1.0f + exp2_fast(gate * rank_of(rank_z, k)));
                    sum = fmaf(fmaf(by_D, value, row_of_y) * (gate * rank_of(rank_out, k)), open, sum);
                };
                add(sums[n].x, y[2 * k + c][2 * half], v[n].x, z[n].x);
                add(sums[n].y, y[2 * k + c][2 * half + 1], v[n].y, z[n].y);
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_sums(T* out, int len_stride, T* staged, const float2 (&sums)[4], int row, int left,
                                           int columns, int lane) {
    uint32_t words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        words[n] = pack2<T>(sums[n].x, sums[n].y);
    }
    // Eight columns of a step a lane.
    const int last = opaque(lane), out_step = last / 2, out_column = row + last % 2 * 8;
    stmatrix_x4_trans(staged + last * 8, words);
    __syncwarp();
    if (out_step < left && out_column < columns) {
        T* const to = out + (out_step * len_stride + out_column);
        *reinterpret_cast<uint4*>(to) =
            *reinterpret_cast<const uint4*>(staged + ((out_step / 8 * 2 + last % 2) * 8 + out_step % 8) * 8);
    }
}

// The state before a block's chunks.
template <int kTiles>
__device__ __forceinline__ void begin_ranks_state(float (&state)[kTiles][4], const MambaMamba3& p,
                                                  const Mamba3WarpgroupLaunch& launch, const Mamba3Block& block, int row,
                                                  int lane) {
    const bool has_initial = block.segment == 0 && p.ssm_state != nullptr;
    const float* from = has_initial ? p.ssm_state + block.state_index(p) : nullptr;
    if (block.segment > 0) {
        from = block.end_of(p, launch, block.segment - 1);
    }
    if (from != nullptr) {
        load_pair_state<false>(state, from, row, block.columns, 8 * kTiles, lane);
    } else {
        set_to_zero(state);
    }
    if (has_initial && block.chunks > 0) {
        add_pairs_before<false>(state, p, block, 0, 4, row, lane);
    }
}

// Begins k_s . q_t: a warp's rows s are a rank's.
template <typename T>
__device__ __forceinline__ void begin_k_q(float (&products)[8][4], uint64_t q_rows, uint64_t k_rows) {
    set_to_zero(products);
    warpgroup_fence_operand(products);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kMamba3RankStates / 16; ++k) {
        const int at = k / 4 * kBlock + k % 4 * kColumns16;
        wgmma<T, 0>(products, k_rows + at, q_rows + at);
    }
    wgmma_commit_group();
}

// Begins H q_t, where H is the rounded state.
template <typename T>
__device__ __forceinline__ void begin_H_q(float (&y)[8][4], Operand<T> (&H)[kMamba3RankStates / 16],
                                          const float (&state)[kMamba3RankStates / 8][4], uint64_t q_rows) {
#pragma unroll
    for (int k = 0; k < kMamba3RankStates / 16; ++k) {
        a_from_accumulators<T>(H[k], state[2 * k], state[2 * k + 1]);
    }
    set_to_zero(y);
    warpgroup_fence_operands(y, H);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kMamba3RankStates / 16; ++k) {
        wgmma<T, 0>(y, H[k].r[0], q_rows + (k / 4 * kBlock + k % 4 * kColumns16));
    }
    wgmma_commit_group();
}

// v times what its steps add to the state.
__device__ __forceinline__ void weigh_steps(float2 (&v)[4], const Mamba3RanksValues& values, int step) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const float2 adding = *reinterpret_cast<const float2*>(&values.of[kMamba3Adding][step + n / 2 * 8]);
        v[n].x *= adding.x;
        v[n].y *= adding.y;
    }
}

// Adds x_k^T times a rank's rows, of all ranks k.
template <typename T, int kTiles>
__device__ __forceinline__ void begin_product(float (&sums)[kTiles][4], const Operand<T> (&x)[4], uint64_t rows) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma<T, 1>(sums, x[k].r[0], rows + k * kRows16);
    }
    wgmma_commit_group();
}

template <typename T, int kTiles>
__device__ __forceinline__ void store_columns(T* at, const Operand<T> (&rows)[kTiles]) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
        stmatrix_x4(columns_on(at, k), rows[k].r[0]);
    }
}

// All of a block's chunks.
template <typename T, bool kBack>
__device__ __forceinline__ void multiply_mamba3_ranks(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                      const Mamba3Block& block, unsigned char* shared) {
    using Tiles = Mamba3RanksTiles<kBack>;
    constexpr int kRanks = 4, kStates = kMamba3RankStates;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    const int row = 16 * warp;
    float state[kStates / 8][4];
    begin_ranks_state(state, p, launch, block, row, lane);
    T* const mixed_tile = reinterpret_cast<T*>(shared + Tiles::kMixedAt);
    const float D = p.D != nullptr ? p.D[block.head] : 0.0f;
    const int64_t first = block.first_step(launch.chunks);
    int left = static_cast<int>(block.range.begin + block.range.seqlen - first);
    [[maybe_unused]] T* out = static_cast<T*>(p.out) + block.range.row * p.out_batch_stride + first * p.out_len_stride +
                              block.head * p.out_head_stride + block.row0;
    [[maybe_unused]] Mamba3StepsGateBack<T> gate_back(p, launch, block, first, row);
    [[maybe_unused]] T* kept =
        static_cast<T*>(launch.backward.states) + (block.slot * block.tiles + block.tile) * (kMamba3StateRows * kStates);
    for (int i = 0; i < block.chunks; ++i) {
        __syncthreads();  // the chunk's tiles are there
        const int stage = i % 2;
        const Mamba3RanksValues& now = *(reinterpret_cast<const Mamba3RanksValues*>(shared + Tiles::kValuesAt) + stage);
        // Places follow from the lane's number again in each chunk, or they would be spilled.
        const int own = opaque(lane), step = own % 4 * 2;
        const float4* const weights = reinterpret_cast<const float4*>(shared + Tiles::kWeightsAt) + row + own / 4;
        const unsigned char* const q_tile = shared + stage * 2 * Tiles::kTile;
        const uint64_t q_rows = tile_descriptor(q_tile, kBlock * 16);
        const uint64_t k_rows = tile_descriptor(q_tile + Tiles::kTile, kBlock * 16);
        float products[8][4], y[8][4];
        begin_k_q<T>(products, q_rows, k_rows);
        float counts[2][2][2];
        find_step_counts(counts, now, own);
        wgmma_wait_group<0>();
        warpgroup_fence_operand(products);
        store_mixed(mixed_tile + Mamba3XTile::at(row + own % 16, own / 16 * 8), products, counts);
        fence_proxy_async();

        Operand<T> H[kStates / 16];
        begin_H_q(y, H, state, q_rows);
        const float carry = now.of[kMamba3Entering][kMamba3RankSteps - 1];
        scale_rows(state, carry, carry);
        const int matrix = own / 8;
        const unsigned char* const v_at =
            shared + (Tiles::kVAt + stage * Tiles::kSteps) +
            place_of_rank_piece(matrix / 2 * 8 + own % 8, 2 * warp + matrix % 2) * static_cast<int>(sizeof(T));
        uint32_t v_words[4], z_words[4];
        ldmatrix_x4_trans(v_words, v_at);
        float2 v[4];  // of the lane's columns (n % 2) and steps (n / 2)
        unpack_words<T>(v, v_words);
        const float4 of_v[2] = {weights[kMamba3RankV * kMamba3StateRows], weights[kMamba3RankV * kMamba3StateRows + 8]};
        Operand<T> x[kRanks], weighted[kRanks];
        weigh_ranks(x, v, of_v);
        if constexpr (kBack) {
            wgmma_wait_group<0>();
            warpgroup_fence_operands(y, H);
            warpgroup_barrier_sync();  // M^T is there, and all have read q, whose place the state before the chunk takes
            T* const state_tile = reinterpret_cast<T*>(shared + stage * 2 * Tiles::kTile);
            store_columns<T>(state_tile + Mamba3XTile::at(row + own % 16, own / 16 * 8), H);
            fence_proxy_async();
        } else {
            warpgroup_barrier_sync();  // M^T is there
            wgmma_wait_group<0>();
            warpgroup_fence_operands(y, H);
        }
        decay_to_steps(y, now, step);
        warpgroup_fence_operands(y, x);
        begin_product<T>(y, x, tile_descriptor(mixed_tile, kBlock * 16));  // M x
        weigh_steps(v, now, step);
        weigh_ranks(weighted, v, of_v);
        warpgroup_fence_operands(state, weighted);
        begin_product<T>(state, weighted, k_rows);  // H' = carry H + x^T k
        ldmatrix_x4_trans(z_words, v_at + (Tiles::kZAt - Tiles::kVAt));
        if constexpr (kBack) {
            uint32_t dout_words[4];
            ldmatrix_x4_trans(dout_words, v_at + (Tiles::kDoutAt - Tiles::kVAt));
            warpgroup_barrier_sync();  // the state before the chunk is there
            if (threadIdx.x == 0) {
                cp_async_bulk_store(kept, q_tile, Tiles::kTile);
            }
            kept += block.tiles * (kMamba3StateRows * kStates);
            wgmma_wait_group<0>();
            warpgroup_fence_operands(y, x, state, weighted);
            T* const first_place =
                reinterpret_cast<T*>(shared + (Tiles::kVAt + stage * Tiles::kSteps)) + warp * (16 * kMamba3RankSteps);
            T* staged[3] = {first_place, first_place + (Tiles::kZAt - Tiles::kVAt) / 2,
                            first_place + (Tiles::kDoutAt - Tiles::kVAt) / 2};
            gate_back.finish(launch.backward, y, v_words, z_words, dout_words, weights, D, staged, left, block.columns - row,
                             lane);
            left -= kMamba3RankSteps;
            if (threadIdx.x == 0) {
                cp_async_bulk_wait_group_read();
            }
        } else {
            wgmma_wait_group<1>();
            warpgroup_fence_operands(y, x);

            unpack_words<T>(v, v_words);
            float2 sums[4];
            add_ranks<T>(sums, y, v, z_words, weights, D);
            T* const staged =
                reinterpret_cast<T*>(shared + (Tiles::kVAt + stage * Tiles::kSteps)) + warp * (16 * kMamba3RankSteps);
            store_sums<T>(out, static_cast<int>(p.out_len_stride), staged, sums, row, left, block.columns, lane);
            out += kMamba3RankSteps * p.out_len_stride;
            left -= kMamba3RankSteps;
            wgmma_wait_group<0>();
            warpgroup_fence_operands(state, weighted);
        }
    }
    if constexpr (kBack) {
        gate_back.store_sums(p, launch, block, reinterpret_cast<float*>(shared + Tiles::kMixedAt), row, warp, lane);
    } else if (p.final_ssm != nullptr && block.segment == launch.segments - 1) {
        store_pair_state<false>(p.final_ssm + block.state_index(p), state, row, block.columns, kStates, lane);
    }
}

#endif

}  // namespace mamba
