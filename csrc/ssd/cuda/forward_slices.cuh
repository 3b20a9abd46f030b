// forward_warpgroup.cuh for more than 128 states: a block has 64 rows of one head's state in one warpgroup, whose products take
// it in two slices, and two other warpgroups do what needs no products. y never leaves the registers of the first: between
// warpgroups it would go through shared memory, which bounds this kernel, as float32.
//
// Who does what between two of the block's barriers, while chunk i is multiplied (tensor cores on the right):
//
//     walker                                                   | mixer              | copier
//     -------------------------------+-------------------------+--------------------+-------------------------------
//     slice 0 to operands, *= carry  | y = H C of slice 0      | M of chunk i + 1   | weighted x (wx) of chunk i + 1
//                                    | slice 0 += wx^T B       |                    | results of chunk i - 1 to memory
//     slice 1 to operands, *= carry  | y += H C of slice 1     |                    | begins x of chunk i + 3 (cp.async)
//                                    | slice 1 += wx^T B, half |                    |
//     y *= entering; x to operands   | y += x^T M              |                    |
//     results over x                 | slice 1 += wx^T B, rest |                    |
//     ================================== __syncthreads(): chunk i's tiles and decays are free =====================
//                                                                                   | one thread: bulk copies of B and
//                                                                                   | C of chunk i + 2, decays of i + 3
#pragma once

#include "ssd/cuda/forward_warpgroup.cuh"

namespace mamba {

template <typename T, int kStates>
struct SlicesSharedMemory {
    using Decays = ChunkDecays<kWarpgroupSteps>;
    static constexpr int kSlices = 2;  // of the states
    static constexpr int kSlice = kStates / kSlices;
    static constexpr int kThreads = 3 * kForwardThreads;
    static constexpr int kStages = 4;  // of x: from three chunks before its products to one chunk after them
    static constexpr int kDecayStages = 3;
    static constexpr int kX = kWarpgroupSteps * kForwardRows;
    static constexpr int kB = kWarpgroupSteps * kStates;
    static constexpr int kM = kWarpgroupSteps * kWarpgroupSteps;

    alignas(1024) T BC[2][2 * kB];  // a chunk's C behind its B
    alignas(1024) T M[2][kM];
    alignas(1024) T x[kStages][kX];
    alignas(1024) T weighted[2][kX];
    Decays decays[kDecayStages];
    uint64_t tiles_arrived[2], decays_arrived[kDecayStages];  // mbarriers
};

// The block's warpgroups.
enum SliceWarpgroups { kWalker = 0, kMixer = 1, kCopier = 2 };

// Of a thread: 65,536 registers for 384 threads.
constexpr int kSliceWalkerRegisters = 240;
constexpr int kSliceHelperRegisters = 128;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename T, int kStates>
struct SliceWalk {
    using Shared = SlicesSharedMemory<T, kStates>;
    static constexpr int kSlices = Shared::kSlices;
    static constexpr int kSlice = Shared::kSlice;
    static constexpr int kTiles = kWarpgroupSteps / 16;

    float state[kSlices][kSlice / 8][4];
    float y[kStepGroups][4];  // rows of headdim, columns of steps in the order of their places
    Operand<T> x[kTiles];     // of all steps

