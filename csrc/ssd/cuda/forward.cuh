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

template <typename T, class Layout>
constexpr int forward_shared_bytes() {
    constexpr int kSteps = Layout::kSteps;
    constexpr int kElements = kSteps * (kForwardRows + 2 * Layout::kStates + 3 * kTilePad) + MixTiles<kSteps>::kSize;
    return kElements * static_cast<int>(sizeof(T)) + kDecayChunks * static_cast<int>(sizeof(ChunkDecays<kSteps>));
}

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

// Two neighbouring elements in registers, in as little room as in memory.
template <typename T>
struct Pair {
    uint32_t bits;
    __device__ __forceinline__ void set(float low, float high) { bits = pack2<T>(low, high); }
    __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<uint32_t*>(to) = bits; }
};
template <>
struct Pair<float> {
    float2 values;
    __device__ __forceinline__ void set(float low, float high) { values = make_float2(low, high); }
    __device__ __forceinline__ void store(float* to) const { *reinterpret_cast<float2*>(to) = values; }
};

// out = (y + D x) silu(z) for 16 kCount steps and a warp's 16 columns. z is read for `valid` steps and `columns` columns.
template <typename T, int kCount, bool kGated>
__device__ __forceinline__ void finish_results(Pair<T> (*results)[2][2], const float (&y)[kCount][2][4], const float (&D)[2][2],
                                               const T* x_tile, const T* z, int64_t z_stride, int valid, int columns,
                                               int lane) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = 16 * i + lane / 4 + 8 * half;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = 8 * j + lane % 4 * 2;
                const float2 input = load_pair<T>(x_tile + t * (kForwardRows + kTilePad) + column);
                float low = fmaf(D[j][0], input.x, y[i][j][2 * half]);
                float high = fmaf(D[j][1], input.y, y[i][j][2 * half + 1]);
                if (kGated) {
                    const T* const gate = z + t * z_stride + column;
                    low = t < valid && column < columns ? low * silu(to_float(gate[0])) : 0.0f;
                    high = t < valid && column + 1 < columns ? high * silu(to_float(gate[1])) : 0.0f;
                }
                results[i][half][j].set(low, high);
            }
        }
    }
}

// Blocks that a multiprocessor shall hold. Where its shared memory has room for two, registers for four would be spilled in
// vain.
template <class Layout>
constexpr int forward_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100
    return Layout::kStates <= 128 ? 4 : 2;
#else
    return Layout::kStates <= 64 ? 4 : 2;
#endif
}

// A warp's 16 columns of a tile to memory, kSteps rows of which `valid` exist. vectors: as for load_tile.
template <typename T, int kSteps>
__device__ __forceinline__ void store_columns(T* to, int64_t row_stride, const T* tile, int valid, int columns, bool vectors,
                                              int lane) {
    constexpr int kStride = kForwardRows + kTilePad;
    constexpr int kVector = 16 / sizeof(T);
    constexpr int kTogether = 2 * kVector;  // rows
    const int row = lane % kTogether;
    const int column = lane / kTogether * kVector;
    if (vectors) {
        T* at = to + row * row_stride + column;
#pragma unroll
        for (int i = 0; i < kSteps; i += kTogether) {
            if (i + row < valid && column < columns) {
                *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(tile + (i + row) * kStride + column);
            }
            at += kTogether * row_stride;
        }
        return;
    }
    for (int i = lane / 16; i < valid; i += 2) {
        if (lane % 16 < columns) {
            to[i * row_stride + lane % 16] = tile[i * kStride + lane % 16];
        }
    }
}

