// A block of backward_warpgroup.cuh: its chunk, its walk along heads, and what goes to and from memory on the way.
#pragma once

#include "ssd/cuda/backward_warpgroup_tile.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// An item of a launch's heads of a group.
struct BackwardItem {
    int slot;  // head
    int tile;  // of headdim
    // Whether the next one is another head's.
    __device__ __forceinline__ bool advance(int row_tiles) {
        const bool is_last = ++tile == row_tiles;
        slot += is_last;
        tile = is_last ? 0 : tile;
        return is_last;
    }
};

// A pointer into a tensor like x, at an item's rows of headdim. It is moved along: to compute it for each item takes long.
template <typename Pointer>
struct ItemPointer {
    Pointer at;
    int64_t to_next_head;  // from a head's last item
    __device__ __forceinline__ ItemPointer(Pointer tensor, int64_t head_stride, int row_tiles, int64_t head, int tile)
        : at(tensor + head * head_stride + tile * kForwardRows), to_next_head(head_stride - (row_tiles - 1) * kForwardRows) {}
    __device__ __forceinline__ void advance(bool next_head) { at += next_head ? to_next_head : kForwardRows; }
};

// A block's chunk, and the items that it walks.
template <typename T, int kStates, int kSlices>
struct BackwardWalk {
    using Shared = BackwardSharedMemory<T, kStates, kSlices>;
    using Tiles = typename Shared::Tiles;
    static constexpr int kSteps = kWarpgroupSteps;

    const MambaSsdBackward& q;
    const BackwardLaunch& launch;
    Shared& shared;
    int thread, lane, slice;
    int64_t split, batch, chunk, group;
    int64_t group_head;  // the first head of the launch's in this group
    int valid;           // steps
    int row_tiles;
    BackwardItem first;
    int count;

    // Starts the block: B and C are on their way.
    __device__ __forceinline__ BackwardWalk(const MambaSsdBackward& q_, const BackwardLaunch& launch_, unsigned char* memory)
        : q(q_), launch(launch_), shared(*reinterpret_cast<Shared*>(memory)) {
        const MambaSsd& p = q.forward;
        // By a shuffle: else the compiler reads the slow special register again for each use.
        thread = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.x) % 32);
        lane = thread % 32;
        int64_t block = blockIdx.x;
        slice = static_cast<int>(block % kSlices);
        block /= kSlices;
        split = block % launch.splits;
        block /= launch.splits;
        group = block % p.ngroups;
        block /= p.ngroups;
        chunk = block % launch.chunks;
        batch = block / launch.chunks;
        group_head = group * (p.nheads / p.ngroups) + launch.first_head;
        valid = steps_in<kSteps>(p.seqlen, chunk);
        row_tiles = static_cast<int>(launch.row_tiles);
        const int64_t items = launch.group_heads * launch.row_tiles;
        const int first_item = static_cast<int>(items * split / launch.splits);
        count = static_cast<int>(items * (split + 1) / launch.splits) - first_item;
        first = {first_item / row_tiles, first_item % row_tiles};
        if (thread == 0) {
            mbarrier_init(&shared.BC_arrived);
            for (uint64_t& barrier : shared.states_arrived) {
                mbarrier_init(&barrier);
            }
            for (uint64_t& barrier : shared.decays_arrived) {
                mbarrier_init(&barrier);
            }
        }
        fence_proxy_async();
        __syncthreads();
        griddepcontrol_wait();
        if (thread == 0) {
            constexpr int kBytes = Tiles::kB * static_cast<int>(sizeof(T));
            const T* const C = static_cast<const T*>(launch.prepared.tiles) +
                               (((batch * launch.chunks + chunk) * p.ngroups + group) * 3 + 1) * kSlices * Tiles::kB;
            mbarrier_arrive_expect_tx(&shared.BC_arrived, 2 * kSlices * kBytes);
            cp_async_bulk_load(shared.C, C + slice * Tiles::kB, kBytes, &shared.BC_arrived);
            cp_async_bulk_load(shared.B, C + kSlices * Tiles::kB, kSlices * kBytes, &shared.BC_arrived);
            if (kSlices > 1) {
                cp_async_bulk_load(shared.M_tiles, C + (1 - slice) * Tiles::kB, kBytes, &shared.BC_arrived);
            }
        }
    }

    // The first item's place in a tensor like x, of which `tensor` is this block's first step.
    template <typename Pointer>
    __device__ __forceinline__ ItemPointer<Pointer> item_pointer(Pointer tensor, int64_t head_stride) const {
        return ItemPointer<Pointer>(tensor, head_stride, row_tiles, group_head + first.slot, first.tile);
    }
    // Rows of headdim from an item's first one on; may be more than kForwardRows.
    __device__ __forceinline__ int rows_of(const BackwardItem& item) const {
        return static_cast<int>(q.forward.headdim) - item.tile * kForwardRows;
    }

    __device__ __forceinline__ void wait_for_states(int number) const {
        mbarrier_wait_parity(&shared.states_arrived[number % Shared::kHStages], number / Shared::kHStages % 2);
    }
    __device__ __forceinline__ void wait_for_decays(int number) const {
        mbarrier_wait_parity(&shared.decays_arrived[number % Shared::kDecays], number / Shared::kDecays % 2);
    }

    // Of an item's steps and of its parameters, by one warp.
    __device__ __forceinline__ void store_gradients(int number, const BackwardItem& item) const {
        const MambaSsd& p = q.forward;
        const int64_t head = group_head + item.slot;
        const int64_t part = (item.tile * kSlices + slice) * p.batch + batch;
        const int64_t at = (part * launch.chunks + chunk) * p.nheads + head;
        float* const ddt = launch.ddt + (part * p.nheads + head) * p.seqlen + chunk * kSteps;
        store_step_gradients<kSteps>(ddt, launch.dA + at, launch.ddt_bias + at, shared.sums_of(number),
                                     shared.decays_of(number), shared.decays_of(number).A, valid, lane);
    }

    // du + D dout of the block's columns, where du's rows are two groups of steps of the warp, which has read its x. dx: at the
    // item's first step, rows: of headdim from there on.
    __device__ __forceinline__ void store_dx(int number, T* dx, int rows, const float (&du)[Tiles::kColumns / 8][4],
                                             const int (&group_of)[2], int s_of_lane) const {
        const int column0 = slice * Tiles::kColumns;
        const float* const D = shared.sums_of(number).D;
        T* const tile = shared.x(number);
        const int at = BlockTile::at(s_of_lane, column0 + lane / 16 * 8);
#pragma unroll
        for (int k = 0; k < Tiles::kColumns / 16; ++k) {
            Operand<T> dout;
            Operand<T> results;
            ldmatrix_x4(dout.r[0], columns_on(shared.dout(number) + at, k));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = column0 + 16 * k + i / 2 * 8 + lane % 4 * 2;
                const float2 skip = *reinterpret_cast<const float2*>(&D[column]);
                const float2 value = unpack2<T>(dout.r[0][i]);
                const float(&sum)[4] = du[2 * k + i / 2];
                set_pair<T>(results, i, fmaf(skip.x, value.x, sum[i % 2 * 2]), fmaf(skip.y, value.y, sum[i % 2 * 2 + 1]));
            }
            stmatrix_x4(columns_on(tile + at, k), results.r[0]);
        }
        __syncwarp();
        // The warp's rows leave whole.
        constexpr int kPieces = Tiles::kColumns / 8;  // of a row, a lane each
        constexpr int kTogether = 32 / kPieces;
        const int64_t stride = q.dx_len_stride;
        const int column = column0 + lane % kPieces * 8;
        if (launch.dx_vectors && valid == kSteps && rows >= kForwardRows) {  // most tiles
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int s = opaque(8 * group_of[half] + lane / kPieces);
                T* to = dx + s * stride + column;
#pragma unroll
                for (int i = 0; i < 8; i += kTogether) {
                    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile + BlockTile::at(s + i, column));
                    to += kTogether * stride;
                }
            }
            return;
        }
