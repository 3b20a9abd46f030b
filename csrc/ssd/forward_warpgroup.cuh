// Forward on Hopper, for 16-bit dtypes, up to 128 states and rows that lie at multiples of 16 bytes: a block walks the chunks
// of 64 rows of one head's state, as in forward.cuh, but its four warps are one warpgroup: B, C and M are read from shared
// memory once for all of them.
#pragma once

#include "ssd/forward_block.cuh"
#include "ssd/launch.cuh"
#include "ssd/warpgroup.cuh"

namespace mamba {

// Shared memory of a block. B comes a chunk ahead, so does C: it is free again before B is.
template <typename T, int kStates, bool kResults>
struct WarpgroupTiles {
    static constexpr int kSteps = 64;
    static constexpr int kX = kSteps * (kForwardRows + kTilePad);  // elements of a tile; the results take its place
    static constexpr int kB = kSteps * kStates;
    static constexpr int kC = kResults ? kSteps * kStates : 0;
    static constexpr int kM = kResults ? kSteps * kSteps : 0;
    static constexpr int kXStages = kResults ? 1 : 2;
    static constexpr int kBytes = (2 * kB + kC + kM + kXStages * kX) * static_cast<int>(sizeof(T)) +
                                  kDecayChunks * static_cast<int>(sizeof(ChunkDecays<kSteps>));
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// M_ts = (C_t . B_s) exp(cs_t - cs_s) dt_s for s <= t of one run, from a warp's 16 rows of C_t . B_s. What lies above the
// diagonal tiles is not written.
template <typename T, int kSteps>
__device__ __forceinline__ void mix_rows(T* M_tile, const float (&products)[kSteps / 8][4], const ChunkDecays<kSteps>& decays,
                                         int row, int lane) {
    float cs[2];
    float rest[2];
    int start[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int t = row + lane / 4 + 8 * half;
        cs[half] = decays.log2_decay[t];
        rest[half] = decays.log2_rest[t];
        start[half] = decays.run_start[t];
    }
#pragma unroll
    for (int pair = 0; pair < kSteps / 16; ++pair) {
        if (16 * pair <= row) {
#pragma unroll
            for (int j = 2 * pair; j < 2 * pair + 2; ++j) {
                const int s = 8 * j + lane % 4 * 2;
                const float2 earlier = *reinterpret_cast<const float2*>(&decays.log2_decay[s]);
                const float2 earlier_rest = *reinterpret_cast<const float2*>(&decays.log2_rest[s]);
                const float2 dt = *reinterpret_cast<const float2*>(&decays.dt[s]);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int t = row + lane / 4 + 8 * half;
                    const float decay = exp2_fast((cs[half] - earlier.x) + (rest[half] - earlier_rest.x));
                    const float next_decay = exp2_fast((cs[half] - earlier.y) + (rest[half] - earlier_rest.y));
                    const float first = decay * dt.x * products[j][2 * half];
                    const float second = next_decay * dt.y * products[j][2 * half + 1];
                    store_pair<T>(M_tile + SwizzledTile<kSteps>::at(t, s), s <= t && s >= start[half] ? first : 0.0f,
                                  s + 1 <= t && s + 1 >= start[half] ? second : 0.0f);
                }
            }
        }
    }
}

// The results (y + D x) silu(z) of a warp's 16 rows of headdim, in the place of x. x: of all steps. z: from the warp's first
// row on, or NULL; it is read for `valid` steps and `rows` rows.
template <typename T, int kSteps, bool kGated>
__device__ __forceinline__ void store_results(T* tile, const float (&y)[kSteps / 8][4], const float (&D)[2], const T* z,
                                              int64_t z_stride, int valid, int rows, int lane) {
#pragma unroll
    for (int k = 0; k < kSteps / 16; ++k) {
        T* const at = tile + 16 * k * (kForwardRows + kTilePad);
        Operand<T> x;
        load_a_transposed<T>(x, at, kForwardRows + kTilePad, lane);
        Operand<T> results;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int half = i % 2;
            const float2 input = unpack2<T>(x.r[0][i]);
            float first = fmaf(D[half], input.x, y[2 * k + i / 2][2 * half]);
            float second = fmaf(D[half], input.y, y[2 * k + i / 2][2 * half + 1]);
            if (kGated) {
                const int t = 16 * k + i / 2 * 8 + lane % 4 * 2;
                const T* const gate = z + t * z_stride + lane / 4 + 8 * half;
                const bool exists = lane / 4 + 8 * half < rows;
                first *= exists && t < valid ? silu(to_float(gate[0])) : 0.0f;
                second *= exists && t + 1 < valid ? silu(to_float(gate[z_stride])) : 0.0f;
            }
            set_pair<T>(results, i, first, second);
        }
        store_a_transposed<T>(at, kForwardRows + kTilePad, results, lane);
    }
}

