// Forward on Hopper, for 16-bit dtypes and rows of x and out that lie at multiples of 16 bytes: a block walks the chunks of 64
// rows of one head's state, as in forward.cuh, but its four warps are one warpgroup: B, C and M are read from shared memory
// once for all of them. For up to 128 states; more: forward_slices.cuh.
//
// What a block does with chunk i between two of its barriers (tensor cores on the right):
//
//     state to operands, state *= carry            | y = H C                          waits for B, C (mbarrier)
//     x from shared memory, x * weights            | state += (weighted x)^T B
//     y *= entering                                | y += x^T M                       M of chunk i, made one chunk ago
//     M of chunk i + 1 (mix)                       |   ... while these run            waits for decays (mbarrier)
//     results over x; loads of C B^T for chunk i + 2
//     ===================== __syncthreads(), once a chunk, for all warps =====================
//     one thread: bulk copies of B, C and decays of chunk i + 2; all: results to memory, cp.async of x of chunk i + 2
#pragma once

#include "ssd/cuda/forward_block.cuh"
#include "ssd/cuda/products.cuh"
#include "ssd/cuda/warpgroup_mix.cuh"
#include "ssd/launch.h"

namespace mamba {

// Two stages of everything. The results of a chunk take the place of its x.
template <typename T, int kStates>
struct ForwardSharedMemory {
    using Decays = ChunkDecays<kWarpgroupSteps>;
    static constexpr int kThreads = kForwardThreads;
    static constexpr int kBlocks = 2;  // a multiprocessor
    static constexpr int kStages = 2;  // of x
    static constexpr int kDecayStages = 2;
    static constexpr int kX = kWarpgroupSteps * kForwardRows;
    static constexpr int kB = kWarpgroupSteps * kStates;
    static constexpr int kM = kWarpgroupSteps * kWarpgroupSteps;

    alignas(1024) T BC[2][2 * kB];  // a chunk's C behind its B
    alignas(1024) T M[2][kM];
    alignas(1024) T x[kStages][kX];
    Decays decays[2];
    uint64_t tiles_arrived[2], decays_arrived[2];  // mbarriers
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

// D of the lane's rows of headdim, of a block's `rows`.
__device__ __forceinline__ void load_D(float (&D)[2], const MambaSsd& p, int64_t head, int row0, int rows, int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int p_row = row + 8 * i;
        const bool exists = p.D != nullptr && p_row < rows;
        D[i] = exists ? p.D[head * p.D_head_stride + (row0 + p_row) * p.D_dim_stride] : 0.0f;
    }
}

// A block's copies from and to memory, by a warpgroup. Those of B, C and decays are one thread's; all threads take x, and leave
// results, in passes of kTogether rows of the tile: an instruction so touches few rows, and all of each. The L1 cache takes a
// turn for every one.
template <typename T, class Shared>
struct ForwardCopies {
    using Decays = ChunkDecays<kWarpgroupSteps>;
    using XTile = SwizzledTile<kWarpgroupSteps>;
    static constexpr int kSteps = kWarpgroupSteps;
    static constexpr int kTogether = kForwardThreads / (kForwardRows / 8);
    static constexpr int kPass = kTogether * kForwardRows;  // elements of a tile
    static_assert(kTogether % 8 == 0 && kForwardRows == 64,
                  "then passes, and steps of 16 rows, lie equally far from each other");

    Shared& shared;
    int thread, chunks;
    int last_steps;    // of the last chunk
    int whole_chunks;  // that have all of their steps and rows
    int x_row, x_column, rows;
    int64_t tiles_step, decays_step, x_pass, out_pass;
    const T* next_tiles;
    const Decays* next_decays;
    const T *x, *next_x;
    T* next_out;
    int x_at;  // of the thread's first piece in a tile

