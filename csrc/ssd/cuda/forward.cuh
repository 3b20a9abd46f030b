// Forward: a block walks the chunks of 64 rows of one head's state, which stays in registers; four warps take 16 rows each.
#pragma once

#include "ssd/cuda/forward_block.cuh"
#include "ssd/cuda/products.cuh"

namespace mamba {

// Where M's 16 x 16 tiles (i, j) lie, of which those on and below the diagonal are kept: row i beside row kTiles - 1 - i.
template <int kSteps>
struct MixTiles {
    static constexpr int kTiles = kSteps / 16;
    static constexpr int kStride = 16 * (kTiles + 1) + kTilePad;
    static constexpr int kSize = 16 * ((kTiles + 1) / 2) * kStride;

    static __device__ __forceinline__ int offset(int i, int j) {
        const bool lower = i >= kTiles / 2;
        return 16 * ((lower ? kTiles - 1 - i : i) * kStride + (lower ? j : kTiles - i + j));
    }
};

template <typename T, int kStates, int kSteps>
struct ForwardTiles {
    static constexpr int kXStride = kForwardRows + kTilePad;
    static constexpr int kStride = kStates + kTilePad;
    alignas(16) T x[kSteps * kXStride];
    alignas(16) T B[kSteps * kStride];
    alignas(16) T C[kSteps * kStride];
    alignas(16) T M[MixTiles<kSteps>::kSize];
    ChunkDecays<kSteps> decays[kDecayChunks];
};

// One tile of C_t . B_s, as this lane's accumulators.
struct Product {
    float4 halves[2];
};

template <int kSteps>
__device__ __forceinline__ void load_product(Product& product, const float* products, int tile, int lane) {
    if (tile < ProductTiles<kSteps>::kCount) {
        const float2* const at = reinterpret_cast<const float2*>(products + tile * 256) + lane;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 upper = at[64 * half];
            const float2 lower = at[64 * half + 32];
            product.halves[half] = make_float4(upper.x, upper.y, lower.x, lower.y);
        }
    }
}

// M_ts = (C_t . B_s) exp(cs_t - cs_s) dt_s for s <= t of one run, in 16 x 16 tiles on and below the diagonal.
// first_product: of the tile `warp`, loaded already.
template <typename T, int kSteps>
__device__ __forceinline__ void mix_steps(T* M_tile, const float* products, const Product& first_product,
                                          const ChunkDecays<kSteps>& decays, int warp, int lane) {
    using Tiles = ProductTiles<kSteps>;
    using Mix = MixTiles<kSteps>;
    constexpr int kWarps = kForwardThreads / 32;
    Product next = first_product;
#pragma unroll
    for (int first_tile = 0; first_tile < Tiles::kCount; first_tile += kWarps) {
        const int tile = first_tile + warp;
        const Product product = next;
        if (first_tile + kWarps < Tiles::kCount) {
            load_product<kSteps>(next, products, tile + kWarps, lane);
        }
        if (tile < Tiles::kCount) {
            const int i = Tiles::row(tile);
            const int j = Tiles::column(tile, i);
            T* const M = M_tile + Mix::offset(i, j);
            float2 earlier[2];
            float2 earlier_rest[2];
            float2 dt[2];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int s = 16 * j + 8 * side + lane % 4 * 2;
                earlier[side] = *reinterpret_cast<const float2*>(&decays.log2_decay[s]);
                earlier_rest[side] = *reinterpret_cast<const float2*>(&decays.log2_rest[s]);
                dt[side] = *reinterpret_cast<const float2*>(&decays.dt[s]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = lane / 4 + 8 * half;
                const int t = 16 * i + row;
                const float cs = decays.log2_decay[t];
                const float rest = decays.log2_rest[t];
                const int start = decays.run_start[t];
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const int column = 8 * side + lane % 4 * 2;
                    const int s = 16 * j + column;
                    const float first = half == 0 ? product.halves[side].x : product.halves[side].z;
                    const float second = half == 0 ? product.halves[side].y : product.halves[side].w;
                    const float decay = exp2_fast((cs - earlier[side].x) + (rest - earlier_rest[side].x));
                    const float next_decay = exp2_fast((cs - earlier[side].y) + (rest - earlier_rest[side].y));
                    store_pair<T>(M + row * Mix::kStride + column, s <= t && s >= start ? decay * dt[side].x * first : 0.0f,
                                  s + 1 <= t && s + 1 >= start ? next_decay * dt[side].y * second : 0.0f);
                }
            }
        }
    }
}

