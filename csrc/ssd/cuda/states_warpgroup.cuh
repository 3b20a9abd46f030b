// states.cuh on Hopper, for 16-bit dtypes, for both directions: a warpgroup has 64 rows of headdim and up to 128 states in
// registers; 256 states are two slices, a block each. A state leaves for memory as the tile that backward_warpgroup.cuh wants,
// in one bulk store.
//
// Who does what for chunk i of `count`, between two of the block's barriers:
//
//     warpgroup (walks)                             | last warp, one lane (copies)
//     ----------------------------------------------+-----------------------------------------------
//     state -> H[i % 2]; x of chunk i has arrived   | H[(i + 1) % 2] has been read by its bulk store
//     ===================== __syncthreads(), once a chunk, `count` times for both =====================
//     begins x of chunk i + 2 (cp.async)            | begins the bulk store of H[i % 2]
//     waits for B and decays of chunk i (mbarrier)  | begins B and decays of chunk i + 2 (bulk copies)
//     state = carry state + (weight x)^T B          |
//
// Both pass one __syncthreads() before the first chunk. The bulk copies have a warp of their own: a thread that waits until a
// bulk store has read its tile waits for all its other copies too, and those of x are to be two chunks ahead. A launch that
// stores no states has no such warp, thread 0 begins the copies, and three blocks fit a multiprocessor.
#pragma once

#include "ssd/cuda/products.cuh"
#include "ssd/cuda/states.cuh"
#include "ssd/cuda/warpgroup.cuh"
#include "ssd/launch.h"

namespace mamba {

constexpr int kStatesWarpgroupThreads = kForwardThreads + 32;

// What a walk takes of a chunk's decays.
struct alignas(16) StateWeights {
    float weight[kWarpgroupSteps];
    float carry, unused[3];
};

template <typename T, int kStates>
struct StatesSharedMemory {
    static constexpr int kStages = 3;  // of chunks
    static constexpr int kX = kWarpgroupSteps * kForwardRows;
    static constexpr int kB = kWarpgroupSteps * kStates;
    static constexpr int kH = kForwardRows * kStates;
    alignas(1024) T B[kStages][kB];
    alignas(1024) T x[kStages][kX];
    StateWeights weights[kStages];
    uint64_t arrived[kStages];  // mbarriers: B and weights
    alignas(1024) T H[2][kH];   // the last, which a launch that stores no states does without

    static constexpr int kBytesWithoutH =
        kStages * ((kB + kX) * static_cast<int>(sizeof(T)) + static_cast<int>(sizeof(StateWeights) + sizeof(uint64_t)));
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The bulk copies of a block, by one thread.
template <typename T, int kStates>
struct StatesCopies {
    using Shared = StatesSharedMemory<T, kStates>;
    using Block = StatesBlock<kWarpgroupSteps>;
    static constexpr int kStages = Shared::kStages;
    Shared& shared;
    const StatesLaunch& launch;
    const Block& block;
    int64_t tiles_step, decays_step;
    const T* B;
    const char* decays;

