// states.cuh on Hopper, for 16-bit dtypes: a warpgroup has 64 rows of headdim and up to 128 states in registers. A state leaves
// for memory as the tile that backward_warpgroup.cuh wants, in one bulk store. One more warp has all bulk copies: who waits
// until a store has read its tile waits for all other copies of the thread too, and those of x are to be some chunks ahead.
#pragma once

#include "ssd/cuda/prepare_backward.cuh"

namespace mamba {

constexpr int kStatesWarpgroupThreads = kForwardThreads + 32;

// What a walk takes of a chunk's decays.
struct alignas(16) StateWeights {
    float weight[kWarpgroupSteps];
    float carry;
};

template <typename T, int kStates>
struct StatesTiles {
    static constexpr int kStages = 3;  // of chunks in shared memory
    // Elements of a tile.
    static constexpr int kX = kWarpgroupSteps * kForwardRows;
    static constexpr int kB = kWarpgroupSteps * kStates;
    static constexpr int kH = kForwardRows * kStates;
    static constexpr int kBytes = (2 * kH + kStages * (kB + kX)) * static_cast<int>(sizeof(T)) +
                                  kStages * static_cast<int>(sizeof(StateWeights) + sizeof(uint64_t));
};

// walk.chunks: (B, heads of this launch, row tiles, chunks, slices, 64 * kStates), each a SwizzledTile of rows of headdim.
// kSlices: parts that the states are split into, a block each.
template <typename T, int kStates, int kSlices>
__global__ void __launch_bounds__(kStatesWarpgroupThreads, 2)
    ssd_states_warpgroup_kernel(const MambaSsd p, const StatesLaunch launch, const PrepareLaunch prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Tiles = StatesTiles<T, kStates>;
    constexpr int kStages = Tiles::kStages;
    using XTile = SwizzledTile<kWarpgroupSteps>;
    MAMBA_DYNAMIC_SHARED(1024, unsigned char, warpgroup_shared);
    T* const H_tiles = reinterpret_cast<T*>(warpgroup_shared);
    T* const B_tiles = H_tiles + 2 * Tiles::kH;
    T* const x_tiles = B_tiles + kStages * Tiles::kB;
    StateWeights* const weights = reinterpret_cast<StateWeights*>(x_tiles + kStages * Tiles::kX);
    uint64_t* const barriers = reinterpret_cast<uint64_t*>(weights + kStages);

    const int thread = threadIdx.x;
    const int lane = thread % 32;
    const int row = thread / 32 * 16;
    const int64_t row_tiles = ceil_div(p.headdim, kForwardRows);
    const int64_t heads = launch.group_heads * p.ngroups;
    const int64_t walked = launch.ends_only ? launch.segments - 1 : launch.segments;
    int64_t block = blockIdx.x;
    const int slice = static_cast<int>(block % kSlices);
    block /= kSlices;
    const int64_t tile = block % row_tiles;
    block /= row_tiles;
    const int64_t slot = block % heads;  // of this launch's heads
    block /= heads;
    const bool from_end = block % 2 != 0;
    block /= 2;
    const int64_t segment = block % walked;
    const int64_t batch = block / walked;
    const StateWalk& walk = launch.walks[from_end];
    const int64_t group = slot / launch.group_heads;
    const int64_t head = group * (p.nheads / p.ngroups) + launch.first_head + slot % launch.group_heads;
    const int64_t chunks = prepared.chunks;
    const int64_t first_chunk = segment * launch.chunks_a_segment;
    const int64_t left = chunks - first_chunk;
    const int count = static_cast<int>(left < launch.chunks_a_segment ? left : launch.chunks_a_segment);
    const int row0 = static_cast<int>(tile) * kForwardRows;
    const int rows = static_cast<int>(p.headdim) - row0;  // may be more than kForwardRows
    const int dstate = static_cast<int>(p.dstate);
    const auto chunk_at = [&](int i) { return from_end ? chunks - 1 - first_chunk - i : first_chunk + i; };

    if (thread == 0) {
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(&barriers[i]);
        }
    }
    fence_proxy_async();
    __syncthreads();
    griddepcontrol_wait();

    if (thread >= kForwardThreads) {
        const int64_t first_slot = batch * chunks;
        const T* const B = static_cast<const T*>(prepared.tiles) +
                           ((first_slot * p.ngroups + group) * 3 + from_end) * kSlices * Tiles::kB + slice * Tiles::kB;
        const WarpgroupDecays* const decays =
            static_cast<const WarpgroupDecays*>(prepared.chunk_decays) + first_slot * p.nheads + head;
        T* const to =
            static_cast<T*>(walk.chunks) + (((batch * heads + slot) * row_tiles + tile) * chunks * kSlices + slice) * Tiles::kH;
        const auto begin_tiles = [&](int i) {
            if (i < count) {
                constexpr int kTileBytes = Tiles::kB * static_cast<int>(sizeof(T));
                constexpr int kWeightBytes = kWarpgroupSteps * static_cast<int>(sizeof(float));
                constexpr int kCarryBytes = 16;
                const int stage = i % kStages;
                const int64_t chunk = chunk_at(i);
                const WarpgroupDecays& from = decays[chunk * p.nheads];
                uint64_t* const barrier = &barriers[stage];
                mbarrier_arrive_expect_tx(barrier, kTileBytes + kWeightBytes + kCarryBytes);
                cp_async_bulk_load(B_tiles + stage * Tiles::kB, B + chunk * p.ngroups * 3 * kSlices * Tiles::kB, kTileBytes,
                                   barrier);
                cp_async_bulk_load(weights[stage].weight, from_end ? from.entering : from.adding, kWeightBytes, barrier);
                cp_async_bulk_load(&weights[stage].carry, &from.carry, kCarryBytes, barrier);
            }
        };
        if (lane == 0) {
            for (int i = 0; i < kStages - 1; ++i) {
                begin_tiles(i);
            }
        }
        for (int i = 0; i < count; ++i) {
            if (lane == 0) {
                cp_async_bulk_wait_group_read();  // of the chunk before: its tile is the next one's
            }
            __syncthreads();
            if (lane == 0) {
                if (!launch.ends_only) {
                    cp_async_bulk_store(to + chunk_at(i) * kSlices * Tiles::kH, H_tiles + i % 2 * Tiles::kH,
                                        Tiles::kH * static_cast<int>(sizeof(T)));
                }
                begin_tiles(i + kStages - 1);
            }
        }
        if (lane == 0) {
            cp_async_bulk_wait_group_read();
        }
        return;
    }