// Begins to load a matrix of the block's chunk i, if there is one. from: the sequence's first step.
template <typename T, int kColumns, class Tile>
__device__ __forceinline__ void load_chunk(T* tile, const T* from, int64_t row_stride, int columns,
                                           const ForwardBlock<T, 64>& block, int i) {
    if (i < block.chunks()) {
        const int64_t chunk = block.first_chunk + i;
        load_tile<T, 64, kColumns, kForwardThreads, Tile>(tile, from + chunk * 64 * row_stride, row_stride,
                                                          steps_in<64>(block.seqlen, chunk), columns, true);
    }
}

// What a warp needs for the decays of the block's chunk i, if there is one, and these decays.
template <typename T, int kSteps>
__device__ __forceinline__ void load_decays(StepInputs<kSteps>& inputs, const ForwardBlock<T, kSteps>& block, int i, int lane) {
    if (i < block.chunks()) {
        const int64_t chunk = block.first_chunk + i;
        load_steps<kSteps>(inputs, block.size, block.seq_idx, chunk * kSteps, steps_in<kSteps>(block.seqlen, chunk), lane);
    }
}
template <typename T, int kSteps>
__device__ __forceinline__ void compute_decays(ChunkDecays<kSteps>& decays, const StepInputs<kSteps>& inputs,
                                               const ForwardBlock<T, kSteps>& block, int i, int lane) {
    if (i < block.chunks()) {
        chunk_decays<kSteps>(decays, inputs, block.size, block.A, lane);
    }
}

#endif

