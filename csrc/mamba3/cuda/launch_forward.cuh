// Launches of the forward scan, behind those of prepare.cuh: the segments' ends and the results.
#pragma once

#include "mamba3/cuda/forward.cuh"
#include "mamba3/plan.h"
#ifdef MAMBA_WARPGROUPS
#include "mamba3/cuda/forward_ranks_warpgroup.cuh"
#include "mamba3/cuda/forward_warpgroup.cuh"
#endif

namespace mamba {

template <typename T, class Layout, bool kResults>
cudaError_t launch_mamba3_walk(const MambaMamba3& p, Mamba3ForwardLaunch launch, int64_t segments) {
    using Tiles = Mamba3ForwardTiles<T, Layout>;
    static_assert(Tiles::kFixed <= 56 * 1024, "with the steps of v it fits every GPU");
    const bool projects = p.rank > 1 || p.mimo_v != nullptr;
    const int64_t shared = Tiles::kFixed + (projects ? Tiles::v_bytes(launch.chunks.steps) : 0);
    const auto kernel = mamba3_forward_kernel<T, Layout, kResults>;
    const cudaError_t error = allow_shared(kernel, shared);
    if (error != cudaSuccess) {
        return error;
    }
    launch.segments = segments;
    const int64_t blocks = ceil_div(p.headdim, kMamba3StateRows) * p.nheads * segments * p.sequences;
    return launch_kernel(kernel, static_cast<unsigned>(blocks), kMamba3Threads, static_cast<size_t>(shared), p.run.stream, p,
                         launch);
}

// ends, from what the pass before has left of each segment.
template <typename T>
cudaError_t launch_mamba3_carry_states(const MambaMamba3& p, int64_t segments, float* ends, const float* decays) {
    if (segments <= 2) {
        return cudaSuccess;
    }
    const int64_t states = p.sequences * p.nheads * p.headdim * p.dstate;
    return launch_programmatic_dependent(mamba3_carry_states_kernel<T>,
                                         static_cast<unsigned>(ceil_div(states, kMamba3CarryStateThreads)),
                                         kMamba3CarryStateThreads, 0, p.run.stream, p, segments, ends, decays);
}

template <typename T, class Layout>
cudaError_t launch_mamba3_layout(const MambaMamba3& p, const Mamba3Forward& plan, Mamba3ForwardLaunch launch) {
    if (plan.segments > 1) {
        cudaError_t error = launch_mamba3_walk<T, Layout, false>(p, launch, plan.segments - 1);
        if (error == cudaSuccess) {
            error = launch_mamba3_carry_states<T>(p, plan.segments, launch.ends, launch.decays);
        }
        if (error != cudaSuccess) {
            return error;
        }
    }
    for (int64_t q = 0; q < plan.passes; ++q) {
        for (int64_t k = 0; k < plan.passes; ++k) {
            launch.q_rank = static_cast<int32_t>(q * plan.ranks);
            launch.k_rank = static_cast<int32_t>(k * plan.ranks);
            launch.adds = k > 0;
            const cudaError_t error = launch_mamba3_walk<T, Layout, true>(p, launch, plan.segments);
            if (error != cudaSuccess) {
                return error;
            }
        }
    }
    return cudaSuccess;
}

#ifdef MAMBA_WARPGROUPS
template <typename T, int kStates, bool kPairwise>
cudaError_t launch_mamba3_warpgroup_passes(const MambaMamba3& p, const Mamba3Forward& plan,
                                           const Mamba3WarpgroupLaunch& launch) {
    cudaError_t error = cudaSuccess;
    if (plan.segments > 1) {
        error = launch_mamba3_warpgroups<T, kStates, kPairwise, kMamba3Ends>(p, launch, plan.segments - 1);
        if (error == cudaSuccess) {
            error = launch_mamba3_carry_states<T>(p, plan.segments, launch.ends, launch.decays);
        }
    }
    if constexpr (kStates == 128 && !kPairwise) {
        if (error == cudaSuccess && mamba3_ranks_fit(p)) {
            return launch_mamba3_ranks<T, false>(p, launch, plan.segments);
        }
    }
    return error != cudaSuccess ? error
                                : launch_mamba3_warpgroups<T, kStates, kPairwise, kMamba3Output>(p, launch, plan.segments);
}

template <typename T>
cudaError_t launch_mamba3_forward_warpgroups(const MambaMamba3& p, const Mamba3Forward& plan) {
    char* const memory = static_cast<char*>(p.workspace);
    Mamba3WarpgroupLaunch launch =
        mamba3_warpgroup_launch(p, plan.chunks.place(p.workspace), plan.ranks, static_cast<int64_t>(sizeof(T)));
    launch.chunks_a_segment = plan.chunks_a_segment;
    launch.ends = reinterpret_cast<float*>(memory + plan.ends);
    launch.decays = reinterpret_cast<float*>(memory + plan.decays);
    if (plan.layout == kMamba3Small) {
        return p.pairwise != 0 ? launch_mamba3_warpgroup_passes<T, 64, true>(p, plan, launch)
                               : launch_mamba3_warpgroup_passes<T, 64, false>(p, plan, launch);
    }
    return p.pairwise != 0 ? launch_mamba3_warpgroup_passes<T, 128, true>(p, plan, launch)
                           : launch_mamba3_warpgroup_passes<T, 128, false>(p, plan, launch);
}
#endif

template <typename T>
cudaError_t launch_mamba3_forward(const MambaMamba3& p, const Mamba3Forward& plan) {
#ifdef MAMBA_WARPGROUPS
    if constexpr (sizeof(T) == 2) {
        if (plan.warpgroups) {
            return launch_mamba3_forward_warpgroups<T>(p, plan);
        }
    }
#endif
    const int64_t size = sizeof(T);
    char* const memory = static_cast<char*>(p.workspace);
    Mamba3ForwardLaunch launch = {};
    launch.chunks = plan.chunks.place(p.workspace);
    launch.chunks_a_segment = plan.chunks_a_segment;
    launch.ends = reinterpret_cast<float*>(memory + plan.ends);
    launch.decays = reinterpret_cast<float*>(memory + plan.decays);
    launch.rows = plan.rows_apart ? reinterpret_cast<float*>(memory + plan.rows) : nullptr;
    launch.ranks_log2 = ceil_log2(plan.ranks, 0, 4);
    const int64_t unit = p.pairwise != 0 ? 2 : 4;
    launch.words = p.dstate % unit == 0 && rows_aligned(p.q_bias, 4, 8, p.dstate) && rows_aligned(p.k_bias, 4, 8, p.dstate);
    const int64_t q_rank = used_stride(p.rank, p.q_rank_stride), k_rank = used_stride(p.rank, p.k_rank_stride);
    launch.q_vectors = rows_aligned(p.q, size, 16, p.dstate, p.q_batch_stride, p.q_len_stride, p.q_group_stride, q_rank);
    launch.k_vectors = rows_aligned(p.k, size, 16, p.dstate, p.k_batch_stride, p.k_len_stride, p.k_group_stride, k_rank);
    launch.v_vectors = rows_aligned(p.v, size, 16, p.headdim, p.v_batch_stride, p.v_len_stride, p.v_head_stride);
    launch.vectors.z = rows_aligned(p.z, size, 16, p.z_batch_stride, p.z_len_stride, p.z_head_stride);
    launch.vectors.out = rows_aligned(p.out, size, 16, p.out_batch_stride, p.out_len_stride, p.out_head_stride,
                                      p.mimo_out != nullptr ? 0 : p.out_rank_stride);
    launch.vectors.weights = rows_aligned(p.mimo_v, 4, 16, p.headdim) && rows_aligned(p.mimo_z, 4, 16, p.headdim) &&
                             rows_aligned(p.mimo_out, 4, 16, p.headdim) && rows_aligned(p.norm_weight, 4, 16, p.headdim);
    launch.vectors.all = launch.vectors.z != 0 && launch.vectors.out != 0 && launch.vectors.weights != 0;
    using Layouts = Mamba3Layouts<T>;
    cudaError_t error = plan.layout == kMamba3Small    ? launch_mamba3_layout<T, typename Layouts::Small>(p, plan, launch)
                        : plan.layout == kMamba3Middle ? launch_mamba3_layout<T, typename Layouts::Middle>(p, plan, launch)
                                                       : launch_mamba3_layout<T, typename Layouts::Large>(p, plan, launch);
    const int64_t rows = p.batch * p.seqlen * p.nheads;
    if (error == cudaSuccess && plan.rows_apart && rows > 0) {
        const auto kernel = mamba3_finish_kernel<T>;
        error = launch_kernel(kernel, static_cast<unsigned>(ceil_div(rows, kMamba3FinishThreads / 32)), kMamba3FinishThreads, 0,
                              p.run.stream, p, static_cast<const float*>(launch.rows));
    }
    return error;
}

}  // namespace mamba
