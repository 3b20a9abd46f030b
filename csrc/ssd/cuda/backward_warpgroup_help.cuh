// The fourth warpgroup of backward_warpgroup.cuh: all copies for the three others, and the sums that need none of their
// products.
#pragma once

#include "ssd/cuda/backward_warpgroup_walk.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Copies of a block's items, in order.
template <typename T, int kStates, int kSlices>
struct BackwardCopies {
    using Walk = BackwardWalk<T, kStates, kSlices>;
    using Shared = typename Walk::Shared;
    using Tiles = typename Walk::Tiles;

    const Walk& walk;
    int thread;  // of the warpgroup
    BackwardItem item;
    ItemPointer<const T*> x, dout;  // the thread's first piece
    const WarpgroupDecays* decays;
    const T *states, *dstates;

    __device__ __forceinline__ explicit BackwardCopies(const Walk& walk_)
        : walk(walk_),
          thread(walk.thread % 128),
          item(walk.first),
          x(walk.item_pointer(first_piece(static_cast<const T*>(walk.q.forward.x) + walk.batch * walk.q.forward.x_batch_stride +
                                              walk.chunk * kWarpgroupSteps * walk.q.forward.x_len_stride,
                                          walk.q.forward.x_len_stride, thread),
                              walk.q.forward.x_head_stride)),
          dout(walk.item_pointer(first_piece(static_cast<const T*>(walk.q.dout) + walk.batch * walk.q.dout_batch_stride +
                                                 walk.chunk * kWarpgroupSteps * walk.q.dout_len_stride,
                                             walk.q.dout_len_stride, thread),
                                 walk.q.dout_head_stride)) {
        const MambaSsd& p = walk.q.forward;
        const BackwardLaunch& launch = walk.launch;
        decays = static_cast<const WarpgroupDecays*>(launch.prepared.decays) +
                 (walk.batch * launch.chunks + walk.chunk) * p.nheads + walk.group_head + item.slot;
        const int64_t slot = (walk.batch * p.ngroups + walk.group) * launch.group_heads + item.slot;
        const int64_t state = ((slot * launch.row_tiles + item.tile) * launch.chunks + walk.chunk) * kSlices * Tiles::kH;
        states = static_cast<const T*>(launch.states) + state + walk.slice * Tiles::kH;
        dstates = static_cast<const T*>(launch.dstates) + state;
    }

    // Of the next item's x, dout and decays.
    __device__ __forceinline__ void begin(int number) {
        if (number < walk.count) {
            if (thread == 0) {
                constexpr int kDecayBytes = static_cast<int>(sizeof(WarpgroupDecays));
                uint64_t* const barrier = &walk.shared.decays_arrived[number % Shared::kDecays];
                mbarrier_arrive_expect_tx(barrier, kDecayBytes);
                cp_async_bulk_load(&walk.shared.decays_of(number), decays, kDecayBytes, barrier);
            }
            const int rows = walk.rows_of(item);
            load_swizzled<T, 128>(walk.shared.x(number), x.at, walk.q.forward.x_len_stride, walk.valid, rows,
                                  walk.launch.x_vectors, thread);
            load_swizzled<T, 128>(walk.shared.dout(number), dout.at, walk.q.dout_len_stride, walk.valid, rows,
                                  walk.launch.dout_vectors, thread);
            const bool next_head = item.advance(walk.row_tiles);
            x.advance(next_head);
            dout.advance(next_head);
            decays += next_head;
        }
        cp_async_commit_group();
    }

    // Of the next item's states, by one thread.
    __device__ __forceinline__ void begin_states(int number) {
        if (number < walk.count && thread == 0) {
            constexpr int kBytes = Tiles::kH * static_cast<int>(sizeof(T));
            uint64_t* const barrier = &walk.shared.states_arrived[number % Shared::kHStages];
            mbarrier_arrive_expect_tx(barrier, (1 + kSlices) * kBytes);
            cp_async_bulk_load(walk.shared.H(number), states, kBytes, barrier);
            cp_async_bulk_load(walk.shared.dH(number), dstates, kSlices * kBytes, barrier);
            states += walk.launch.chunks * kSlices * Tiles::kH;
            dstates += walk.launch.chunks * kSlices * Tiles::kH;
        }
    }
};

// Items' D and dD are taken in the interval of their pairs, H . dH' in that of their states, gradients of steps in the one
// after.
template <typename T, int kStates, int kSlices>
__device__ __forceinline__ void help_walks(const BackwardWalk<T, kStates, kSlices>& walk) {
    using Shared = BackwardSharedMemory<T, kStates, kSlices>;
    Shared& shared = walk.shared;
    const MambaSsd& p = walk.q.forward;
    BackwardCopies<T, kStates, kSlices> copies(walk);
    const int thread = copies.thread;
    const int warp = thread / 32;
    for (int i = 0; i < Shared::kAhead; ++i) {
        copies.begin(i);
    }
    for (int i = 0; i < Shared::kHStages - 1; ++i) {
        copies.begin_states(i);
    }
    BackwardItem item = walk.first;
    // A thread's row of D, a head ahead.
    const bool has_D = p.D != nullptr && thread < kForwardRows;
    const auto load_D = [&](const BackwardItem& of) {
        const int64_t row = of.tile * kForwardRows + thread;
        return has_D && row < p.headdim ? p.D[(walk.group_head + of.slot) * p.D_head_stride + row * p.D_dim_stride] : 0.0f;
    };
    float D = load_D(item);
    for (int number = -1; number < walk.count; ++number) {
        cp_async_wait_group<Shared::kAhead - 1>();
        fence_proxy_async();
        __syncthreads();  // an interval begins: tiles of the item before are free
        copies.begin(number + 1 + Shared::kAhead);
        if (number >= 0) {
            copies.begin_states(number - 1 + Shared::kHStages);
        }
        if (number + 1 < walk.count) {
            if (thread < kForwardRows) {
                shared.sums_of(number + 1).D[thread] = D;
            }
            item.advance(walk.row_tiles);
            if (number + 2 < walk.count) {
                D = load_D(item);
            }
        }
        if (number >= 0) {
            walk.wait_for_states(number);
            add_state_product<T, kStates>(shared.sums_of(number), shared.H(number),
                                          shared.dH(number) + walk.slice * SliceTiles<T, kStates, kSlices>::kH, warp,
                                          walk.lane);
        }
    }
    __syncthreads();
    __syncthreads();
}

#endif

}  // namespace mamba