// Blocks that a multiprocessor shall hold. Where its shared memory has room for two, registers for four would be spilled in
// vain.
template <int kStates>
constexpr int forward_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100
    return kStates <= 128 ? 4 : 2;
#else
    return kStates <= 64 ? 4 : 2;
#endif
}

// y of 16 kCount steps, the first of which is 16 part, and a warp's 16 columns of headdim from `row` on: what the state gives,
// and what the steps up to there give.
template <typename T, int kStates, int kSteps, int kCount>
__device__ __forceinline__ void multiply_steps(float (&y)[kCount][2][4], const ForwardTiles<T, kStates, kSteps>& shared,
                                               const float (&state)[kStates / 8][4], bool state_is_zero,
                                               const ChunkDecays<kSteps>& now, int part, int row, int lane) {
    using Tiles = ForwardTiles<T, kStates, kSteps>;
    using Mix = MixTiles<kSteps>;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        set_to_zero(y[i]);
    }
    if (!state_is_zero) {  // exp(cs_t) H C_t
#pragma unroll
        for (int k = 0; k < kStates / 16; ++k) {
            Operand<T> b;
            b_from_accumulators<T>(b, state[2 * k], state[2 * k + 1]);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                Operand<T> a;
                load_a<T>(a, shared.C + 16 * (part + i) * Tiles::kStride + 16 * k, Tiles::kStride, lane);
                multiply_add<T>(y[i][0], a, b, 0);
                multiply_add<T>(y[i][1], a, b, 1);
            }
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float above = now.entering[16 * (part + i) + lane / 4];
            const float below = now.entering[16 * (part + i) + lane / 4 + 8];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                y[i][j][0] *= above;
                y[i][j][1] *= above;
                y[i][j][2] *= below;
                y[i][j][3] *= below;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < part + kCount; ++k) {
        Operand<T> b;
        load_b_transposed<T>(b, shared.x + 16 * k * Tiles::kXStride + row, Tiles::kXStride, lane);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (part + i >= k) {
                Operand<T> a;
                load_a<T>(a, shared.M + Mix::offset(part + i, k), Mix::kStride, lane);
                multiply_add<T>(y[i][0], a, b, 0);
                multiply_add<T>(y[i][1], a, b, 1);
            }
        }
    }
}

// out = (y + D x) silu(z) for 16 kCount steps and a warp's 16 columns, of which `valid` steps and `columns` columns exist. z
// may be NULL. vectors: see store_row.
template <typename T, int kCount>
__device__ __forceinline__ void store_results(T* out, int64_t out_stride, const float (&y)[kCount][2][4],
                                              const float (&D)[2][2], const T* x_tile, const T* z, int64_t z_stride, int valid,
                                              int columns, bool vectors, int lane) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = 16 * i + lane / 4 + 8 * half;
            float2 results[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = 8 * j + lane % 4 * 2;
                const float2 input = load_pair<T>(x_tile + t * (kForwardRows + kTilePad) + column);
                results[j].x = fmaf(D[j][0], input.x, y[i][j][2 * half]);
                results[j].y = fmaf(D[j][1], input.y, y[i][j][2 * half + 1]);
                if (z != nullptr && t < valid) {
                    const T* const gate = z + t * z_stride + column;
                    results[j].x *= column < columns ? silu(to_float(gate[0])) : 0.0f;
                    results[j].y *= column + 1 < columns ? silu(to_float(gate[1])) : 0.0f;
                }
            }
            store_row<T>(t < valid ? out + t * out_stride : nullptr, columns, vectors, results[0], results[1], lane);
        }
    }
}