// kResults: out and the final state; else a segment's state at its end from zero, and the product of its decays.
template <typename T, int kStates, bool kResults>
__global__ void __launch_bounds__(kForwardThreads, kResults ? 2 : 3)
    ssd_warpgroup_kernel(const MambaSsd p, const ForwardLaunch launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Tiles = WarpgroupTiles<T, kStates, kResults>;
    constexpr int kSteps = Tiles::kSteps;
    constexpr int kXStride = kForwardRows + kTilePad;
    // Descriptors count in 16 bytes: a block of 64 columns, and 16 rows or 16 columns of it.
    constexpr int kBlock = kSteps * 8;
    constexpr int kRows16 = 16 * 8;
    [[maybe_unused]] constexpr int kColumns16 = 2;
    extern __shared__ __align__(1024) unsigned char warpgroup_shared[];
    T* const B_tiles = reinterpret_cast<T*>(warpgroup_shared);
    T* const C_tile = B_tiles + 2 * Tiles::kB;
    T* const M_tile = C_tile + Tiles::kC;
    T* const x_tiles = M_tile + Tiles::kM;
    ChunkDecays<kSteps>* const decays = reinterpret_cast<ChunkDecays<kSteps>*>(x_tiles + Tiles::kXStages * Tiles::kX);

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row = 16 * warp;
    const ForwardBlock<T, kSteps> block(p, launch);
    const int dstate = static_cast<int>(p.dstate);

    [[maybe_unused]] float D[2] = {0.0f, 0.0f};
    if (kResults) {
        for (int i = threadIdx.x; i < Tiles::kM / 8; i += kForwardThreads) {  // above the diagonal it stays so
            reinterpret_cast<uint4*>(M_tile)[i] = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int p_row = row + lane / 4 + 8 * i;
            const bool exists = p.D != nullptr && p_row < block.rows;
            D[i] = exists ? p.D[block.head * p.D_head_stride + (block.row0 + p_row) * p.D_dim_stride] : 0.0f;
        }
    }

    const int64_t ends_row = p.batch * p.nheads * block.state_size;  // what a segment of the other pass leaves
    const float* from = p.initial_state;
    if (block.segment > 0) {
        from = kResults ? launch.ends + (block.segment * kEndsASegment - 1) * ends_row : nullptr;
    }
    float state[kStates / 8][4];
    if (from != nullptr) {
        load_state<kStates>(state, from + block.state_index, row, block.rows, 0, dstate, lane);
    } else {
#pragma unroll
        for (int j = 0; j < kStates / 8; ++j) {
            state[j][0] = state[j][1] = state[j][2] = state[j][3] = 0.0f;
        }
    }

    using States = SwizzledTile<kSteps>;
    using Rows = PaddedTile<kForwardRows>;
    load_chunk<T, kStates, States>(B_tiles, block.B, p.B_len_stride, dstate, block, 0);
    if (kResults) {
        load_chunk<T, kStates, States>(C_tile, block.C, p.C_len_stride, dstate, block, 0);
    } else {
        load_chunk<T, kForwardRows, Rows>(x_tiles, block.x, p.x_len_stride, block.rows, block, 0);
    }
    end_copies();
    float carried = 1.0f;
    for (int i = 0; i < block.chunks(); ++i) {
        [[maybe_unused]] const int64_t first = (block.first_chunk + i) * kSteps;
        const ChunkDecays<kSteps>& now = decays[i % kDecayChunks];
        StepInputs<kSteps> inputs;  // of this warp's one of the next kDecayChunks chunks
        if (i % kDecayChunks == 0) {
            load_decays<T, kSteps>(inputs, block, i + warp, lane);
        }
        T* const next_B = B_tiles + (i + 1) % 2 * Tiles::kB;
        const uint64_t B = tile_descriptor(B_tiles + i % 2 * Tiles::kB, kBlock * 16);
        T* const x_tile = x_tiles + i % Tiles::kXStages * Tiles::kX;
        [[maybe_unused]] float y[kSteps / 8][4];  // rows of headdim, columns of steps
        if constexpr (kResults) {
            load_chunk<T, kForwardRows, Rows>(x_tile, block.x, p.x_len_stride, block.rows, block, i);
            end_copies();
            wait_for_copies<1>();  // all but x
            show_to_warpgroup();
            __syncthreads();
            const uint64_t C = tile_descriptor(C_tile, kBlock * 16);
            float products[kSteps / 8][4];  // C_t . B_s
#pragma unroll
            for (int j = 0; j < kSteps / 8; ++j) {
                products[j][0] = products[j][1] = products[j][2] = products[j][3] = 0.0f;
            }
            hold(products);
            fence_products();
#pragma unroll
            for (int k = 0; k < kStates / 16; ++k) {  // C B^T
                const uint64_t at = k / 4 * kBlock + k % 4 * kColumns16;
                begin_tile_product<T>(products, C + at, B + at);
            }
            commit_products();
            if (i % kDecayChunks == 0) {
                compute_decays<T, kSteps>(decays[warp], inputs, block, i + warp, lane);
                __syncthreads();
            }
            wait_for_products<0>();
            hold(products);
            mix_rows<T, kSteps>(M_tile, products, now, row, lane);
#pragma unroll
            for (int j = 0; j < kSteps / 8; ++j) {
                y[j][0] = y[j][1] = y[j][2] = y[j][3] = 0.0f;
            }
#pragma unroll
            for (int part = 0; part < kStates / 64; ++part) {  // exp(cs_t) H C_t
                Operand<T> H[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    a_from_accumulators<T>(H[k], state[8 * part + 2 * k], state[8 * part + 2 * k + 1]);
                }
                hold(y);
                hold(H);
                fence_products();
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    begin_product<0>(y, H[k], C + part * kBlock + k * kColumns16);
                }
                commit_products();
                wait_for_products<0>();
                hold(y);
                hold(H);
            }
            wait_for_copies<0>();
            show_to_warpgroup();
            __syncthreads();
            // No warp needs this C, or the B before, any more.
            load_chunk<T, kStates, States>(next_B, block.B, p.B_len_stride, dstate, block, i + 1);
            load_chunk<T, kStates, States>(C_tile, block.C, p.C_len_stride, dstate, block, i + 1);
            end_copies();
#pragma unroll
            for (int j = 0; j < kSteps / 8; ++j) {
                const float2 entering = *reinterpret_cast<const float2*>(&now.entering[8 * j + lane % 4 * 2]);
                y[j][0] *= entering.x;
                y[j][1] *= entering.y;
                y[j][2] *= entering.x;
                y[j][3] *= entering.y;
            }
        } else {
            wait_for_copies<0>();
            show_to_warpgroup();
            __syncthreads();
            load_chunk<T, kStates, States>(next_B, block.B, p.B_len_stride, dstate, block, i + 1);
            load_chunk<T, kForwardRows, Rows>(x_tiles + (i + 1) % Tiles::kXStages * Tiles::kX, block.x, p.x_len_stride,
                                              block.rows, block, i + 1);
            end_copies();
            if (i % kDecayChunks == 0) {
                compute_decays<T, kSteps>(decays[warp], inputs, block, i + warp, lane);
                __syncthreads();
            }
            carried *= now.carry;
        }

        Operand<T> x[kSteps / 16];
#pragma unroll
        for (int k = 0; k < kSteps / 16; ++k) {
            load_a_transposed<T>(x[k], x_tile + row + 16 * k * kXStride, kXStride, lane);
        }
        if constexpr (kResults) {  // x^T M^T
            const uint64_t M = tile_descriptor(M_tile, kBlock * 16);
            hold(y);
            hold(x);
            fence_products();
#pragma unroll
            for (int k = 0; k < kSteps / 16; ++k) {
                begin_product<0>(y, x[k], M + k * kColumns16);
            }
            commit_products();
        }

        // H' = exp(cs_last) H + (exp(cs_last - cs) dt x)^T B
        Operand<T> weighted[kSteps / 16];
#pragma unroll
        for (int k = 0; k < kSteps / 16; ++k) {
            weighted[k] = x[k];
            weight_a<T>(weighted[k], now.adding + 16 * k, lane);
        }
#pragma unroll
        for (int j = 0; j < kStates / 8; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                state[j][k] *= now.carry;
            }
        }
        hold(state);
        hold(weighted);
        fence_products();
