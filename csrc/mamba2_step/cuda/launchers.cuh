// How the kernels of a Mamba-2 layer's decode step share out the rows.
#pragma once

#include "common/cuda_cluster.cuh"
#include "common/kernel_launch.cuh"
#include "mamba2_step/cuda/kernel.cuh"
#include "mamba2_step/kernels.h"
#include "mamba2_step/launch.h"

namespace mamba {

// Rows of a block at most: in a cluster, and else, where it costs nothing to have more blocks.
constexpr int64_t kStepMostRows = 1024, kStepFewRows = 256;

template <class Rows, class Params>
cudaError_t launch_mamba2_step_rows(const Params& p, int processors, bool* together) {
    const auto kernel = mamba2_step_kernel<Rows, Params>;
    cudaError_t error = has_clusters(kernel, p.run.device, together);
    if (error != cudaSuccess) {
        return error;
    }
    Mamba2StepLayout layout;
    layout.lanes_log2 = state_lanes_log2(p.dstate, p.state_dtype, Rows::kRows, Rows::kVectors);
    layout.vectors = Rows::kWhole || has_state_vectors(p);
    const int64_t tile_rows = Rows::kRows << (5 - layout.lanes_log2);
    const int64_t groups = p.batch * p.ngroups, group_rows = p.nheads / p.ngroups * p.headdim;
    const int64_t most_parts = ceil_div(group_rows, kStepWarps * tile_rows);  // a tile a warp
    const auto rows_in = [&](int64_t parts) { return round_up(ceil_div(group_rows, parts), tile_rows); };

    int64_t parts = most_parts < kMostParts ? most_parts : kMostParts;
    *together = (*together || parts == 1) && rows_in(parts) <= kStepMostRows;
    if (!*together) {
        const int64_t least_parts = ceil_div(group_rows, kStepFewRows);
        parts = ceil_div(int64_t{4} * processors, groups);
        parts = parts < most_parts ? parts : most_parts;
        parts = parts > least_parts ? parts : least_parts;
    }
    int64_t rows = rows_in(parts);
    const bool heads_follow = p.nheads == p.ngroups || p.state_head_stride == p.headdim * p.state_dim_stride;
    if (!heads_follow) {  // a block keeps to one head
        rows = p.headdim;
        *together = *together && ceil_div(group_rows, rows) <= parts;
    }
    layout.rows = static_cast<int32_t>(rows);
    layout.warp_tiles = static_cast<int32_t>(ceil_div(ceil_div(rows, tile_rows), kStepWarps));
    layout.parts = Divisor(ceil_div(group_rows, rows));
    layout.groups = Divisor(p.ngroups);
    layout.headdim = Divisor(p.headdim);
    layout.group_heads = static_cast<uint32_t>(p.nheads / p.ngroups);
    layout.together = *together;
    const int64_t blocks = groups * layout.parts.divisor;
    layout.ahead = blocks <= 2 * processors;
    const int64_t shared = kStepWarps * StateRing<Rows, kStepDepth>::kWarpBytes + Mamba2StepShared::bytes(rows, p.dstate);
    error = allow_shared(kernel, shared);
    if (error != cudaSuccess) {
        return error;
    }
    return launch_clusters(kernel, layout.together ? layout.parts.divisor : 1, blocks, kStepThreads,
                           static_cast<size_t>(shared), p.run.stream, p, layout);
}

template <typename State>
cudaError_t launch_mamba2_step(const MambaMamba2Step& p, int kernel, int processors, bool* together) {
    return launch_row<State, kMamba2StepKernels>(mamba2_step_table, kernel, [&](auto row) {
        constexpr Mamba2StepKernel k = kMamba2StepKernels[decltype(row)::kRow];
        using Rows = StateRows<State, 16 / static_cast<int>(sizeof(State)), k.rows, k.vectors, k.whole_tiles>;
        if constexpr (k.whole_tiles) {
            return launch_mamba2_step_rows<Rows>(Mamba2StepOfOneDtype<State>{{p}}, processors, together);
        } else {
            return launch_mamba2_step_rows<Rows>(p, processors, together);
        }
    });
}

template <typename State>
Mamba2StepLaunchers Mamba2StepLaunchers::of() {
    Mamba2StepLaunchers launchers;
    launchers.step = launch_mamba2_step<State>;
    return launchers;
}

}  // namespace mamba