    const T* const x =
        first_piece(static_cast<const T*>(walk.x) + batch * walk.x_batch_stride + head * walk.x_head_stride + row0,
                    walk.x_len_stride, thread);
    const auto begin_copies = [&](int i) {
        if (i < count) {
            const int stage = i % kStages;
            const int64_t chunk = chunk_at(i);
            load_swizzled<T, kForwardThreads>(x_tiles + stage * Tiles::kX, x + chunk * kWarpgroupSteps * walk.x_len_stride,
                                              walk.x_len_stride, steps_in<kWarpgroupSteps>(p.seqlen, chunk), rows,
                                              walk.x_vectors, thread);
        }
        cp_async_commit_group();
    };
    for (int i = 0; i < kStages - 1; ++i) {
        begin_copies(i);
    }

    const int64_t state_size = p.headdim * p.dstate;
    const int64_t state_index = (batch * p.nheads + head) * state_size + static_cast<int64_t>(row0) * dstate;
    const int64_t ends_row = p.batch * p.nheads * state_size;
    // A later segment starts from what the carry kernel has left in the place of the one before.
    const float* from = segment == 0 ? walk.first : nullptr;
    if (segment > 0 && !launch.ends_only) {
        from = walk.ends + (segment - 1) * ends_row;
    }
    float state[kStates / 8][4];
    if (from != nullptr) {
        load_state<kStates>(state, from + state_index, row, rows, slice * kStates, dstate, lane);
    } else {
#pragma unroll
        for (int j = 0; j < kStates / 8; ++j) {
            state[j][0] = state[j][1] = state[j][2] = state[j][3] = 0.0f;
        }
    }
    const int x_lane = XTile::at(lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8);  // of ldmatrix_x4_trans
    float product = 1.0f;
    for (int i = 0; i < count; ++i) {
        const int stage = i % kStages;
        T* const H_tile = H_tiles + i % 2 * Tiles::kH;
        if (!launch.ends_only) {
#pragma unroll
            for (int k = 0; k < kStates / 16; ++k) {
                Operand<T> H;
                a_from_accumulators<T>(H, state[2 * k], state[2 * k + 1]);
                stmatrix_x4(columns_on(H_tile + XTile::at(row + lane % 16, lane / 16 * 8), k), H.r[0]);
            }
        }
        cp_async_wait_group<kStages - 2>();
        fence_proxy_async();
        __syncthreads();  // this chunk's x and state are there, the tiles of the one before are free
        begin_copies(i + kStages - 1);
        mbarrier_wait_parity(&barriers[stage], i / kStages % 2);
        const StateWeights& now = weights[stage];
        product *= now.carry;
        Operand<T> weighted[kWarpgroupSteps / 16];
#pragma unroll
        for (int k = 0; k < kWarpgroupSteps / 16; ++k) {
            ldmatrix_x4_trans(weighted[k].r[0], x_tiles + stage * Tiles::kX + x_lane + 16 * k * kForwardRows);
            weight_a<T>(weighted[k], now.weight + 16 * k, lane);
        }
        scale_rows(state, now.carry, now.carry);
        warpgroup_fence_operand(state);
        warpgroup_fence_operand(weighted);
        wgmma_fence();
        const uint64_t B = tile_descriptor(B_tiles + stage * Tiles::kB, kBlock * 16);
#pragma unroll
        for (int k = 0; k < kWarpgroupSteps / 16; ++k) {
            wgmma<T, 1>(state, weighted[k].r[0], B + k * kRows16);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        warpgroup_fence_operand(state);
        warpgroup_fence_operand(weighted);
    }

    if (launch.ends_only) {
        store_state<kStates>(walk.ends + segment * ends_row + state_index, state, row, rows, slice * kStates, dstate, lane);
        if (thread == 0 && row0 == 0 && slice == 0) {
            walk.decays[(segment * p.batch + batch) * p.nheads + head] = product;
        }
    } else if (walk.last != nullptr && segment == launch.segments - 1) {
        store_state<kStates>(walk.last + state_index, state, row, rows, slice * kStates, dstate, lane);
    }
#else
    (void)p;
    (void)launch;
    (void)prepared;
    __trap();
#endif
}

}  // namespace mamba