    // Begins state += (exp(cs_last - cs) dt x)^T B for the steps in sixteens from `from` on.
    __device__ __forceinline__ void begin_update(int slice, uint64_t weighted, uint64_t B, int from, int to) {
#pragma unroll
        for (int k = from; k < to; ++k) {
            wgmma_transposed<T, 1>(state[slice], weighted + k * kRows16, B + slice * (kSlice / 64 * kBlock) + k * kRows16);
        }
        wgmma_commit_group();
    }
    // y and the state after chunk i. x_tile: the lane's row of ldmatrix_x4_trans.
    __device__ __forceinline__ void multiply(Shared& shared, const T* x_tile, int i, int lane) {
        const auto& now = shared.decays[i % Shared::kDecayStages];
        const uint64_t B = tile_descriptor(shared.BC[i % 2], kBlock * 16);
        const uint64_t C = tile_descriptor(shared.BC[i % 2] + Shared::kB, kBlock * 16);
        const uint64_t weighted = tile_descriptor(shared.weighted[i % 2], kBlock * 16);
        const uint64_t M = tile_descriptor(shared.M[i % 2], kBlock * 16);
        float2 entering[kStepGroups];
        set_to_zero(y);
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
            Operand<T> H[kSlice / 16];
#pragma unroll
            for (int k = 0; k < kSlice / 16; ++k) {
                a_from_accumulators<T>(H[k], state[slice][2 * k], state[slice][2 * k + 1]);
            }
            scale_rows(state[slice], now.carry, now.carry);
            warpgroup_fence_operands(y, H, state[slice]);
            if (slice == 0) {
                mbarrier_wait_parity(&shared.tiles_arrived[i % 2], i / 2 % 2);
            }
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kSlice / 16; ++k) {  // H C_t
                wgmma<T, 0>(y, H[k].r[0], C + (slice * kSlice / 64 + k / 4) * kBlock + k % 4 * kColumns16);
            }
            wgmma_commit_group();
            begin_update(slice, weighted, B, 0, slice == 0 ? kTiles : kTiles / 2);
            if (slice == kSlices - 1) {
#pragma unroll
                for (int j = 0; j < kStepGroups; ++j) {
                    entering[j] = *reinterpret_cast<const float2*>(&now.entering[8 * group_at_place(j) + lane % 4 * 2]);
                }
            }
            wgmma_wait_group<1>();  // H may change
            warpgroup_fence_operands(y, H);
        }
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
            ldmatrix_x4_trans(x[k].r[0], x_tile + 16 * k * kForwardRows);
        }
#pragma unroll
        for (int j = 0; j < kStepGroups; ++j) {  // exp(cs_t) H C_t
            y[j][0] *= entering[j].x;
            y[j][1] *= entering[j].y;
            y[j][2] *= entering[j].x;
            y[j][3] *= entering[j].y;
        }
        warpgroup_fence_operands(y, x);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {  // x^T M^T
            wgmma<T, 0>(y, x[k].r[0], M + k * kColumns16);
        }
        wgmma_commit_group();
        begin_update(kSlices - 1, weighted, B, kTiles / 2, kTiles);
        wgmma_wait_group<1>();
        warpgroup_fence_operands(y, x);
    }
    __device__ __forceinline__ void wait() {
        wgmma_wait_group<0>();
        warpgroup_fence_operands(state[0], state[1]);
    }
};

template <typename T, int kStates>
__device__ __forceinline__ void walk_slices(SlicesSharedMemory<T, kStates>& shared, const MambaSsd& p,
                                            const ForwardLaunch& launch, const ForwardBlock<T, kWarpgroupSteps>& block,
                                            int thread) {
    using Shared = SlicesSharedMemory<T, kStates>;
    using Walk = SliceWalk<T, kStates>;
    const int lane = thread % 32;
    const int row = thread / 32 * 16;
    const int dstate = static_cast<int>(p.dstate);
    const int chunks = block.chunks();
    Walk walk;
#pragma unroll
    for (int slice = 0; slice < Walk::kSlices; ++slice) {
        if (block.segment > 0) {
            const int64_t tile = static_cast<int64_t>(block.row0) * kStates + slice * (kForwardRows * Walk::kSlice);
            load_accumulators<Walk::kSlice>(walk.state[slice],
                                            block.end_before(p, launch, ends_a_segment(Walk::kSlices)) + tile, thread);
        } else {
            start_state<Walk::kSlice>(walk.state[slice], block.first(p), row, block.rows, slice * Walk::kSlice, dstate, lane);
        }
    }
    float D[2];
    load_D(D, p, block.head, block.row0, block.rows, row + lane / 4);
    const int last_steps = chunks > 0 ? steps_in<kWarpgroupSteps>(block.seqlen, block.last_chunk - 1) : 0;
    const int x_lane = SwizzledTile<kWarpgroupSteps>::at(lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8);
    __syncthreads();  // the first M and weighted x
    for (int i = 0; i < chunks; ++i) {
        T* const x_tile = shared.x[i % Shared::kStages] + x_lane;
        walk.multiply(shared, x_tile, i, lane);
        if (block.z == nullptr) {
            store_results<T, false>(x_tile, walk.y, walk.x, D, nullptr, 0, 0, 0, lane);
        } else {
            const int64_t first = (block.first_chunk + i) * kWarpgroupSteps;
            store_results<T, true>(x_tile, walk.y, walk.x, D, block.z + first * p.z_len_stride + row, p.z_len_stride,
                                   i == chunks - 1 ? last_steps : kWarpgroupSteps, block.rows - row, opaque(lane));
        }
        walk.wait();
        __syncthreads();
    }
    if (p.final_state != nullptr && block.segment == launch.segments - 1) {
#pragma unroll
        for (int slice = 0; slice < Walk::kSlices; ++slice) {
            store_state<Walk::kSlice>(p.final_state + block.state_index, walk.state[slice], row, block.rows,
                                      slice * Walk::kSlice, dstate, lane);
        }
    }
}

