// Launches of Mamba-3's backward scan that depend on the dtype of v, of some heads.
#pragma once

#include "common/kernel_launch.cuh"
#include "mamba3/cuda/backward/chunk_gradients.cuh"
#include "mamba3/cuda/backward/rows.cuh"
#include "mamba3/cuda/backward/states.cuh"
#ifdef MAMBA_WARPGROUPS
#include "mamba3/cuda/backward/warpgroup.cuh"
#include "mamba3/cuda/forward/mimo.cuh"
#include "mamba3/cuda/forward/warpgroup.cuh"
#endif

namespace mamba {

// Rank 1: SISO, whose pairs are neighbours; rank 4: MIMO, whose pairs are halves.
template <typename T, int kRank>
cudaError_t launch_mamba3_backward_warpgroups(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch);

#ifdef MAMBA_WARPGROUPS
// A walk along the chunks of some heads; see Mamba3Pass.
inline Mamba3WarpgroupLaunch mamba3_backward_walk(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch,
                                                  bool from_end) {
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    Mamba3WarpgroupLaunch walk = mamba3_warpgroup_launch(p, launch.chunks, dtype_size(p.dtype));
    walk.first_head = launch.first_head;
    walk.group_heads = launch.group_heads;
    Mamba3WarpgroupBackward& to = walk.backward;
    to.states = launch.at<void>(from_end ? w.dstates : w.states);
    to.dy = launch.at<void>(w.dy);
    to.dout = q.dout;
    to.dz = q.dz;
    to.dD = launch.at<float>(w.D);
    to.dmimo_z = launch.at<float>(w.mimo_z);
    to.dmimo_out = launch.at<float>(w.mimo_out);
    to.dfinal = q.dfinal_ssm;
    to.dinitial = from_end ? q.dssm_state : nullptr;
    to.dout_batch_stride = q.dout_batch_stride;
    to.dout_len_stride = q.dout_len_stride;
    to.dout_head_stride = q.dout_head_stride;
    to.dy_stride = launch.group_heads * p.ngroups * p.headdim;
    to.dz_step_stride = q.dz_step_stride;
    return walk;
}

template <typename T, int kRank>
cudaError_t launch_mamba3_backward_warpgroups(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch) {
    MambaMamba3 p = q.forward;
    cudaError_t error = cudaSuccess;
    Mamba3WarpgroupLaunch walk = mamba3_backward_walk(q, launch, false);
    if constexpr (kRank == 1) {
        error = launch_mamba3_warpgroups<T, kMamba3WarpgroupStates, 1, kMamba3States>(p, walk, 1);
    } else {
        error = launch_mamba3_ranks<T, true>(p, walk, 1);
    }
    if (error == cudaSuccess) {
        walk = mamba3_backward_walk(q, launch, true);
        mamba3_walk_from_end(p, walk);
        walk.beside_last = kRank == 1;  // it makes dy by itself
        error = launch_mamba3_warpgroups<T, kMamba3WarpgroupStates, kRank, kMamba3States>(p, walk, 1);
    }
    return error != cudaSuccess
               ? error
               : launch_mamba3(mamba3_backward_warpgroup_kernel<T, kRank>, launch.chunks.slots * p.ngroups * launch.plan.splits,
                               1, kMamba3BackwardThreads, static_cast<int>(sizeof(Mamba3WarpgroupShared<T>)), q, launch);
}
#endif

template <typename T, class Tiles>
cudaError_t launch_mamba3_backward_general(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch) {
    // A tile of the states' walk has room for the chunks of several rows of the table.
    constexpr int kStatesRows = Tiles::kStates > 128 && sizeof(T) == 4 ? 16 : 32;
    using States = Mamba3StatesShared<T, Tiles::kStates, kStatesRows>;
    constexpr int kStatesBytes = static_cast<int>(sizeof(States));
    constexpr int kChunkBytes = static_cast<int>(sizeof(Mamba3ChunkShared<T, Tiles>));
    constexpr int kRowsBytes = static_cast<int>(round_up(sizeof(Mamba3RowsShared<T, Tiles>), 16));
    constexpr int kMost = Tiles::kStates > 128 && Tiles::kRows > 16 ? kMamba3BackwardShared256Rows32
                          : Tiles::kStates > 128                    ? kMamba3BackwardShared256
                          : Tiles::kRows == 16                      ? kMamba3BackwardShared16Rows
                          : sizeof(T) == 4                          ? kMamba3BackwardSharedFloat
                                                                    : kMamba3BackwardShared16Bit;
    constexpr int kMostRowsBytes = kRowsBytes + 4 * Tiles::kRows * mamba3_row_pitch(MAMBA_MAX_HEADDIM, Tiles::kInner);
    const MambaMamba3& p = q.forward;
    const int rows_bytes = kRowsBytes + 4 * Tiles::kRows * mamba3_row_pitch(p.headdim, Tiles::kInner);
    static_assert(kChunkBytes <= kMost && kStatesBytes <= kMost && kMostRowsBytes <= kMost, "the table says so");
    const int64_t heads = launch.group_heads * p.ngroups, slots = launch.chunks.slots;
    const int64_t walks = p.sequences * heads * ceil_div(p.headdim, kForwardRows);
    const auto states = mamba3_states_kernel<T, Tiles::kStates, kStatesRows>;
    cudaError_t error = cudaSuccess;
    if (slots > 0) {
        error = launch_mamba3(states, walks, 1, kMamba3StatesThreads, kStatesBytes, q, launch, false);
    }
    if (error == cudaSuccess) {
        error =
            launch_mamba3(mamba3_rows_kernel<T, Tiles>, launch.plan.ranges * heads, 1, Tiles::kThreads, rows_bytes, q, launch);
    }
    if (error == cudaSuccess) {
        error = launch_mamba3(states, walks, 1, kMamba3StatesThreads, kStatesBytes, q, launch, true);
    }
    if (error == cudaSuccess) {
        error = launch_mamba3(mamba3_backward_kernel<T, Tiles>, slots * p.ngroups * launch.plan.splits, 1, Tiles::kThreads,
                              kChunkBytes, q, launch);
    }
    return error;
}

// Some heads of a call, by its row of the table.
template <typename T>
cudaError_t launch_mamba3_backward_heads(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch) {
    return launch_row<T, kMamba3BackwardKernels>(mamba3_backward_table, launch.plan.kernel, [&](auto row) {
        constexpr const Mamba3BackwardKernel& kRow = kMamba3BackwardKernels[decltype(row)::kRow];
        if constexpr (kRow.warpgroup_ranks > 0) {
            return launch_mamba3_backward_warpgroups<T, kRow.warpgroup_ranks>(q, launch);
        } else {
            return launch_mamba3_backward_general<T, Mamba3BackwardTiles<kRow.states, kRow.rows, kRow.inner>>(q, launch);
        }
    });
}

}  // namespace mamba
