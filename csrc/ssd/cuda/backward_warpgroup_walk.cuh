// A block of backward_warpgroup.cuh: its chunk, its walk along heads, and what goes to and from memory on the way.
#pragma once

#include "ssd/cuda/backward_warpgroup_tile.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// An item of a launch's heads of a group.
struct BackwardItem {
    int slot;  // head
    int tile;  // of headdim
    __device__ __forceinline__ void advance(int row_tiles) {
        if (++tile == row_tiles) {
            tile = 0;
            ++slot;
        }
    }
};

// A block's chunk, and the items that it walks.
template <typename T, int kStates, int kSlices>
struct BackwardWalk {
    using Shared = WarpgroupBackwardShared<T, kStates, kSlices>;
    using Tiles = typename Shared::Tiles;
    static constexpr int kSteps = kWarpgroupSteps;

    const MambaSsdBackward& q;
    const BackwardLaunch& launch;
    const Shared shared;
    int thread, lane, slice;
    int64_t split, batch, chunk, group;
    int64_t group_head;  // the first head of the launch's in this group
    int valid;           // steps
    int row_tiles;
    BackwardItem first;
    int count;

    // Starts the block: B, C and the first item's tiles are on their way, B and C are there at the end.
    __device__ __forceinline__ BackwardWalk(const MambaSsdBackward& q_, const BackwardLaunch& launch_, unsigned char* memory)
        : q(q_), launch(launch_), shared(memory) {
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
            for (int i = 0; i < Shared::kBarriers; ++i) {
                make_barrier(shared.start_barrier + i);
            }
        }
        show_to_warpgroup();
        __syncthreads();
        wait_for_previous_kernel();
        if (thread == 0) {
            constexpr int kBytes = Tiles::kB * static_cast<int>(sizeof(T));
            const T* const C = static_cast<const T*>(launch.tiles) +
                               (((batch * launch.chunks + chunk) * p.ngroups + group) * 3 + 1) * kSlices * Tiles::kB;
            expect_copies(shared.start_barrier, 2 * kSlices * kBytes);
            copy_bulk(shared.C, C + slice * Tiles::kB, kBytes, shared.start_barrier);
            copy_bulk(shared.B, C + kSlices * Tiles::kB, kSlices * kBytes, shared.start_barrier);
            if (kSlices > 1) {
                copy_bulk(shared.M_tiles, C + (1 - slice) * Tiles::kB, kBytes, shared.start_barrier);
            }
        }
    }

    // Copies of an item's x, dout and decays, by the first warpgroup.
    __device__ __forceinline__ void begin_copies(int number, const BackwardItem& item) const {
        const MambaSsd& p = q.forward;
        if (number < count) {
            const int64_t head = group_head + item.slot;
            const int64_t step = chunk * kSteps;
            const int row0 = item.tile * kForwardRows;
            const int rows = static_cast<int>(p.headdim) - row0;
            if (thread == 0) {
                constexpr int kDecayBytes = static_cast<int>(sizeof(WarpgroupDecays));
                uint64_t* const barrier = &shared.decay_barriers[number % Shared::kDecays];
                expect_copies(barrier, kDecayBytes);
                copy_bulk(&shared.decays_of(number),
                          static_cast<const WarpgroupDecays*>(launch.chunk_decays) +
                              (batch * launch.chunks + chunk) * p.nheads + head,
                          kDecayBytes, barrier);
            }
            const T* const x =
                static_cast<const T*>(p.x) + batch * p.x_batch_stride + step * p.x_len_stride + head * p.x_head_stride + row0;
            const T* const dout = static_cast<const T*>(q.dout) + batch * q.dout_batch_stride + step * q.dout_len_stride +
                                  head * q.dout_head_stride + row0;
            load_swizzled<T, 128>(shared.x(number), x, p.x_len_stride, valid, rows, launch.x_vectors, thread);
            load_swizzled<T, 128>(shared.dout(number), dout, q.dout_len_stride, valid, rows, launch.dout_vectors, thread);
        }
        end_copies();
    }
    // And of its states, by one thread.
    __device__ __forceinline__ void begin_state_copies(int number, const BackwardItem& item) const {
        if (number < count && thread == 0) {
            constexpr int kBytes = Tiles::kH * static_cast<int>(sizeof(T));
            uint64_t* const barrier = &shared.H_barriers[number % Shared::kHStages];
            const int64_t slot = (batch * q.forward.ngroups + group) * launch.group_heads + item.slot;
            const int64_t state = ((slot * launch.row_tiles + item.tile) * launch.chunks + chunk) * kSlices * Tiles::kH;
            expect_copies(barrier, (1 + kSlices) * kBytes);
            copy_bulk(shared.H(number), static_cast<const T*>(launch.states) + state + slice * Tiles::kH, kBytes, barrier);
            copy_bulk(shared.dH(number), static_cast<const T*>(launch.dstates) + state, kSlices * kBytes, barrier);
        }
    }

    __device__ __forceinline__ void wait_for_states(int number) const {
        wait_for_round(&shared.H_barriers[number % Shared::kHStages], number / Shared::kHStages % 2);
    }
    __device__ __forceinline__ void wait_for_decays(int number) const {
        wait_for_round(&shared.decay_barriers[number % Shared::kDecays], number / Shared::kDecays % 2);
    }

    // sum_t dout_t x_t: the diagonal of dout^T x, 16 rows of headdim a warp.
    __device__ __forceinline__ void store_dD(int number, const BackwardItem& item, int warp) const {
        if (launch.dD == nullptr || slice > 0) {
            return;
        }
        float left[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float right[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const int row = 16 * warp;
        const T* const dout = shared.dout(number) + BlockTile::at(lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8);
        const T* const x = shared.x(number) + BlockTile::at(lane % 16, row + lane / 16 * 8);
#pragma unroll
        for (int k = 0; k < kSteps / 16; ++k) {
            Operand<T> a;
            Operand<T> b;
            load_matrices_transposed(a.r[0], dout + 16 * k * kForwardRows);
            load_matrices_transposed(b.r[0], x + 16 * k * kForwardRows);
            multiply_add<T>(left, a, b, 0);
            multiply_add<T>(right, a, b, 1);
        }
        const int headdim = static_cast<int>(q.forward.headdim);
        const int p = item.tile * kForwardRows + row + lane / 4;
        float* const dD =
            launch.dD + ((batch * launch.chunks + chunk) * q.forward.nheads + group_head + item.slot) * headdim + p;
        const float2 both = diagonal(left, right, lane);
        if (lane / 4 / 2 == lane % 4) {
            if (p < headdim) {
                dD[0] = both.x;
            }
            if (p + 8 < headdim) {
                dD[8] = both.y;
            }
        }
    }

    // D of an item's row `row` of headdim.
    __device__ __forceinline__ float load_D(const BackwardItem& item, int row) const {
        const MambaSsd& p = q.forward;
        const int64_t at = item.tile * kForwardRows + row;
        return p.D != nullptr && at < p.headdim ? p.D[(group_head + item.slot) * p.D_head_stride + at * p.D_dim_stride] : 0.0f;
    }

    // Of an item's steps and of its parameters, by one warp.
    __device__ __forceinline__ void store_gradients(int number, const BackwardItem& item) const {
        const MambaSsd& p = q.forward;
        const int64_t head = group_head + item.slot;
        const int64_t part = (item.tile * kSlices + slice) * p.batch + batch;
        const int64_t at = (part * launch.chunks + chunk) * p.nheads + head;
        float* const ddt = launch.ddt + (part * p.nheads + head) * p.seqlen + chunk * kSteps;
        store_step_gradients<kSteps>(ddt, launch.dA + at, launch.ddt_bias + at, shared.sums_of(number),
                                     shared.decays_of(number), head_A(p, head), valid, lane);
    }

    // du + D dout of the block's columns, where du's rows are two groups of steps of the warp, which has read its x.
    __device__ __forceinline__ void store_dx(int number, const BackwardItem& item, const float (&du)[Tiles::kColumns / 8][4],
                                             const int (&group_of)[2], int s_of_lane) const {
        const MambaSsd& p = q.forward;
        const int column0 = slice * Tiles::kColumns;
        const int row0 = item.tile * kForwardRows;
        const int rows = static_cast<int>(p.headdim) - row0;
        const int64_t head = group_head + item.slot;
        const float* const D = shared.sums_of(number).D;
        T* const tile = shared.x(number);
        const int at = BlockTile::at(s_of_lane, column0 + lane / 16 * 8);
#pragma unroll
        for (int k = 0; k < Tiles::kColumns / 16; ++k) {
            Operand<T> dout;
            Operand<T> results;
            load_matrices(dout.r[0], columns_on(shared.dout(number) + at, k));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = column0 + 16 * k + i / 2 * 8 + lane % 4 * 2;
                const float2 skip = *reinterpret_cast<const float2*>(&D[column]);
                const float2 value = unpack2<T>(dout.r[0][i]);
                const float(&sum)[4] = du[2 * k + i / 2];
                set_pair<T>(results, i, fmaf(skip.x, value.x, sum[i % 2 * 2]), fmaf(skip.y, value.y, sum[i % 2 * 2 + 1]));
            }
            store_matrices(columns_on(tile + at, k), results.r[0]);
        }
        __syncwarp();
        // The warp's rows leave whole.
        constexpr int kPieces = Tiles::kColumns / 8;  // of a row, a lane each
        constexpr int kTogether = 32 / kPieces;
        T* const dx = static_cast<T*>(q.dx) + batch * q.dx_batch_stride + chunk * kSteps * q.dx_len_stride +
                      head * q.dx_head_stride + row0;
        const int column = column0 + lane % kPieces * 8;
        const int existing = column < rows ? valid : 0;
#pragma unroll
        for (int i = 0; i < 16; i += kTogether) {
            const int s = 8 * group_of[i / 8] + i % 8 + lane / kPieces;
            const T* const from = tile + BlockTile::at(s, column);
            T* const to = dx + s * q.dx_len_stride + column;
            if (s < existing && launch.dx_vectors) {
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
            } else if (s < existing) {
#pragma unroll 1
                for (int j = 0; j < 8 && column + j < rows; ++j) {
                    to[j] = from[j];
                }
            }
        }
    }

    // A chunk's dB or dC, of whose steps each lane has two rows, to the block's part of the workspace.
    __device__ __forceinline__ void store_matrix(float* matrix, const float (&sum)[kStates / 8][4],
                                                 const int (&step)[2]) const {
        const MambaSsd& p = q.forward;
        const int column0 = slice * kStates;
        const int dstate = static_cast<int>(p.dstate);
        const bool add = launch.first_head > 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (step[half] >= valid) {
                continue;
            }
            float* const row =
                matrix + (((split * p.batch + batch) * p.seqlen + chunk * kSteps + step[half]) * p.ngroups + group) * dstate;
#pragma unroll
            for (int j = 0; j < kStates / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = column0 + 8 * j + lane % 4 * 2 + i;
                    if (column < dstate) {
                        const float value = sum[j][2 * half + i];
                        row[column] = add ? row[column] + value : value;
                    }
                }
            }
        }
    }
};

#endif

}  // namespace mamba