#pragma unroll 1
        for (int i = 0; i < 16; i += kTogether) {
            const int s = 8 * (i < 8 ? group_of[0] : group_of[1]) + i % 8 + lane / kPieces;
            const T* const from = tile + BlockTile::at(s, column);
            T* const to = dx + s * stride + column;
#pragma unroll 1
            for (int j = 0; j < 8 && column + j < rows && s < valid; ++j) {
                to[j] = from[j];
            }
        }
    }

    // A chunk's dB or dC, of whose steps each lane has two rows, to the block's part of the workspace.
    __device__ __forceinline__ void store_matrix(float* matrix, const float (&sum)[kStates / 8][4],
                                                 const int (&step)[2]) const {
        const MambaSsd& p = q.forward;
        const int column0 = slice * kStates + lane % 4 * 2;
        const int dstate = static_cast<int>(p.dstate);
        const bool add = launch.first_head > 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (step[half] >= valid) {
                continue;
            }
            float* const row =
                matrix + (((split * p.batch + batch) * p.seqlen + chunk * kSteps + step[half]) * p.ngroups + group) * dstate;
            float2 before[kStates / 8];  // all of them are on their way before the first is needed
#pragma unroll
            for (int j = 0; j < kStates / 8; ++j) {
                const int column = column0 + 8 * j;
                before[j].x = add && column < dstate ? row[column] : 0.0f;
                before[j].y = add && column + 1 < dstate ? row[column + 1] : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < kStates / 8; ++j) {
                const int column = column0 + 8 * j;
                if (column < dstate) {
                    row[column] = sum[j][2 * half] + before[j].x;
                }
                if (column + 1 < dstate) {
                    row[column + 1] = sum[j][2 * half + 1] + before[j].y;
                }
            }
        }
    }
};

#endif

}  // namespace mamba
