// Forward on Hopper, for 16-bit dtypes and rows of x and out that lie at multiples of 16 bytes: a block walks the chunks of 64
// rows of one head's state, as in forward.cuh, but its four warps are one warpgroup: B, C and M are read from shared memory
// once for all of them. While the tensor cores work at a chunk, the warps make M of the next one. More than 128 states are two
// slices, a warpgroup each: the first one adds up the results, the second one makes M.
#pragma once

#include "ssd/cuda/forward_block.cuh"
#include "ssd/cuda/products.cuh"
#include "ssd/cuda/warpgroup_mix.cuh"
#include "ssd/plan.h"

namespace mamba {

// Shared memory of a block. B, C and decays come two chunks ahead of their use, x as many as it has stages; the results of a
// chunk take the place of its x.
template <typename T, int kStates, bool kResults>
struct WarpgroupTiles {
    static constexpr int kSteps = 64;
    static constexpr int kSlices = kStates > 128 ? 2 : 1;
    static constexpr int kSlice = kStates / kSlices;
    static constexpr int kThreads = kSlices * kForwardThreads;
    static constexpr int kBlocks = (kResults ? 2 : kSlices == 1 ? 3 : 2) / (kResults ? kSlices : 1);  // a multiprocessor
    static constexpr int kXStages = kResults ? 2 : 4;
    // Elements of a tile.
    static constexpr int kX = kSteps * kForwardRows;
    static constexpr int kB = kSteps * kStates;
    static constexpr int kBC = kResults ? 2 * kB : kB;
    static constexpr int kM = kResults ? kSteps * kSteps : 0;
    static constexpr int kSums = kResults && kSlices > 1 ? kX : 0;  // the second slice's part of the results, in float32
    static constexpr int kBytes = (2 * (kBC + kM) + kXStages * kX) * static_cast<int>(sizeof(T)) +
                                  kSums * static_cast<int>(sizeof(float)) +
                                  2 * static_cast<int>(sizeof(ChunkDecays<kSteps>) + 2 * sizeof(uint64_t));
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The results (y + D x) silu(z) of a warp's 16 rows of headdim, to where x was read. x: of all steps. y: its groups of columns
// by their places. z: from the warp's first row on, or NULL; it is read for `valid` steps and `rows` rows.
template <typename T, bool kGated>
__device__ __forceinline__ void store_results(T* x_tile, const float (&y)[kStepGroups][4],
                                              const Operand<T> (&x)[kStepGroups / 2], const float (&D)[2], const T* z,
                                              int64_t z_stride, int valid, int rows, int lane) {
#pragma unroll
    for (int k = 0; k < kStepGroups / 2; ++k) {
        Operand<T> results;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int half = i % 2;
            const int group = 2 * k + i / 2;
            const float(&sum)[4] = y[place_of_group(group)];
            const float2 input = unpack2<T>(x[k].r[0][i]);
            float first = fmaf(D[half], input.x, sum[2 * half]);
            float second = fmaf(D[half], input.y, sum[2 * half + 1]);
            if (kGated) {
                const int t = 8 * group + lane % 4 * 2;
                const T* const gate = z + t * z_stride + lane / 4 + 8 * half;
                const bool exists = lane / 4 + 8 * half < rows;
                first *= exists && t < valid ? silu(to_float(gate[0])) : 0.0f;
                second *= exists && t + 1 < valid ? silu(to_float(gate[z_stride])) : 0.0f;
            }
            set_pair<T>(results, i, first, second);
        }
        stmatrix_x4_trans(x_tile + 16 * k * kForwardRows, results.r[0]);
    }
}

#endif

// kResults: out and the final state; else a segment's state at its end from zero, and the product of its decays.
template <typename T, int kStates, bool kResults>
__global__ void __launch_bounds__(WarpgroupTiles<T, kStates, kResults>::kThreads, WarpgroupTiles<T, kStates, kResults>::kBlocks)
    ssd_warpgroup_kernel(const MambaSsd p, const ForwardLaunch launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Tiles = WarpgroupTiles<T, kStates, kResults>;
    constexpr int kSteps = Tiles::kSteps;
    constexpr int kSlice = Tiles::kSlice;
    constexpr bool kSliced = Tiles::kSlices > 1;
    MAMBA_DYNAMIC_SHARED(1024, unsigned char, warpgroup_shared);
    T* const BC_tiles = reinterpret_cast<T*>(warpgroup_shared);  // a chunk's C behind its B
    T* const M_tiles = BC_tiles + 2 * Tiles::kBC;
    T* const x_tiles = M_tiles + 2 * Tiles::kM;
    using Decays = ChunkDecays<kSteps>;
    float4* const sums = reinterpret_cast<float4*>(x_tiles + Tiles::kXStages * Tiles::kX);
    Decays* const decays = reinterpret_cast<Decays*>(sums + Tiles::kSums / 4);
    uint64_t* const tile_barriers = reinterpret_cast<uint64_t*>(decays + 2);
    uint64_t* const decay_barriers = tile_barriers + 2;

    // By a shuffle: else the compiler reads the slow special register again for each use.
    const int thread = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.x) % 32);
    const int lane = thread % 32;
    const int warp = thread / 32 % 4;
    const int slice = kSliced ? thread / kForwardThreads : 0;
    const bool adds = slice == 0;                              // the results
    const bool mixes = slice == Tiles::kSlices - 1;            // B and C to M
    const int slice_columns = slice * (kSlice / 64) * kBlock;  // as descriptors count
    const int row = 16 * warp;
    const ForwardBlock<T, kSteps> block(p, launch);
    const int dstate = static_cast<int>(p.dstate);
    const int chunks = block.chunks();
    const int last_steps = chunks > 0 ? steps_in<kSteps>(block.seqlen, block.last_chunk - 1) : 0;
    // Chunks that have all of their steps and rows.
    const int whole_chunks = block.rows < kForwardRows ? 0 : chunks - (last_steps < kSteps ? 1 : 0);

    if (thread == 0) {
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(&tile_barriers[i]);
            mbarrier_init(&decay_barriers[i]);
        }
    }
    [[maybe_unused]] float D[2] = {0.0f, 0.0f};
    if (kResults) {
        for (int i = thread; i < 2 * Tiles::kM / 8; i += Tiles::kThreads) {  // above the diagonal it stays so
            reinterpret_cast<uint4*>(M_tiles)[i] = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int p_row = row + lane / 4 + 8 * i;
            const bool exists = p.D != nullptr && p_row < block.rows;
            D[i] = exists ? p.D[block.head * p.D_head_stride + (block.row0 + p_row) * p.D_dim_stride] : 0.0f;
        }
    }
    fence_proxy_async();
    __syncthreads();
    griddepcontrol_wait();

    // Copies of the block's chunk i, if there is one. One thread takes what the kernel of products.cuh has laid out.
    const int64_t slot = chunk_slot<kSteps>(p, block.batch, block.begin, block.first_chunk);
    const T* next_tiles = static_cast<const T*>(launch.tiles) + (slot * p.ngroups + block.group) * 2 * Tiles::kB;
    const Decays* next_decays = static_cast<const Decays*>(launch.chunk_decays) + slot * p.nheads + block.head;
    const int64_t tiles_step = p.ngroups * 2 * Tiles::kB;
    const int64_t decays_step = p.nheads;
    const auto begin_tile_copies = [&](int i) {
        if (i < chunks && thread == 0) {
            constexpr int kTileBytes = Tiles::kBC * static_cast<int>(sizeof(T));
            constexpr int kDecayBytes = static_cast<int>(sizeof(Decays));
            static_assert(kTileBytes % 16 == 0 && kDecayBytes % 16 == 0, "what bulk copies take");
            mbarrier_arrive_expect_tx(&decay_barriers[i % 2], kDecayBytes);  // M needs these alone
            cp_async_bulk_load(&decays[i % 2], next_decays, kDecayBytes, &decay_barriers[i % 2]);
            mbarrier_arrive_expect_tx(&tile_barriers[i % 2], kTileBytes);
            cp_async_bulk_load(BC_tiles + i % 2 * Tiles::kBC, next_tiles, kTileBytes, &tile_barriers[i % 2]);
            next_tiles += tiles_step;
            next_decays += decays_step;
        }
    };
    // All threads take x, and leave results, in passes of kTogether rows of the tile. An instruction so touches few rows, and
    // all of each: the L1 cache takes a turn for every one.
    using XTile = SwizzledTile<kSteps>;
    constexpr int kTogether = Tiles::kThreads / (kForwardRows / 8);
    constexpr int kPass = kTogether * kForwardRows;  // elements of a tile
    static_assert(kTogether % 8 == 0 && kForwardRows == 64,
                  "then passes, and steps of 16 rows, lie equally far from each other");
    const int x_row = thread / (kForwardRows / 8);
    const int x_column = thread % (kForwardRows / 8) * 8;
    T* const x_own = x_tiles + XTile::at(x_row, x_column);
    const auto existing_rows = [&](int i) {
        return x_column < block.rows ? (i == chunks - 1 ? last_steps : kSteps) - x_row : 0;
    };
    const int64_t x_pass = kTogether * p.x_len_stride;
    const T* next_x = block.x + (block.first_chunk * kSteps + x_row) * p.x_len_stride + x_column;
    const auto begin_x_copies = [&](int i) {
        T* const to = x_own + i % Tiles::kXStages * Tiles::kX;
        if (i < whole_chunks) {
#pragma unroll
            for (int j = 0; j < kSteps / kTogether; ++j) {
                cp_async<16>(to + j * kPass, next_x, true);
                next_x += x_pass;
            }
        } else if (i < chunks) {
            const int existing = existing_rows(i);
#pragma unroll 1
            for (int j = 0; j < kSteps / kTogether; ++j) {
                const bool exists = j * kTogether < existing;
                cp_async<16>(to + j * kPass, exists ? next_x : block.x, exists);
                next_x += x_pass;
            }
        }
        cp_async_commit_group();
    };
    [[maybe_unused]] const int64_t out_pass = kTogether * p.out_len_stride;
    [[maybe_unused]] T* next_out = block.out + (block.first_chunk * kSteps + x_row) * p.out_len_stride + x_column;
    [[maybe_unused]] const auto store_chunk = [&](int i) {
        const T* const from = x_own + i % Tiles::kXStages * Tiles::kX;
        const int existing = i < whole_chunks ? kSteps : existing_rows(i);
#pragma unroll
        for (int j = 0; j < kSteps / kTogether; ++j) {
            if (i < whole_chunks || j * kTogether < existing) {
                *reinterpret_cast<uint4*>(next_out) = *reinterpret_cast<const uint4*>(from + j * kPass);
            }
            next_out += out_pass;
        }
    };
    begin_tile_copies(0);
    begin_tile_copies(1);
    for (int i = 0; i < Tiles::kXStages; ++i) {
        begin_x_copies(i);
    }

    const int64_t ends_row = p.batch * p.nheads * block.state_size;  // what a segment of the other pass leaves
    const float* from = p.initial_state;
    if (block.segment > 0) {
        from = kResults ? launch.ends + (block.segment * kEndsASegment - 1) * ends_row : nullptr;
    }
    float state[kSlice / 8][4];
    if (from != nullptr) {
        load_state<kSlice>(state, from + block.state_index, row, block.rows, slice * kSlice, dstate, lane);
    } else {
#pragma unroll
        for (int j = 0; j < kSlice / 8; ++j) {
            state[j][0] = state[j][1] = state[j][2] = state[j][3] = 0.0f;
        }
    }

    [[maybe_unused]] const int64_t CB_step = p.ngroups * ProductTiles<kSteps>::kSize;  // to the next chunk's
    [[maybe_unused]] const float* next_CB = launch.products + slot * CB_step + block.group * ProductTiles<kSteps>::kSize;
    [[maybe_unused]] float2 CB[kMixGroups];
    [[maybe_unused]] const int column = lane % 4 * 2;
    [[maybe_unused]] const uint32_t M_at = shared_address(M_tiles + SwizzledTile<kSteps>::at(row + lane / 4, column));
    // M of the block's chunk i, whose decays are awaited and products loaded.
    [[maybe_unused]] const auto mix = [&](int i) {
        mbarrier_wait_parity(&decay_barriers[i % 2], i / 2 % 2);
        mix_rows<T>(M_at + i % 2 * Tiles::kM * static_cast<int>(sizeof(T)), CB, decays[i % 2], warp, column, lane);
        if (block.seq_idx != nullptr) {
            end_rows_at_restarts(M_tiles + i % 2 * Tiles::kM, decays[i % 2], warp, lane);
        }
    };
    // Begins to load the products of the block's chunk i, if there is one. In the loop behind fence_proxy_async(), which waits
    // for loads.
    [[maybe_unused]] const auto begin_CB_loads = [&](int i) {
        if (i < chunks) {
            load_CB(CB, next_CB, warp, lane);
            next_CB += CB_step;
        }
    };
    if (kResults && chunks > 0) {
        if (mixes) {
            begin_CB_loads(0);
            mix(0);
        }
        fence_proxy_async();
        if (mixes) {
            begin_CB_loads(1);
        }
    }
    cp_async_wait_group<Tiles::kXStages - 1>();
    __syncthreads();  // the first x and M are there

    const int x_lane = XTile::at(lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8);  // of ldmatrix_x4_trans
    float carried = 1.0f;
    for (int i = 0; i < chunks; ++i) {
        const Decays& now = decays[i % 2];
        const uint64_t B = tile_descriptor(BC_tiles + i % 2 * Tiles::kBC, kBlock * 16) + slice_columns;
        T* const x_tile = x_tiles + i % Tiles::kXStages * Tiles::kX + x_lane;
        [[maybe_unused]] float y[kStepGroups][4];  // rows of headdim, columns of steps in the order of their places
        [[maybe_unused]] Operand<T> H[kSlice / 16];
        if constexpr (kResults) {
            const uint64_t C = tile_descriptor(BC_tiles + i % 2 * Tiles::kBC + Tiles::kB, kBlock * 16) + slice_columns;
#pragma unroll
            for (int k = 0; k < kSlice / 16; ++k) {
                a_from_accumulators<T>(H[k], state[2 * k], state[2 * k + 1]);
            }
            scale_rows(state, now.carry, now.carry);
#pragma unroll
            for (int j = 0; j < kStepGroups; ++j) {
                y[j][0] = y[j][1] = y[j][2] = y[j][3] = 0.0f;
            }
            warpgroup_fence_operand(y);
            warpgroup_fence_operand(H);
            mbarrier_wait_parity(&tile_barriers[i % 2], i / 2 % 2);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kSlice / 16; ++k) {  // H C_t
                wgmma<T, 0>(y, H[k].r[0], C + k / 4 * kBlock + k % 4 * kColumns16);
            }
            wgmma_commit_group();
        } else {
            mbarrier_wait_parity(&decay_barriers[i % 2], i / 2 % 2);
            carried *= now.carry;
            scale_rows(state, now.carry, now.carry);
        }
        Operand<T> x[kSteps / 16];
        Operand<T> weighted[kSteps / 16];
        [[maybe_unused]] Operand<T> own_x[kSteps / 16 / Tiles::kSlices];