    __device__ __forceinline__ StatesCopies(Shared& shared_, const MambaSsd& p, const StatesLaunch& launch_,
                                            const Block& block_)
        : shared(shared_), launch(launch_), block(block_) {
        const PreparedChunks& prepared = launch.prepared;
        const int64_t slot = slot_of_sequence(p, kWarpgroupSteps, block.batch, block.range.begin);
        tiles_step = p.ngroups * prepared.tiles_a_chunk * block.slices * Shared::kB;
        decays_step = p.nheads * prepared.decays_bytes;
        B = static_cast<const T*>(prepared.tiles) + slot * tiles_step +
            ((block.group * prepared.tiles_a_chunk + block.from_end) * block.slices + block.slice) * Shared::kB;
        decays = static_cast<const char*>(prepared.decays) + slot * decays_step + block.head * prepared.decays_bytes;
    }
    // B and decays of chunk i, if there is one.
    __device__ __forceinline__ void begin(int i) const {
        if (i < block.count) {
            constexpr int kTileBytes = Shared::kB * static_cast<int>(sizeof(T));
            constexpr int kWeightBytes = kWarpgroupSteps * static_cast<int>(sizeof(float));
            constexpr int kCarryBytes = 16;
            const int64_t chunk = block.chunk(i);
            const auto& from = *reinterpret_cast<const ChunkDecays<kWarpgroupSteps>*>(decays + chunk * decays_step);
            StateWeights& to = shared.weights[i % kStages];
            uint64_t* const barrier = &shared.arrived[i % kStages];
            mbarrier_arrive_expect_tx(barrier, kTileBytes + kWeightBytes + kCarryBytes);
            cp_async_bulk_load(shared.B[i % kStages], B + chunk * tiles_step, kTileBytes, barrier);
            cp_async_bulk_load(to.weight, block.from_end ? from.entering : from.adding, kWeightBytes, barrier);
            cp_async_bulk_load(&to.carry, &from.carry, kCarryBytes, barrier);
        }
    }
    __device__ __forceinline__ void begin_first() const {
        for (int i = 0; i < kStages - 1; ++i) {
            begin(i);
        }
    }
};

// The last warp, of which one lane works.
template <typename T, int kStates>
__device__ __forceinline__ void copy_states(const StatesCopies<T, kStates>& copies, int lane) {
    using Shared = StatesSharedMemory<T, kStates>;
    const auto& block = copies.block;
    T* const to = static_cast<T*>(copies.launch.walks[block.from_end].chunks) +
                  (((block.batch * block.heads + block.slot) * block.row_tiles + block.tile) * block.chunks * block.slices +
                   block.slice) *
                      Shared::kH;
    if (lane == 0) {
        copies.begin_first();
    }
    for (int i = 0; i < block.count; ++i) {
        if (lane == 0) {
            cp_async_bulk_wait_group_read();  // of the chunk before: its tile is the next one's
        }
        __syncthreads();
        if (lane == 0) {
            cp_async_bulk_store(to + block.chunk(i) * block.slices * Shared::kH, copies.shared.H[i % 2],
                                Shared::kH * static_cast<int>(sizeof(T)));
            copies.begin(i + Shared::kStages - 1);
        }
    }
    if (lane == 0) {
        cp_async_bulk_wait_group_read();
    }
}

// The warpgroup: the walk. Returns the product of the decays. stores: the last warp has the bulk copies, else thread 0.
template <typename T, int kStates>
__device__ __forceinline__ float walk_states(const StatesCopies<T, kStates>& copies, float (&state)[kStates / 8][4],
                                             const StateWalk& walk, bool stores, int thread) {
    using Shared = StatesSharedMemory<T, kStates>;
    Shared& shared = copies.shared;
    const auto& block = copies.block;
    constexpr int kStages = Shared::kStages;
    using XTile = SwizzledTile<kWarpgroupSteps>;
    const int lane = thread % 32;
    const int row = thread / 32 * 16;
    const T* const x = first_piece(static_cast<const T*>(walk.x) + block.range.row * walk.x_batch_stride +
                                       block.range.begin * walk.x_len_stride + block.head * walk.x_head_stride + block.row0,
                                   walk.x_len_stride, thread);
    const auto begin_copies = [&](int i) {
        if (i < block.count) {
            const int64_t chunk = block.chunk(i);
            load_swizzled<T, kForwardThreads>(shared.x[i % kStages], x + chunk * kWarpgroupSteps * walk.x_len_stride,
                                              walk.x_len_stride, block.steps(i), block.rows, walk.x_vectors, thread);
        }
        cp_async_commit_group();
    };
    for (int i = 0; i < kStages - 1; ++i) {
        begin_copies(i);
    }
    if (!stores && thread == 0) {
        copies.begin_first();
    }
    const int x_lane = XTile::at(lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8);  // of ldmatrix_x4_trans
    float product = 1.0f;
    for (int i = 0; i < block.count; ++i) {
        const int stage = i % kStages;
        if (stores) {
#pragma unroll
            for (int k = 0; k < kStates / 16; ++k) {
                Operand<T> H;
                a_from_accumulators<T>(H, state[2 * k], state[2 * k + 1]);
                stmatrix_x4(columns_on(shared.H[i % 2] + XTile::at(row + lane % 16, lane / 16 * 8), k), H.r[0]);
            }
        }
        cp_async_wait_group<kStages - 2>();
        fence_proxy_async();
        __syncthreads();  // this chunk's x and state are there, the tiles of the one before are free
        begin_copies(i + kStages - 1);
        if (!stores && thread == 0) {
            copies.begin(i + kStages - 1);
        }
        mbarrier_wait_parity(&shared.arrived[stage], i / kStages % 2);
        const StateWeights& now = shared.weights[stage];
        product *= now.carry;
        Operand<T> weighted[kWarpgroupSteps / 16];
#pragma unroll
        for (int k = 0; k < kWarpgroupSteps / 16; ++k) {
            ldmatrix_x4_trans(weighted[k].r[0], shared.x[stage] + x_lane + 16 * k * kForwardRows);
            weight_a<T>(weighted[k], now.weight + 16 * k, lane);
        }
        scale_rows(state, now.carry, now.carry);
        warpgroup_fence_operands(state, weighted);
        wgmma_fence();
        const uint64_t B = tile_descriptor(shared.B[stage], kBlock * 16);
#pragma unroll
        for (int k = 0; k < kWarpgroupSteps / 16; ++k) {
            wgmma<T, 1>(state, weighted[k].r[0], B + k * kRows16);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        warpgroup_fence_operands(state, weighted);
    }
    return product;
}

#endif

// walk.chunks: (B, heads of this launch, row tiles, chunks, slices, 64 * kStates), each a SwizzledTile of rows of headdim.
template <typename T, int kStates>
__global__ void __launch_bounds__(kStatesWarpgroupThreads, 2)
    ssd_states_warpgroup_kernel(const MambaSsd p, const StatesLaunch launch, int slices) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    MAMBA_DYNAMIC_SHARED(1024, unsigned char, warpgroup_shared);
    using Shared = StatesSharedMemory<T, kStates>;
    auto& shared = *reinterpret_cast<Shared*>(warpgroup_shared);
    const int thread = threadIdx.x;
    const StatesBlock<kWarpgroupSteps> block(p, launch, slices);
    const StateWalk& walk = launch.walks[block.from_end];
    const bool stores = walk.chunks != nullptr && launch.ends_only == 0;
    if (thread == 0) {
        for (uint64_t& barrier : shared.arrived) {
            mbarrier_init(&barrier);
        }
    }
    fence_proxy_async();
    __syncthreads();
    griddepcontrol_wait();
    const StatesCopies<T, kStates> copies(shared, p, launch, block);
    if (thread >= kForwardThreads) {
        copy_states(copies, thread % 32);
        return;
    }

    const int lane = thread % 32;
    const int row = thread / 32 * 16;
    const int column = block.slice * kStates;
    const int dstate = static_cast<int>(p.dstate);
    float state[kStates / 8][4];
    const int64_t offset = (block.tile * slices + block.slice) * Shared::kH;  // in an end
    if (block.starts_at_end(launch)) {
        load_accumulators<kStates>(state, block.end_of(p, launch, walk, block.segment - 1, offset), thread);
    } else {
        start_state<kStates>(state, block.first(walk), row, block.rows, column, dstate, lane);
    }
    const float product = walk_states(copies, state, walk, stores, thread);
    if (launch.ends_only != 0) {
        block.store_product(p, walk, product);
        store_accumulators<kStates>(block.end_of(p, launch, walk, block.segment, offset), state, thread);
    } else if (float* const to = block.last(launch, walk)) {
        store_state<kStates>(to, state, row, block.rows, column, dstate, lane);
    }
#else
    (void)p;
    (void)launch;
    (void)slices;
    __trap();
#endif
}

}  // namespace mamba
