// forward_warpgroup.cuh for more than 128 states: a block has 64 rows of one head's state in two warpgroups, half of the states
// each, and one warpgroup each for what comes before and after their products.
//
// Who does what for chunk i, which the walkers multiply:
//
//     preparer                           | walkers (a slice of the states each)     | finisher
//     -----------------------------------+------------------------------------------+-------------------------------------
//     begins x of chunk i + 2 (cp.async) | state to operands, state *= carry        | both slices' y of chunk i - 1
//     M of chunk i + 1                   | y = H C; y *= entering                   | its results over its x
//                                        | begin y += x^T M, state += wx^T B        |
//     ============================ __syncthreads(): y's place in shared memory is free ==================================
//     weighted x (wx) of chunk i + 1     | y to shared memory                       | results of chunk i - 1 to memory
//                                        | ... state is there                       |
//     ============================ __syncthreads(): chunk i's tiles and decays are free =================================
//     one thread: bulk copies of B, C    |                                          |
//     and decays of chunk i + 2          |                                          |
//
// Of x^T M each slice takes half of the steps of x.
#pragma once

#include "ssd/cuda/forward_warpgroup.cuh"

namespace mamba {

// What of a chunk's ChunkDecays is used here: all but log2_rest, for which there is no room.
struct alignas(16) SliceDecays {
    float log2_decay[kWarpgroupSteps];
    float dt[kWarpgroupSteps], entering[kWarpgroupSteps], adding[kWarpgroupSteps];
    int run_start[kWarpgroupSteps];
    float carry, A;
};

template <typename T, int kStates>
struct SlicesSharedMemory {
    using Decays = SliceDecays;
    static constexpr int kSlices = 2;
    static constexpr int kSlice = kStates / kSlices;
    static constexpr int kThreads = (2 + kSlices) * kForwardThreads;
    static constexpr int kStages = 4;  // of x: from two chunks before its products to one chunk after them
    static constexpr int kX = kWarpgroupSteps * kForwardRows;
    static constexpr int kB = kWarpgroupSteps * kStates;
    static constexpr int kM = kWarpgroupSteps * kWarpgroupSteps;

