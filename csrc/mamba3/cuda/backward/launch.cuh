// Launches of Mamba-3's backward scan that depend on the dtype of v: some heads at a time, then dq and dk.
#pragma once

#include "mamba3/cuda/backward/chunk_gradients.cuh"
#include "mamba3/cuda/backward/matrices.cuh"
#include "mamba3/cuda/backward/rows.cuh"
#include "mamba3/cuda/backward/states.cuh"
#ifdef MAMBA_WARPGROUPS
#include "mamba3/cuda/backward/warpgroup.cuh"
#include "mamba3/cuda/forward_ranks_warpgroup.cuh"
#include "mamba3/cuda/forward_warpgroup.cuh"
#endif

namespace mamba {

template <typename T, class Tiles>
cudaError_t launch_mamba3_rows(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch) {
    constexpr int kBytes = static_cast<int>(round_up(sizeof(Mamba3RowsShared<T, Tiles>), 16));
    const int64_t blocks = launch.plan.ranges * launch.group_heads * q.forward.ngroups;
    return launch_mamba3(mamba3_rows_kernel<T, Tiles>, blocks, 1, Tiles::kThreads,
                         kBytes + 4 * Tiles::kRows * mamba3_row_pitch(q.forward.headdim, Tiles::kInner), q, launch);
}

#ifdef MAMBA_WARPGROUPS
// A walk along the chunks of some heads; see Mamba3Pass.
template <typename T, bool kPairwise, Mamba3Pass kPass>
cudaError_t launch_mamba3_backward_walk(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch) {
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    Mamba3WarpgroupLaunch walk = mamba3_warpgroup_launch(p, launch.chunks, p.rank, static_cast<int64_t>(sizeof(T)));
    walk.first_head = launch.first_head;
    walk.group_heads = launch.group_heads;
    walk.backward = {launch.at<T>(kPass == kMamba3After ? w.dstates : w.states),
                     launch.at<T>(w.dy),
                     q.dout,
                     q.dz,
                     launch.at<float>(w.D),
                     launch.at<float>(w.mimo_z),
                     launch.at<float>(w.mimo_out),
                     q.dfinal_ssm,
                     q.dssm_state,
                     q.dout_batch_stride,
                     q.dout_len_stride,
                     q.dout_head_stride,
                     launch.group_heads * p.ngroups * p.headdim,
                     q.dz_step_stride};
    if constexpr (kPass == kMamba3GateBack && !kPairwise) {
        if (mamba3_ranks_gate_back(q)) {
            return launch_mamba3_ranks<T, true>(p, walk, 1);
        }
    }
    return launch_mamba3_warpgroups<T, kMamba3WarpgroupStates, kPairwise, kPass>(p, walk, 1);
}

template <typename T, int kRank>
cudaError_t launch_mamba3_backward_products(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch) {
    return launch_mamba3(mamba3_backward_warpgroup_kernel<T, kRank>,
                         launch.chunks.slots * q.forward.ngroups * launch.plan.splits, 1, kMamba3BackwardThreads,
                         static_cast<int>(sizeof(Mamba3WarpgroupShared<T>)), q, launch);
}

template <typename T, class Tiles, bool kPairwise>
cudaError_t launch_mamba3_warpgroup_heads(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch) {
    cudaError_t error = cudaSuccess;
    if (mamba3_gates_back(q, launch.plan)) {
        error = launch_mamba3_backward_walk<T, kPairwise, kMamba3GateBack>(q, launch);
    } else {
        error = launch_mamba3_backward_walk<T, kPairwise, kMamba3Before>(q, launch);
        if (error == cudaSuccess) {
            error = launch_mamba3_rows<T, Tiles>(q, launch);
        }
    }
    if (error == cudaSuccess) {
        error = launch_mamba3_backward_walk<T, kPairwise, kMamba3After>(q, launch);
    }
    if (error == cudaSuccess) {
        const int64_t rank = q.forward.rank;
        error = rank == 1   ? launch_mamba3_backward_products<T, 1>(q, launch)
                : rank == 2 ? launch_mamba3_backward_products<T, 2>(q, launch)
                            : launch_mamba3_backward_products<T, 4>(q, launch);
    }
    return error;
}
#endif

template <typename T, class Tiles>
cudaError_t launch_mamba3_heads(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch) {
    const MambaMamba3& p = q.forward;
    const int64_t heads = launch.group_heads * p.ngroups, slots = launch.chunks.slots;
    const int64_t walks = p.sequences * heads * ceil_div(p.headdim, kForwardRows);
    constexpr int kStatesBytes = static_cast<int>(sizeof(Mamba3StatesShared<T, Tiles>));
    constexpr int kChunkBytes = static_cast<int>(sizeof(Mamba3ChunkShared<T, Tiles>));
    static_assert(kChunkBytes <= kMamba3BackwardShared, "the plan counts on that");
#ifdef MAMBA_WARPGROUPS
    if constexpr (sizeof(T) == 2 && Tiles::kStates == kMamba3WarpgroupStates && Tiles::kRows == kWarpgroupSteps) {
        if (launch.plan.warpgroups) {
            return p.pairwise != 0 ? launch_mamba3_warpgroup_heads<T, Tiles, true>(q, launch)
                                   : launch_mamba3_warpgroup_heads<T, Tiles, false>(q, launch);
        }
    }
#endif
    cudaError_t error = cudaSuccess;
    if (slots > 0) {
        error = launch_mamba3(mamba3_states_kernel<T, Tiles, false>, walks, 1, Tiles::kThreads, kStatesBytes, q, launch);
    }
    if (error == cudaSuccess) {
        error = launch_mamba3_rows<T, Tiles>(q, launch);
    }
    if (error == cudaSuccess) {
        error = launch_mamba3(mamba3_states_kernel<T, Tiles, true>, walks, 1, Tiles::kThreads, kStatesBytes, q, launch);
    }
    if (error == cudaSuccess) {
        error = launch_mamba3(mamba3_backward_kernel<T, Tiles>, slots * p.ngroups * launch.plan.splits, 1, Tiles::kThreads,
                              kChunkBytes, q, launch);
    }
    return error;
}

template <typename T, class Tiles>
cudaError_t launch_mamba3_backward_layout(const MambaMamba3Backward& q, const Mamba3BackwardPlan& plan) {
    const MambaMamba3& p = q.forward;
    const int64_t size = sizeof(T), slots = plan.chunks.chunks.slots;
    Mamba3BackwardLaunch launch = mamba3_backward_launch(q, plan);
    const bool pairwise = p.pairwise != 0;
    launch.q_pairs =
        pairwise && rows_aligned(p.q, size, 2 * size, p.q_batch_stride, p.q_len_stride, p.q_rank_stride, p.q_group_stride);
    launch.k_pairs =
        pairwise && rows_aligned(p.k, size, 2 * size, p.k_batch_stride, p.k_len_stride, p.k_rank_stride, p.k_group_stride);
    launch.v_vectors = rows_aligned(p.v, size, 16, p.headdim, p.v_batch_stride, p.v_len_stride, p.v_head_stride);
    launch.dv_vectors = rows_aligned(q.dv, size, 16, p.headdim, q.dv_step_stride);
    launch.dy_vectors = p.headdim * size % 16 == 0;
    launch.row_vectors = launch.v_vectors != 0 && launch.dy_vectors != 0 && rows_aligned(q.dz, size, 16, q.dz_step_stride) &&
                         rows_aligned(p.z, size, 16, p.z_batch_stride, p.z_len_stride, p.z_head_stride) &&
                         rows_aligned(q.dout, size, 16, q.dout_batch_stride, q.dout_len_stride, q.dout_head_stride,
                                      p.mimo_out != nullptr ? 0 : used_stride(p.rank, q.dout_rank_stride)) &&
                         rows_aligned(p.mimo_v, 4, 16) && rows_aligned(p.mimo_z, 4, 16) && rows_aligned(p.mimo_out, 4, 16);
    launch.state_vectors = p.dstate * size % 16 == 0;

    cudaError_t error = cudaSuccess;
    const int64_t heads_of_group = p.nheads / p.ngroups;
    for (int64_t head = 0; head < heads_of_group && error == cudaSuccess; head += plan.group_heads) {
        const int64_t left = heads_of_group - head;
        launch.first_head = head;
        launch.group_heads = left < plan.group_heads ? left : plan.group_heads;
        error = launch_mamba3_heads<T, Tiles>(q, launch);
    }
    if (error == cudaSuccess && !plan.whole) {
        error = launch_mamba3(mamba3_finish_matrices_kernel<T>, slots * p.ngroups, 2, kMamba3MatricesThreads, 0, q, launch);
    }
    return error;
}

template <typename T>
cudaError_t launch_mamba3_backward(const MambaMamba3Backward& q, const Mamba3BackwardPlan& plan) {
    using Layouts = Mamba3BackwardLayouts<T>;
    switch (plan.layout) {
        case kBackwardSmall:
            return launch_mamba3_backward_layout<T, typename Layouts::Small>(q, plan);
        case kBackwardMiddle:
            return launch_mamba3_backward_layout<T, typename Layouts::Middle>(q, plan);
        case kBackwardLarge:
            return launch_mamba3_backward_layout<T, typename Layouts::Large>(q, plan);
        case kBackwardLittle:
            return launch_mamba3_backward_layout<T, typename Layouts::Little>(q, plan);
        default:
            return launch_mamba3_backward_layout<T, typename Layouts::Least>(q, plan);
    }
}

}  // namespace mamba