#pragma unroll
        for (int k = 0; k < kSteps / 16; ++k) {
            ldmatrix_x4_trans(x[k].r[0], x_tile + 16 * k * kForwardRows);
            weighted[k] = x[k];
            weight_a<T>(weighted[k], now.adding + 16 * k, lane);
        }
        // H' = exp(cs_last) H + (exp(cs_last - cs) dt x)^T B
        if constexpr (!kResults) {
            mbarrier_wait_parity(&tile_barriers[i % 2], i / 2 % 2);
        }
        warpgroup_fence_operand(state);
        warpgroup_fence_operand(weighted);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps / 16; ++k) {
            wgmma<T, 1>(state, weighted[k].r[0], B + k * kRows16);
        }
        wgmma_commit_group();
        if constexpr (kResults) {
            float2 entering[kStepGroups];
#pragma unroll
            for (int j = 0; j < kStepGroups; ++j) {
                entering[j] = *reinterpret_cast<const float2*>(&now.entering[8 * group_at_place(j) + column]);
            }
            wgmma_wait_group<1>();
            warpgroup_fence_operand(y);
            warpgroup_fence_operand(H);
#pragma unroll
            for (int j = 0; j < kStepGroups; ++j) {  // exp(cs_t) H C_t
                y[j][0] *= entering[j].x;
                y[j][1] *= entering[j].y;
                y[j][2] *= entering[j].x;
                y[j][3] *= entering[j].y;
            }
            constexpr int kOwn = kSteps / 16 / Tiles::kSlices;  // slices share out the steps
            const uint64_t M = tile_descriptor(M_tiles + i % 2 * Tiles::kM, kBlock * 16) + slice * kOwn * kColumns16;
#pragma unroll
            for (int k = 0; k < kOwn; ++k) {
                own_x[k] = slice == 0 ? x[k] : x[(k + kOwn) % (kSteps / 16)];
            }
            warpgroup_fence_operand(y);
            warpgroup_fence_operand(own_x);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kOwn; ++k) {  // x^T M^T
                wgmma<T, 0>(y, own_x[k].r[0], M + k * kColumns16);
            }
            wgmma_commit_group();
        }

        if constexpr (kResults) {
            if (mixes && i + 1 < chunks) {
                mix(i + 1);  // while the products run
            }
            wgmma_wait_group<0>();
            warpgroup_fence_operand(y);
            warpgroup_fence_operand(own_x);
            warpgroup_fence_operand(state);
            warpgroup_fence_operand(weighted);
            if constexpr (kSliced) {
                if (!adds) {
#pragma unroll
                    for (int j = 0; j < kStepGroups; ++j) {
                        sums[kForwardThreads * j + thread % kForwardThreads] = make_float4(y[j][0], y[j][1], y[j][2], y[j][3]);
                    }
                }
                __syncthreads();
                if (adds) {
#pragma unroll
                    for (int j = 0; j < kStepGroups; ++j) {
                        const float4 other = sums[kForwardThreads * j + thread];
                        y[j][0] += other.x;
                        y[j][1] += other.y;
                        y[j][2] += other.z;
                        y[j][3] += other.w;
                    }
                }
            }
            const int64_t first = (block.first_chunk + i) * kSteps;
            const int valid = i == chunks - 1 ? last_steps : kSteps;
            if (!adds) {
                // The other warpgroup has them.
            } else if (block.z == nullptr) {
                store_results<T, false>(x_tile, y, x, D, nullptr, 0, 0, 0, lane);
            } else {
                store_results<T, true>(x_tile, y, x, D, block.z + first * p.z_len_stride + row, p.z_len_stride, valid,
                                       block.rows - row, lane);
            }
            cp_async_wait_group<Tiles::kXStages - 2>();
            fence_proxy_async();  // this also waits for loads
            if (mixes) {
                begin_CB_loads(i + 2);
            }
        } else {
            cp_async_wait_group<Tiles::kXStages - 2>();
            wgmma_wait_group<0>();
            warpgroup_fence_operand(state);
            warpgroup_fence_operand(weighted);
        }
        __syncthreads();  // this chunk's tiles and decays are free, its results and the next one's x and M are there
        begin_tile_copies(i + 2);
        if constexpr (kResults) {
            store_chunk(i);
        }
        begin_x_copies(i + Tiles::kXStages);
    }

    if (!kResults) {
        store_state<kSlice>(launch.ends + block.segment * ends_row + block.state_index, state, row, block.rows, slice * kSlice,
                            dstate, lane);
        if (thread == 0 && block.row0 == 0) {
            launch.decays[(block.segment * p.batch + block.batch) * p.nheads + block.head] = carried;
        }
        return;
    }
    if (p.final_state != nullptr && block.segment == launch.segments - 1) {
        store_state<kSlice>(p.final_state + block.state_index, state, row, block.rows, slice * kSlice, dstate, lane);
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
    using Tiles = WarpgroupTiles<T, kStates, kResults>;
    constexpr int kShared = Tiles::kBytes;
    static_assert(kShared <= 227 * 1024 / Tiles::kBlocks - 1024, "what a multiprocessor has room for");
    const cudaError_t error = allow_shared(kernel, kShared);
    if (error != cudaSuccess) {
        return error;
    }
    launch.segments = segments;
    launch.chunks_a_segment = chunks_a_segment;
    const int64_t row_tiles = ceil_div(p.headdim, kForwardRows);
    const int64_t blocks = row_tiles * p.nheads * segments * p.batch;
    return launch_programmatic_dependent(kernel, static_cast<unsigned>(blocks), Tiles::kThreads, kShared, p.run.stream, p,
                                         launch);
}

}  // namespace mamba