    alignas(1024) T BC[2][2 * kB];  // a chunk's C behind its B
    alignas(1024) T M[2][kM];
    alignas(1024) T x[kStages][kX];
    alignas(1024) T weighted[2][kX];
    float4 y[kSlices][kX / 4];
    Decays decays[2];
    uint64_t tiles_arrived[2], decays_arrived[2];  // mbarriers
};

// The block's warpgroups; the walkers are the others. warpgroup_barrier_sync() is the first one's.
enum SliceWarpgroups { kFinisher = 0, kPreparer = 1, kFirstWalker = 2 };

// Of a thread: 65,536 registers for 512 threads.
constexpr int kSliceWalkerRegisters = 160;
constexpr int kSliceHelperRegisters = 96;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void begin_decays(SliceDecays& to, const ChunkDecays<kWarpgroupSteps>* from, uint64_t* barrier) {
    constexpr int kFirst = static_cast<int>(sizeof(to.log2_decay));
    constexpr int kRest = static_cast<int>(sizeof(to)) - kFirst;
    static_assert(kFirst + kRest + static_cast<int>(sizeof(from->log2_rest)) == static_cast<int>(sizeof(*from)), "all others");
    mbarrier_arrive_expect_tx(barrier, kFirst + kRest);
    cp_async_bulk_load(to.log2_decay, from->log2_decay, kFirst, barrier);
    cp_async_bulk_load(to.dt, from->dt, kRest, barrier);
}

// A walker's chunks. thread: of the warpgroup.
template <typename T, int kStates>
__device__ __forceinline__ void walk_slice(SlicesSharedMemory<T, kStates>& shared,
                                           float (&state)[SlicesSharedMemory<T, kStates>::kSlice / 8][4], int chunks, int slice,
                                           int thread) {
    using Shared = SlicesSharedMemory<T, kStates>;
    constexpr int kSlice = Shared::kSlice;
    constexpr int kOwn = kWarpgroupSteps / 16 / Shared::kSlices;  // steps of x^T M^T, in sixteens
    const int lane = thread % 32;
    for (int i = 0; i < chunks; ++i) {
        const auto& now = shared.decays[i % 2];
        const T* const B_tile = shared.BC[i % 2] + slice * (kSlice * kWarpgroupSteps);
        const uint64_t B = tile_descriptor(B_tile, kBlock * 16);
        const uint64_t C = tile_descriptor(B_tile + Shared::kB, kBlock * 16);
        float y[kStepGroups][4];  // rows of headdim, columns of steps in the order of their places
        Operand<T> H[kSlice / 16];
#pragma unroll
        for (int k = 0; k < kSlice / 16; ++k) {
            a_from_accumulators<T>(H[k], state[2 * k], state[2 * k + 1]);
        }
        scale_rows(state, now.carry, now.carry);
        set_to_zero(y);
        warpgroup_fence_operands(y, H, state);
        mbarrier_wait_parity(&shared.tiles_arrived[i % 2], i / 2 % 2);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSlice / 16; ++k) {  // H C_t
            wgmma<T, 0>(y, H[k].r[0], C + k / 4 * kBlock + k % 4 * kColumns16);
        }
        wgmma_commit_group();
        float2 entering[kStepGroups];
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
            entering[j] = *reinterpret_cast<const float2*>(&now.entering[8 * group_at_place(j) + lane % 4 * 2]);
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operands(y, H);
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {  // exp(cs_t) H C_t
            y[j][0] *= entering[j].x;
            y[j][1] *= entering[j].y;
            y[j][2] *= entering[j].x;
            y[j][3] *= entering[j].y;
        }
        const uint64_t x = tile_descriptor(shared.x[i % Shared::kStages] + slice * (kOwn * 16 * kForwardRows), kBlock * 16);
        const uint64_t weighted = tile_descriptor(shared.weighted[i % 2], kBlock * 16);
        const uint64_t M = tile_descriptor(shared.M[i % 2] + slice * kOwn * 16, kBlock * 16);
        warpgroup_fence_operands(y, state);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {  // x^T M^T
            wgmma_transposed<T, 0>(y, x + k * kRows16, M + k * kColumns16);
        }
        wgmma_commit_group();
        // H' = exp(cs_last) H + (exp(cs_last - cs) dt x)^T B
#pragma unroll
        for (int k = 0; k < kWarpgroupSteps / 16; ++k) {
            wgmma_transposed<T, 1>(state, weighted + k * kRows16, B + k * kRows16);
        }
        wgmma_commit_group();
        __syncthreads();  // the finisher has read y of the chunk before
        wgmma_wait_group<1>();
        warpgroup_fence_operands(y);
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {
            shared.y[slice][kForwardThreads * j + thread] = make_float4(y[j][0], y[j][1], y[j][2], y[j][3]);
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operands(state);
        __syncthreads();
    }
}

// Of the thread's own pieces of x, which have arrived.
template <typename T, class Shared>
__device__ __forceinline__ void weight_x(Shared& shared, const ForwardCopies<T, Shared>& copies, int i) {
    using Copies = ForwardCopies<T, Shared>;
    const auto& decays = shared.decays[i % 2];
    const T* const from = shared.x[i % Shared::kStages] + copies.x_at;
    T* const to = shared.weighted[i % 2] + copies.x_at;
#pragma unroll
    for (int j = 0; j < kWarpgroupSteps / Copies::kTogether; ++j) {
        const uint4 piece = *reinterpret_cast<const uint4*>(from + j * Copies::kPass);
        const float weight = decays.adding[copies.x_row + j * Copies::kTogether];
        const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
        uint32_t weighted[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 pair = unpack2<T>(pairs[k]);
            weighted[k] = pack2<T>(pair.x * weight, pair.y * weight);
        }
        *reinterpret_cast<uint4*>(to + j * Copies::kPass) = make_uint4(weighted[0], weighted[1], weighted[2], weighted[3]);
    }
}

// The preparer's chunks.
template <typename T, int kStates>
__device__ __forceinline__ void prepare_slices(SlicesSharedMemory<T, kStates>& shared, const MambaSsd& p,
                                               const ForwardLaunch& launch, const ForwardBlock<T, kWarpgroupSteps>& block,
                                               int thread) {
    using Shared = SlicesSharedMemory<T, kStates>;
    const int chunks = block.chunks();
    const int64_t slot = slot_of_sequence(p, kWarpgroupSteps, block.batch, block.begin) + block.first_chunk;
    ForwardCopies<T, Shared> copies(shared, p, launch, block, slot, thread);
    ForwardMixer<T, Shared> mixer(shared, p, launch, block, slot, thread / 32, thread % 32);
    const auto prepare = [&](int i) {
        mixer.warp = opaque(thread / 32);  // else what follows from it is kept, and spilled
        if (i < chunks) {
            mixer.mix(i);
        }
        if (i > 0) {
            __syncthreads();  // y's place
        }
        if (i < chunks) {
            cp_async_wait_group<1>();
            weight_x<T>(shared, copies, i);
        }
        fence_proxy_async();  // this also waits for loads
        mixer.begin_loads(i + 1);
        __syncthreads();
    };
    mixer.begin_loads(0);  // what is needed first is asked for first: tiles are as long on their way as all the rest
    copies.begin_x(0);
    copies.begin_tiles(0);
    copies.begin_x(1);
    prepare(0);
    copies.begin_tiles(1);
    for (int i = 0; i < chunks; ++i) {
        copies.begin_x(i + 2);
        prepare(i + 1);
        copies.begin_tiles(i + 2);
    }
}

// The finisher's.
template <typename T, int kStates>
__device__ __forceinline__ void finish_slices(SlicesSharedMemory<T, kStates>& shared, const MambaSsd& p,
                                              const ForwardLaunch& launch, const ForwardBlock<T, kWarpgroupSteps>& block,
                                              int thread) {
    using Shared = SlicesSharedMemory<T, kStates>;
    const int lane = thread % 32;
    const int row = thread / 32 * 16;
    const int chunks = block.chunks();
    const int x_lane = SwizzledTile<kWarpgroupSteps>::at(lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8);
    ForwardCopies<T, Shared> copies(shared, p, launch, block, 0, thread);
    float D[2];
    load_D(D, p, block.head, block.row0, block.rows, row + lane / 4);
    __syncthreads();                     // the first x and M
    for (int i = 0; i <= chunks; ++i) {  // results of chunk i - 1
        float y[kStepGroups][4];
        if (i > 0) {
#pragma unroll
            for (int j = 0; j < kStepGroups; ++j) {
                const float4 one = shared.y[0][kForwardThreads * j + thread];
                const float4 other = shared.y[1][kForwardThreads * j + thread];
                y[j][0] = one.x + other.x;
                y[j][1] = one.y + other.y;
                y[j][2] = one.z + other.z;
                y[j][3] = one.w + other.w;
            }
        }
        if (i > 0) {
            T* const x_tile = shared.x[(i - 1) % Shared::kStages] + x_lane;
            Operand<T> x[kStepGroups / 2];
#pragma unroll
            for (int k = 0; k < kStepGroups / 2; ++k) {
                ldmatrix_x4_trans(x[k].r[0], x_tile + 16 * k * kForwardRows);
            }
            if (block.z == nullptr) {
                store_results<T, false>(x_tile, y, x, D, nullptr, 0, 0, 0, lane);
            } else {
                const int64_t first = (block.first_chunk + i - 1) * kWarpgroupSteps;
                store_results<T, true>(x_tile, y, x, D, block.z + first * p.z_len_stride + row, p.z_len_stride,
                                       i == chunks ? copies.last_steps : kWarpgroupSteps, block.rows - row, opaque(lane));
            }
        }
        if (i < chunks) {
            __syncthreads();  // y's place
        } else {
            warpgroup_barrier_sync();
        }
        if (i > 0) {
            copies.store_results(i - 1);
        }
        if (i < chunks) {
            __syncthreads();
        }
    }
}

#endif

template <typename T, int kStates>
__global__ void __launch_bounds__(SlicesSharedMemory<T, kStates>::kThreads, 1)
    ssd_slices_kernel(const MambaSsd p, const ForwardLaunch launch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Shared = SlicesSharedMemory<T, kStates>;
    MAMBA_DYNAMIC_SHARED(1024, unsigned char, warpgroup_shared);
    Shared& shared = *reinterpret_cast<Shared*>(warpgroup_shared);

    // By a shuffle: then the compiler knows that all lanes have the same.
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kForwardThreads, 0);
    const int thread = static_cast<int>(threadIdx.x) % kForwardThreads;
    const ForwardBlock<T, kWarpgroupSteps> block(p, launch);

    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(&shared.tiles_arrived[i]);
            mbarrier_init(&shared.decays_arrived[i]);
        }
    }
    for (int i = threadIdx.x; i < 2 * Shared::kM / 8; i += Shared::kThreads) {  // above the diagonal it stays so
        reinterpret_cast<uint4*>(shared.M[0])[i] = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    __syncthreads();
    griddepcontrol_wait();

    if (warpgroup == kFinisher) {
        setmaxnreg_dec<kSliceHelperRegisters>();
        finish_slices<T, kStates>(shared, p, launch, block, thread);
    } else if (warpgroup == kPreparer) {
        setmaxnreg_dec<kSliceHelperRegisters>();
        prepare_slices<T, kStates>(shared, p, launch, block, thread);
    } else {
        setmaxnreg_inc<kSliceWalkerRegisters>();
        constexpr int kSlice = Shared::kSlice;
        const int slice = warpgroup - kFirstWalker;
        const int lane = thread % 32;
        const int row = thread / 32 * 16;
        const int dstate = static_cast<int>(p.dstate);
        float state[kSlice / 8][4];
        if (block.segment > 0) {
            const int64_t tile = static_cast<int64_t>(block.row0) * kStates + slice * (kForwardRows * kSlice);
            load_accumulators<kSlice>(state, block.end_before(p, launch, ends_a_segment(Shared::kSlices)) + tile, thread);
        } else {
            start_state<kSlice>(state, block.first(p), row, block.rows, slice * kSlice, dstate, lane);
        }
        __syncthreads();  // the first x, M and decays are there
        walk_slice<T, kStates>(shared, state, block.chunks(), slice, thread);
        if (p.final_state != nullptr && block.segment == launch.segments - 1) {
            store_state<kSlice>(p.final_state + block.state_index, state, row, block.rows, slice * kSlice, dstate, lane);
        }
    }
#else
    (void)p;
    (void)launch;
    __trap();
#endif
}

}  // namespace mamba