    __device__ __forceinline__ ForwardCopies(Shared& shared_, const MambaSsd& p, const ForwardLaunch& launch,
                                             const ForwardBlock<T, kSteps>& block, int64_t slot, int thread_)
        : shared(shared_), thread(thread_), chunks(block.chunks()), rows(block.rows), x(block.x) {
        last_steps = chunks > 0 ? steps_in<kSteps>(block.seqlen, block.last_chunk - 1) : 0;
        whole_chunks = rows < kForwardRows ? 0 : chunks - (last_steps < kSteps ? 1 : 0);
        next_tiles = static_cast<const T*>(launch.prepared.tiles) + (slot * p.ngroups + block.group) * 2 * Shared::kB;
        next_decays = static_cast<const Decays*>(launch.prepared.decays) + slot * p.nheads + block.head;
        tiles_step = p.ngroups * 2 * Shared::kB;
        decays_step = p.nheads;
        x_row = thread / (kForwardRows / 8);
        x_column = thread % (kForwardRows / 8) * 8;
        x_at = XTile::at(x_row, x_column);
        x_pass = kTogether * p.x_len_stride;
        next_x = x + (block.first_chunk * kSteps + x_row) * p.x_len_stride + x_column;
        out_pass = kTogether * p.out_len_stride;
        next_out = block.out + (block.first_chunk * kSteps + x_row) * p.out_len_stride + x_column;
    }
    // Of the block's chunk i, if there is one, as the next four.
    __device__ __forceinline__ void begin_decays(int i) {
        if (i < chunks && thread == 0) {
            constexpr int kBytes = static_cast<int>(sizeof(Decays));
            static_assert(kBytes % 16 == 0, "what bulk copies take");
            uint64_t* const barrier = &shared.decays_arrived[i % Shared::kDecayStages];
            mbarrier_arrive_expect_tx(barrier, kBytes);
            cp_async_bulk_load(&shared.decays[i % Shared::kDecayStages], next_decays, kBytes, barrier);
            next_decays += decays_step;
        }
    }
    __device__ __forceinline__ void begin_tiles(int i) {
        if (i < chunks && thread == 0) {
            constexpr int kTileBytes = 2 * Shared::kB * static_cast<int>(sizeof(T));
            static_assert(kTileBytes % 16 == 0, "what bulk copies take");
            mbarrier_arrive_expect_tx(&shared.tiles_arrived[i % 2], kTileBytes);
            cp_async_bulk_load(shared.BC[i % 2], next_tiles, kTileBytes, &shared.tiles_arrived[i % 2]);
            next_tiles += tiles_step;
        }
    }
    __device__ __forceinline__ int existing_rows(int i) const {
        return x_column < rows ? (i == chunks - 1 ? last_steps : kSteps) - x_row : 0;
    }
    __device__ __forceinline__ void begin_x(int i) {
        T* const to = shared.x[i % Shared::kStages] + x_at;
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
                cp_async<16>(to + j * kPass, exists ? next_x : x, exists);
                next_x += x_pass;
            }
        }
        cp_async_commit_group();
    }
    __device__ __forceinline__ void store_results(int i) {
        const T* const from = shared.x[i % Shared::kStages] + x_at;
        const int existing = i < whole_chunks ? kSteps : existing_rows(i);
#pragma unroll
        for (int j = 0; j < kSteps / kTogether; ++j) {
            if (i < whole_chunks || j * kTogether < existing) {
                *reinterpret_cast<uint4*>(next_out) = *reinterpret_cast<const uint4*>(from + j * kPass);
            }
            next_out += out_pass;
        }
    }
};

// How a warp makes its rows of M.
template <typename T, class Shared>
struct ForwardMixer {
    static constexpr int kSteps = kWarpgroupSteps;

    Shared& shared;
    const float* next_CB;
    int64_t CB_step;
    float2 CB[kMixGroups];
    int chunks, warp, lane, column;
    uint32_t M_at;
    bool restarts;