#pragma unroll
        for (int k = 0; k < kSteps / 16; ++k) {
            begin_product<1>(state, weighted[k], B + k * kRows16);
        }
        commit_products();

        if constexpr (kResults) {
            wait_for_products<1>();
            hold(y);
            hold(x);
            const int valid = steps_in<kSteps>(block.seqlen, block.first_chunk + i);
            if (block.z == nullptr) {
                store_results<T, kSteps, false>(x_tile + row, y, D, nullptr, 0, 0, 0, lane);
            } else {
                store_results<T, kSteps, true>(x_tile + row, y, D, block.z + first * p.z_len_stride + row, p.z_len_stride,
                                               valid, block.rows - row, lane);
            }
            __syncwarp();
            store_columns<T, kSteps>(block.out + first * p.out_len_stride + row, p.out_len_stride, x_tile + row, valid,
                                     block.rows - row, true, lane);
        }
        wait_for_products<0>();
        hold(state);
        hold(weighted);
        if (kResults) {
            __syncthreads();  // x's and M's tiles and the decays are free
        }
    }

    if (!kResults) {
        store_state<kStates>(launch.ends + block.segment * ends_row + block.state_index, state, row, block.rows, 0, dstate,
                             lane);
        if (threadIdx.x == 0 && block.row0 == 0) {
            launch.decays[(block.segment * p.batch + block.batch) * p.nheads + block.head] = carried;
        }
    } else if (p.final_state != nullptr && block.segment == launch.segments - 1) {
        store_state<kStates>(p.final_state + block.state_index, state, row, block.rows, 0, dstate, lane);
    }
#else
    (void)p;
    (void)launch;
    __trap();
#endif
}

// One pass over the first `segments` segments. p.run's device runs code for 9.0a.
template <typename T, int kStates, bool kResults>
cudaError_t launch_warpgroup(const MambaSsd& p, ForwardLaunch launch, int64_t segments, int64_t chunks_a_segment) {
    const auto kernel = ssd_warpgroup_kernel<T, kStates, kResults>;
    constexpr int kShared = WarpgroupTiles<T, kStates, kResults>::kBytes;
    const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), kShared);
    if (error != cudaSuccess) {
        return error;
    }
    launch.segments = segments;
    launch.chunks_a_segment = chunks_a_segment;
    const int64_t row_tiles = (p.headdim + kForwardRows - 1) / kForwardRows;
    const int64_t blocks = row_tiles * p.nheads * segments * p.batch;
    kernel<<<static_cast<unsigned int>(blocks), kForwardThreads, kShared, static_cast<cudaStream_t>(p.run.stream)>>>(p, launch);
    return cudaGetLastError();
}

}  // namespace mamba
