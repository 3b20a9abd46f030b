// Launches of the forward scan, behind those of prepare.cuh: the segments' ends and the results.
#pragma once

#include "common/kernel_launch.cuh"
#include "mamba3/cuda/forward/general.cuh"
#include "mamba3/launch.h"
#ifdef MAMBA_WARPGROUPS
#include "mamba3/cuda/forward/mimo.cuh"
#include "mamba3/cuda/forward/warpgroup.cuh"
#endif

namespace mamba {

template <typename T, class Layout>
cudaError_t launch_mamba3_walk(const MambaMamba3& p, Mamba3ForwardLaunch launch, int64_t segments, bool results) {
    using Shared = Mamba3ForwardShared<T, Layout>;
    static_assert(Shared::bytes_at_most() <= kMamba3ForwardShared, "the table says so");
    const int64_t shared = Shared::bytes(p.rank > 1 || p.mimo_v != nullptr, launch.chunks.steps);
    const auto kernel = mamba3_forward_kernel<T, Layout>;
    const cudaError_t error = allow_shared(kernel, shared);
    if (error != cudaSuccess) {
        return error;
    }
    launch.segments = segments;
    launch.results = results ? 1 : 0;
    return launch_kernel(kernel, static_cast<unsigned>(launch.blocks(p)), kMamba3Threads, static_cast<size_t>(shared),
                         p.run.stream, p, launch);
}

template <typename T, class Layout>
cudaError_t launch_mamba3_general(const MambaMamba3& p, const Mamba3Forward& plan, Mamba3ForwardLaunch launch) {
    if (plan.segments > 1) {
        cudaError_t error = launch_mamba3_walk<T, Layout>(p, launch, plan.segments - 1, false);
        if (error == cudaSuccess) {
            error = launch_mamba3_carry_states(p, plan.segments, launch.ends, launch.decays);
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
            const cudaError_t error = launch_mamba3_walk<T, Layout>(p, launch, plan.segments, true);
            if (error != cudaSuccess) {
                return error;
            }
        }
    }
    return cudaSuccess;
}

#ifdef MAMBA_WARPGROUPS
template <typename T, int kStates, int kRanks>
cudaError_t launch_mamba3_warpgroup_walk(const MambaMamba3& p, const Mamba3Forward& plan, const Mamba3WarpgroupLaunch& launch) {
    cudaError_t error = cudaSuccess;
    if (plan.segments > 1) {
        error = launch_mamba3_warpgroups<T, kStates, kRanks, kMamba3States>(p, launch, plan.segments - 1);
        if (error == cudaSuccess) {
            error = launch_mamba3_carry_states(p, plan.segments, launch.ends, launch.decays);
        }
        if (error != cudaSuccess) {
            return error;
        }
    }
    if constexpr (kRanks == 1) {
        return launch_mamba3_warpgroups<T, kStates, kRanks, kMamba3Output>(p, launch, plan.segments);
    } else {
        return launch_mamba3_ranks<T, false>(p, launch, plan.segments);
    }
}

#endif

inline Mamba3ForwardLaunch mamba3_forward_launch(const MambaMamba3& p, const Mamba3Forward& plan) {
    const int64_t size = dtype_size(p.dtype);
    Mamba3ForwardLaunch launch = {};
    launch.rows = plan.rows_apart ? reinterpret_cast<float*>(static_cast<char*>(p.workspace) + plan.rows) : nullptr;
    launch.ranks_log2 = ceil_log2(plan.ranks, 0, 4);
    launch.words = p.dstate % 4 == 0 && rows_aligned(p.q_bias, 4, 8, p.dstate) && rows_aligned(p.k_bias, 4, 8, p.dstate);
    const int64_t q_rank = used_stride(p.rank, p.q_rank_stride), k_rank = used_stride(p.rank, p.k_rank_stride);
    launch.q_vectors = rows_aligned(p.q, size, 16, p.dstate, p.q_batch_stride, p.q_len_stride, p.q_group_stride, q_rank);
    launch.k_vectors = rows_aligned(p.k, size, 16, p.dstate, p.k_batch_stride, p.k_len_stride, p.k_group_stride, k_rank);
    launch.v_vectors = rows_aligned(p.v, size, 16, p.headdim, p.v_batch_stride, p.v_len_stride, p.v_head_stride);
    launch.vectors.z = rows_aligned(p.z, size, 16, p.z_batch_stride, p.z_len_stride, p.z_head_stride);
    launch.vectors.out = rows_aligned(p.out, size, 16, p.out_batch_stride, p.out_len_stride, p.out_head_stride,
                                      p.mimo_out != nullptr ? 0 : p.out_rank_stride);
    launch.vectors.weights = rows_aligned(p.mimo_v, 4, 16, p.headdim) && rows_aligned(p.mimo_z, 4, 16, p.headdim) &&
                             rows_aligned(p.mimo_out, 4, 16, p.headdim) && rows_aligned(p.norm_weight, 4, 16, p.headdim);
    return launch;
}

// What all rows share of a walk.
inline void set_mamba3_forward_walk(Mamba3WalkLaunch& launch, const MambaMamba3& p, const Mamba3Forward& plan) {
    char* const memory = static_cast<char*>(p.workspace);
    launch.set_walk(p, plan.chunks.place(p.workspace));
    launch.chunks_a_segment = plan.chunks_a_segment;
    launch.ends = reinterpret_cast<float*>(memory + plan.ends);
    launch.decays = reinterpret_cast<float*>(memory + plan.decays);
}

template <typename T>
cudaError_t launch_mamba3_forward(const MambaMamba3& p, const Mamba3Forward& plan) {
    return launch_row<T, kMamba3ForwardKernels>(mamba3_forward_table, plan.kernel, [&](auto number) {
        constexpr const Mamba3ForwardKernel& row = kMamba3ForwardKernels[decltype(number)::kRow];
        if constexpr (row.warpgroup_ranks == 0) {
            Mamba3ForwardLaunch launch = mamba3_forward_launch(p, plan);
            set_mamba3_forward_walk(launch, p, plan);
            const cudaError_t error = launch_mamba3_general<T, Mamba3Sizes<row.states, row.rows>>(p, plan, launch);
            return error == cudaSuccess && plan.rows_apart ? launch_mamba3_finish_rows(p, launch.rows) : error;
        } else {
#ifdef MAMBA_WARPGROUPS
            constexpr bool kRows = row.warpgroup_ranks == 1;
            static_assert(sizeof(Mamba3WalkShared<T, row.states, row.warpgroup_ranks, kRows>) <= row.shared_bytes, "");
            Mamba3WarpgroupLaunch launch = mamba3_warpgroup_launch(p, plan.chunks.chunks, static_cast<int64_t>(sizeof(T)));
            set_mamba3_forward_walk(launch, p, plan);
            return launch_mamba3_warpgroup_walk<T, row.states, row.warpgroup_ranks>(p, plan, launch);
#else
            return cudaErrorInvalidDeviceFunction;  // launch_row never comes here
#endif
        }
    });
}

}  // namespace mamba