template <typename T, int kStates, int kSteps>
__global__ void __launch_bounds__(kForwardThreads, forward_blocks<kStates>())
    ssd_forward_kernel(const MambaSsd p, const ForwardLaunch launch) {
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    auto& shared = *reinterpret_cast<ForwardTiles<T, kStates, kSteps>*>(memory);

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row = 16 * warp;
    const ForwardBlock<T, kSteps> block(p, launch);
    const int rows = block.rows;
    const int dstate = static_cast<int>(p.dstate);

    float D[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};  // of this lane's columns 8 j + 2 t + i
    if (p.D != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = row + i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (column < rows) {
                D[i / 2][i % 2] = p.D[block.head * p.D_head_stride + (block.row0 + column) * p.D_dim_stride];
            }
        }
    }
    const float* const from =
        block.segment > 0 ? block.end_before(p, launch, 1) + static_cast<int64_t>(block.row0) * dstate : block.first(p);
    bool state_is_zero = from == nullptr;
    float state[kStates / 8][4];
    start_state<kStates>(state, from, row, rows, 0, dstate, lane);

    const float* products =
        launch.products +
        ((slot_of_sequence(p, kSteps, block.batch, block.begin) + block.first_chunk) * p.ngroups + block.group) *
            ProductTiles<kSteps>::kSize;
    for (int64_t chunk = block.first_chunk; chunk < block.last_chunk; ++chunk) {
        const int64_t first = chunk * kSteps;
        const int valid = steps_in<kSteps>(block.seqlen, chunk);
        const int phase = static_cast<int>((chunk - block.first_chunk) % kDecayChunks);
        const ChunkDecays<kSteps>& now = shared.decays[phase];
        StepInputs<kSteps> inputs;  // of this warp's chunk of the next kDecayChunks
        const bool computes_decays = phase == 0 && chunk + warp < block.last_chunk;
        if (computes_decays) {
            load_steps<kSteps>(inputs, block.size, block.seq_idx, (chunk + warp) * kSteps,
                               steps_in<kSteps>(block.seqlen, chunk + warp), lane);
        }
        Product product;
        load_product<kSteps>(product, products, warp, lane);
        load_tile<T, kSteps, kStates, kForwardThreads>(shared.C, block.C + first * p.C_len_stride, p.C_len_stride, valid,
                                                       dstate, launch.C_vectors);
        load_tile<T, kSteps, kForwardRows, kForwardThreads>(shared.x, block.x + first * p.x_len_stride, p.x_len_stride, valid,
                                                            rows, launch.x_vectors);
        load_tile<T, kSteps, kStates, kForwardThreads>(shared.B, block.B + first * p.B_len_stride, p.B_len_stride, valid,
                                                       dstate, launch.B_vectors);
        cp_async_commit_group();
        if (phase == 0) {
            if (computes_decays) {
                chunk_decays<kSteps>(shared.decays[warp], inputs, block.size, block.A, lane);
            }
            __syncthreads();
        }
        mix_steps<T, kSteps>(shared.M, products, product, now, warp, lane);
        products += p.ngroups * ProductTiles<kSteps>::kSize;
        cp_async_wait_group<0>();
        __syncthreads();

        // For this warp's 16 columns, 32 steps at a time so that registers suffice.
        constexpr int kTogether = kSteps < 32 ? 1 : 2;
#pragma unroll
        for (int part = 0; part < kSteps / 16; part += kTogether) {
            float y[kTogether][2][4];
            multiply_steps(y, shared, state, state_is_zero, now, part, row, lane);
            const int64_t step = first + 16 * part;
            store_results<T>(block.out + step * p.out_len_stride + row, p.out_len_stride, y, D,
                             shared.x + 16 * part * (kForwardRows + kTilePad) + row,
                             block.z == nullptr ? nullptr : block.z + step * p.z_len_stride + row, p.z_len_stride,
                             valid - 16 * part, rows - row, launch.out_vectors, lane);
        }
        state_is_zero = false;
        if (chunk + 1 < block.last_chunk || p.final_state != nullptr) {
            update_state<T, kStates, kStates, kSteps>(state, shared.x + row, shared.B, now.adding, now.carry, lane);
        }
        __syncthreads();
    }
    if (p.final_state != nullptr && block.segment == launch.segments - 1) {
        store_state<kStates>(p.final_state + block.state_index, state, row, rows, 0, dstate, lane);
    }
}

}  // namespace mamba