template <typename T, class Layout>
__global__ void __launch_bounds__(kForwardThreads, forward_blocks<Layout>())
    ssd_forward_kernel(const MambaSsd p, const ForwardLaunch launch) {
    constexpr int kSteps = Layout::kSteps;
    constexpr int kStates = Layout::kStates;
    constexpr int kXStride = kForwardRows + kTilePad;
    constexpr int kStride = kStates + kTilePad;
    using Mix = MixTiles<kSteps>;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, shared);
    T* const x_tile = reinterpret_cast<T*>(shared);
    T* const B_tile = x_tile + kSteps * kXStride;
    T* const C_tile = B_tile + kSteps * kStride;
    T* const M_tile = C_tile + kSteps * kStride;
    ChunkDecays<kSteps>* const decays = reinterpret_cast<ChunkDecays<kSteps>*>(M_tile + Mix::kSize);

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

    const float* from =
        block.segment == 0 ? p.initial_state : launch.ends + (block.segment - 1) * p.batch * p.nheads * block.state_size;
    bool state_is_zero = from == nullptr;
    float state[kStates / 8][4];
    if (from != nullptr) {
        load_state<kStates>(state, from + block.state_index, row, rows, 0, dstate, lane);
    } else {
#pragma unroll
        for (int j = 0; j < kStates / 8; ++j) {
            state[j][0] = state[j][1] = state[j][2] = state[j][3] = 0.0f;
        }
    }

    const float* products =
        launch.products + (chunk_slot<kSteps>(p, block.batch, block.begin, block.first_chunk) * p.ngroups + block.group) *
                              ProductTiles<kSteps>::kSize;
    for (int64_t chunk = block.first_chunk; chunk < block.last_chunk; ++chunk) {
        const int64_t first = chunk * kSteps;
        const int valid = steps_in<kSteps>(block.seqlen, chunk);
        const int phase = static_cast<int>((chunk - block.first_chunk) % kDecayChunks);
        const ChunkDecays<kSteps>& now = decays[phase];
        StepInputs<kSteps> inputs;  // of this warp's chunk of the next kDecayChunks
        const bool computes_decays = phase == 0 && chunk + warp < block.last_chunk;
        if (computes_decays) {
            load_steps<kSteps>(inputs, block.size, block.seq_idx, (chunk + warp) * kSteps,
                               steps_in<kSteps>(block.seqlen, chunk + warp), lane);
        }
        Product product;
        load_product<kSteps>(product, products, warp, lane);
        load_tile<T, kSteps, kStates, kForwardThreads>(C_tile, block.C + first * p.C_len_stride, p.C_len_stride, valid, dstate,
                                                       launch.C_vectors);
        load_tile<T, kSteps, kForwardRows, kForwardThreads>(x_tile, block.x + first * p.x_len_stride, p.x_len_stride, valid,
                                                            rows, launch.x_vectors);
        load_tile<T, kSteps, kStates, kForwardThreads>(B_tile, block.B + first * p.B_len_stride, p.B_len_stride, valid, dstate,
                                                       launch.B_vectors);
        cp_async_commit_group();
        if (phase == 0) {
            if (computes_decays) {
                chunk_decays<kSteps>(decays[warp], inputs, block.size, block.A, lane);
            }
            __syncthreads();
        }
        mix_steps<T, kSteps>(M_tile, products, product, now, warp, lane);
        products += p.ngroups * ProductTiles<kSteps>::kSize;
        cp_async_wait_group<0>();
        __syncthreads();

        // For this warp's 16 rows, 32 steps at a time so that registers suffice.
        constexpr int kTiles = kSteps / 16;
        constexpr int kTogether = kTiles < 2 ? kTiles : 2;
        Pair<T> results[kTiles][2][2];
#pragma unroll
        for (int part = 0; part < kTiles; part += kTogether) {
            float y[kTogether][2][4];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    y[i][j][0] = y[i][j][1] = y[i][j][2] = y[i][j][3] = 0.0f;
                }
            }
            if (!state_is_zero) {  // exp(cs_t) H C_t
#pragma unroll
                for (int k = 0; k < kStates / 16; ++k) {
                    Operand<T> b;
                    b_from_accumulators<T>(b, state[2 * k], state[2 * k + 1]);
#pragma unroll
                    for (int i = 0; i < kTogether; ++i) {
                        Operand<T> a;
                        load_a<T>(a, C_tile + 16 * (part + i) * kStride + 16 * k, kStride, lane);
                        multiply_add<T>(y[i][0], a, b, 0);
                        multiply_add<T>(y[i][1], a, b, 1);
                    }
                }
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
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
            for (int k = 0; k < part + kTogether; ++k) {
                Operand<T> b;
                load_b_transposed<T>(b, x_tile + 16 * k * kXStride + row, kXStride, lane);
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    if (part + i >= k) {
                        Operand<T> a;
                        load_a<T>(a, M_tile + Mix::offset(part + i, k), Mix::kStride, lane);
                        multiply_add<T>(y[i][0], a, b, 0);
                        multiply_add<T>(y[i][1], a, b, 1);
                    }
                }
            }
            if (block.z == nullptr) {
                finish_results<T, kTogether, false>(&results[part], y, D, x_tile + 16 * part * kXStride + row, nullptr, 0, 0, 0,
                                                    lane);
            } else {
                finish_results<T, kTogether, true>(&results[part], y, D, x_tile + 16 * part * kXStride + row,
                                                   block.z + (first + 16 * part) * p.z_len_stride + row, p.z_len_stride,
                                                   valid - 16 * part, rows - row, lane);
            }
        }
        state_is_zero = false;
        if (chunk + 1 < block.last_chunk || p.final_state != nullptr) {
            update_state<T, kStates, kStates, kSteps>(state, x_tile + row, B_tile, now.adding, now.carry, lane);
        }

        // This warp alone reads these columns of x, and is done with them: from there results go out in longer pieces.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int t = 16 * i + lane / 4 + 8 * half;
                    results[i][half][j].store(x_tile + t * kXStride + row + 8 * j + lane % 4 * 2);
                }
            }
        }
        __syncwarp();
        store_columns<T, kSteps>(block.out + first * p.out_len_stride + row, p.out_len_stride, x_tile + row, valid, rows - row,
                                 launch.out_vectors, lane);
        __syncthreads();
    }

    if (p.final_state != nullptr && block.segment == launch.segments - 1) {
        store_state<kStates>(p.final_state + block.state_index, state, row, rows, 0, dstate, lane);
    }
}

}  // namespace mamba