    __device__ __forceinline__ ForwardMixer(Shared& shared_, const MambaSsd& p, const ForwardLaunch& launch,
                                            const ForwardBlock<T, kSteps>& block, int64_t slot, int warp_, int lane_)
        : shared(shared_), chunks(block.chunks()), warp(warp_), lane(lane_), column(lane_ % 4 * 2) {
        CB_step = p.ngroups * ProductTiles<kSteps>::kSize;
        next_CB = launch.products + slot * CB_step + block.group * ProductTiles<kSteps>::kSize;
        M_at = shared_address(shared.M[0] + SwizzledTile<kSteps>::at(16 * warp + lane / 4, column));
        restarts = block.seq_idx != nullptr;
    }
    // Of the block's chunk i, if there is one. In the loop behind fence_proxy_async(), which waits for loads.
    __device__ __forceinline__ void begin_loads(int i) {
        if (i < chunks) {
            load_CB(CB, next_CB, warp, lane);
            next_CB += CB_step;
        }
    }
    // M of the block's chunk i, whose products are loaded.
    __device__ __forceinline__ void mix(int i) {
        mbarrier_wait_parity(&shared.decays_arrived[i % Shared::kDecayStages], i / Shared::kDecayStages % 2);
        const auto& decays = shared.decays[i % Shared::kDecayStages];
        mix_rows<T>(M_at + i % 2 * Shared::kM * static_cast<int>(sizeof(T)), CB, decays, warp, column, lane);
        if (restarts) {
            end_rows_at_restarts(shared.M[i % 2], decays, warp, lane);
        }
    }
};

// A chunk's products, which run on the tensor cores while the warp goes on.
template <typename T, int kStates>
struct ForwardProducts {
    using Shared = ForwardSharedMemory<T, kStates>;
    static constexpr int kTiles = kWarpgroupSteps / 16;

    float y[kStepGroups][4];  // rows of headdim, columns of steps in the order of their places
    Operand<T> H[kStates / 16];
    Operand<T> x[kTiles];
    Operand<T> weighted[kTiles];
    Operand<T> own_x[kTiles];

    __device__ __forceinline__ void begin(Shared& shared, float (&state)[kStates / 8][4], const T* x_tile, int i, int lane) {
        const auto& now = shared.decays[i % 2];
        const uint64_t B = tile_descriptor(shared.BC[i % 2], kBlock * 16);
        const uint64_t C = tile_descriptor(shared.BC[i % 2] + Shared::kB, kBlock * 16);
#pragma unroll
        for (int k = 0; k < kStates / 16; ++k) {
            a_from_accumulators<T>(H[k], state[2 * k], state[2 * k + 1]);
        }
        scale_rows(state, now.carry, now.carry);
        set_to_zero(y);
        warpgroup_fence_operands(y, H);
        mbarrier_wait_parity(&shared.tiles_arrived[i % 2], i / 2 % 2);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kStates / 16; ++k) {  // H C_t
            wgmma<T, 0>(y, H[k].r[0], C + k / 4 * kBlock + k % 4 * kColumns16);
        }
        wgmma_commit_group();
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
            ldmatrix_x4_trans(x[k].r[0], x_tile + 16 * k * kForwardRows);
            weighted[k] = x[k];
            weight_a<T>(weighted[k], now.adding + 16 * k, lane);
        }
        // H' = exp(cs_last) H + (exp(cs_last - cs) dt x)^T B
        warpgroup_fence_operands(state, weighted);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
            wgmma<T, 1>(state, weighted[k].r[0], B + k * kRows16);
        }
        wgmma_commit_group();
        float2 entering[kStepGroups];
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
            entering[j] = *reinterpret_cast<const float2*>(&now.entering[8 * group_at_place(j) + lane % 4 * 2]);
        }
        wgmma_wait_group<1>();
        warpgroup_fence_operands(y, H);
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {  // exp(cs_t) H C_t
            y[j][0] *= entering[j].x;
            y[j][1] *= entering[j].y;
            y[j][2] *= entering[j].x;
            y[j][3] *= entering[j].y;
        }
        const uint64_t M = tile_descriptor(shared.M[i % 2], kBlock * 16);
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
            own_x[k] = x[k];
        }
        warpgroup_fence_operands(y, own_x);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {  // x^T M^T
            wgmma<T, 0>(y, own_x[k].r[0], M + k * kColumns16);
        }
        wgmma_commit_group();
    }
    __device__ __forceinline__ void wait(float (&state)[kStates / 8][4]) {
        wgmma_wait_group<0>();
        warpgroup_fence_operands(y, own_x, state, weighted);
    }
};

#endif

