// The kernels of what Mamba-3's scan takes as cuda.cu sees them.
#pragma once

#include "common/alignment.h"
#include "common/kernel_launch.cuh"
#include "mamba3_inputs/cuda/backward.cuh"
#include "mamba3_inputs/cuda/forward.cuh"
#include "mamba3_inputs/kernels.h"
#include "mamba3_inputs/launch.h"

namespace mamba {

template <typename T>
cudaError_t launch_mamba3_inputs(const MambaMamba3Inputs& p, int kernel) {
    constexpr int64_t kSize = sizeof(T), kBytes = kMamba3InputsWide * kSize;
    const bool vectors = rows_aligned(p.q, kSize, kBytes, p.row_stride, p.dstate) && rows_aligned(p.k, kSize, kBytes) &&
                         rows_aligned(p.q_out, kSize, kBytes) && rows_aligned(p.k_out, kSize, kBytes);
    return launch_row<T, kMamba3InputsForwardKernels>(mamba3_inputs_forward_table, kernel, [&](auto) {
        return launch_programmatic_dependent(mamba3_inputs_kernel<T>, ceil_div(p.rows, kMamba3InputsWarps),
                                             kMamba3InputsThreads, 0, p.run.stream, p, vectors);
    });
}

template <typename T>
cudaError_t launch_mamba3_inputs_backward(const MambaMamba3InputsBackward& q, const Mamba3InputsWorkspace& workspace,
                                          int kernel) {
    const MambaMamba3Inputs& p = q.forward;
    constexpr int64_t kSize = sizeof(T), kBytes = kMamba3InputsWide * kSize;
    const bool vectors = rows_aligned(p.q, kSize, kBytes, p.row_stride, p.dstate) && rows_aligned(p.k, kSize, kBytes) &&
                         rows_aligned(q.dq, kSize, kBytes, q.drow_stride) && rows_aligned(q.dk, kSize, kBytes) &&
                         rows_aligned(q.dq_out, kSize, kBytes) && rows_aligned(q.dk_out, kSize, kBytes);
    return launch_row<T, kMamba3InputsBackwardKernels>(mamba3_inputs_backward_table, kernel, [&](auto) {
        return launch_programmatic_dependent(mamba3_inputs_backward_kernel<T>, Grid(workspace.blocks, 3), kMamba3InputsThreads,
                                             0, p.run.stream, q, workspace, vectors);
    });
}

template <typename T>
Mamba3InputsLaunchers Mamba3InputsLaunchers::of() {
    Mamba3InputsLaunchers launchers = {};
    launchers.forward = launch_mamba3_inputs<T>;
    launchers.backward = launch_mamba3_inputs_backward<T>;
    return launchers;
}

}  // namespace mamba