template <typename T, class Shared>
__device__ __forceinline__ void mix_slices(ForwardMixer<T, Shared> mixer) {
    mixer.begin_loads(0);
    for (int i = 0; i <= mixer.chunks; ++i) {  // M of chunk i, while the one before is multiplied
        if (i < mixer.chunks) {
            mixer.mix(i);
        }
        fence_proxy_async();  // this also waits for loads
        mixer.begin_loads(i + 1);
        __syncthreads();
    }
}

template <typename T, class Shared>
__device__ __forceinline__ void copy_slices(Shared& shared, ForwardCopies<T, Shared> copies) {
    const int chunks = copies.chunks;
    const auto weight_x = [&](int i) {  // the thread's own pieces of chunk i, which is the last but one that was begun
        if (i < chunks) {
            cp_async_wait_group<1>();
            mbarrier_wait_parity(&shared.decays_arrived[i % Shared::kDecayStages], i / Shared::kDecayStages % 2);
            weight_swizzled<T, kForwardThreads>(shared.weighted[i % 2], shared.x[i % Shared::kStages],
                                                shared.decays[i % Shared::kDecayStages].adding, copies.thread);
        }
        fence_proxy_async();  // before what it would wait for
    };
    copies.begin_decays(0);  // what is needed first is asked for first: tiles are as long on their way as all the rest
    copies.begin_x(0);
    copies.begin_tiles(0);
    copies.begin_decays(1);
    copies.begin_x(1);
    copies.begin_tiles(1);
    copies.begin_decays(2);
    weight_x(0);
    copies.begin_x(2);
    __syncthreads();
    for (int i = 0; i < chunks; ++i) {
        weight_x(i + 1);
        if (i > 0) {
            copies.store_results(i - 1);
        }
        copies.begin_x(i + 3);  // over the results, of which this thread has stored the same pieces
        __syncthreads();
        copies.begin_tiles(i + 2);
        copies.begin_decays(i + 3);
    }
    if (chunks > 0) {
        copies.store_results(chunks - 1);
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
        for (uint64_t& barrier : shared.tiles_arrived) {
            mbarrier_init(&barrier);
        }
        for (uint64_t& barrier : shared.decays_arrived) {
            mbarrier_init(&barrier);
        }
    }
    for (int i = threadIdx.x; i < 2 * Shared::kM / 8; i += Shared::kThreads) {  // above the diagonal it stays so
        reinterpret_cast<uint4*>(shared.M[0])[i] = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    __syncthreads();
    griddepcontrol_wait();

    const int64_t slot = slot_of_sequence(p, kWarpgroupSteps, block.batch, block.begin) + block.first_chunk;
    if (warpgroup == kWalker) {
        setmaxnreg_inc<kSliceWalkerRegisters>();
        walk_slices<T, kStates>(shared, p, launch, block, thread);
    } else {
        setmaxnreg_dec<kSliceHelperRegisters>();
        if (warpgroup == kMixer) {
            mix_slices(ForwardMixer<T, Shared>(shared, p, launch, block, slot, thread / 32, thread % 32));
        } else {
            copy_slices(shared, ForwardCopies<T, Shared>(shared, p, launch, block, slot, thread));
        }
    }
#else
    (void)p;
    (void)launch;
    __trap();
#endif
}

}  // namespace mamba