template <typename T, int kStates>
__global__ void __launch_bounds__(ForwardSharedMemory<T, kStates>::kThreads, ForwardSharedMemory<T, kStates>::kBlocks)
    ssd_warpgroup_kernel(const MambaSsd p, const ForwardLaunch launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Shared = ForwardSharedMemory<T, kStates>;
    constexpr int kSteps = kWarpgroupSteps;
    MAMBA_DYNAMIC_SHARED(1024, unsigned char, warpgroup_shared);
    Shared& shared = *reinterpret_cast<Shared*>(warpgroup_shared);

    // By a shuffle: else the compiler reads the slow special register again for each use.
    const int thread = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.x) % 32);
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int row = 16 * warp;
    const ForwardBlock<T, kSteps> block(p, launch);
    const int dstate = static_cast<int>(p.dstate);
    const int chunks = block.chunks();

    if (thread == 0) {
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(&shared.tiles_arrived[i]);
            mbarrier_init(&shared.decays_arrived[i]);
        }
    }
    for (int i = thread; i < 2 * Shared::kM / 8; i += Shared::kThreads) {  // above the diagonal it stays so
        reinterpret_cast<uint4*>(shared.M[0])[i] = make_uint4(0, 0, 0, 0);
    }
    float D[2];
    load_D(D, p, block.head, block.row0, block.rows, row + lane / 4);
    fence_proxy_async();
    __syncthreads();
    griddepcontrol_wait();

    const int64_t slot = slot_of_sequence(p, kSteps, block.batch, block.begin) + block.first_chunk;
    ForwardCopies<T, Shared> copies(shared, p, launch, block, slot, thread);
    ForwardMixer<T, Shared> mixer(shared, p, launch, block, slot, warp, lane);
    for (int i = 0; i < 2; ++i) {
        copies.begin_decays(i);  // M needs these alone
        copies.begin_tiles(i);
    }
    for (int i = 0; i < 2; ++i) {
        copies.begin_x(i);
    }
    float state[kStates / 8][4];
    if (block.segment > 0) {
        const int64_t tile = static_cast<int64_t>(block.row0) * kStates;
        load_accumulators<kStates>(state, block.end_before(p, launch, ends_a_segment(1)) + tile, thread);
    } else {
        start_state<kStates>(state, block.first(p), row, block.rows, 0, dstate, lane);
    }
    if (chunks > 0) {
        mixer.begin_loads(0);
        mixer.mix(0);
        fence_proxy_async();
        mixer.begin_loads(1);
    }
    cp_async_wait_group<1>();
    __syncthreads();  // the first x and M are there

    const int x_lane = SwizzledTile<kSteps>::at(lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8);  // of ldmatrix_x4_trans
    for (int i = 0; i < chunks; ++i) {
        T* const x_tile = shared.x[i % 2] + x_lane;
        ForwardProducts<T, kStates> products;
        products.begin(shared, state, x_tile, i, lane);
        if (i + 1 < chunks) {
            mixer.mix(i + 1);  // while the products run
        }
        products.wait(state);
        if (block.z == nullptr) {
            store_results<T, false>(x_tile, products.y, products.x, D, nullptr, 0, 0, 0, lane);
        } else {
            const int64_t first = (block.first_chunk + i) * kSteps;
            store_results<T, true>(x_tile, products.y, products.x, D, block.z + first * p.z_len_stride + row, p.z_len_stride,
                                   i == chunks - 1 ? copies.last_steps : kSteps, block.rows - row, lane);
        }
        cp_async_wait_group<0>();
        fence_proxy_async();  // this also waits for loads
        mixer.begin_loads(i + 2);
        __syncthreads();  // this chunk's tiles and decays are free, its results and the next one's x and M are there
        copies.begin_decays(i + 2);
        copies.begin_tiles(i + 2);
        copies.store_results(i);
        copies.begin_x(i + 2);
    }
    if (p.final_state != nullptr && block.segment == launch.segments - 1) {
        store_state<kStates>(p.final_state + block.state_index, state, row, block.rows, 0, dstate, lane);
    }
#else
    (void)p;
    (void)launch;
    __trap();
#endif
}

}  // namespace mamba
