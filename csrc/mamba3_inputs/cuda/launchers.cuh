// The kernels of what Mamba-3's scan takes as cuda.cu sees them.
#pragma once

#include "common/alignment.h"
#include "mamba3_inputs/cuda/backward.cuh"
#include "mamba3_inputs/cuda/forward.cuh"
#include "mamba3_inputs/launch.h"

namespace mamba {

constexpr int kMamba3InputsWide = 4;

template <typename T>
cudaError_t launch_mamba3_inputs(const MambaMamba3Inputs& p) {
    constexpr int64_t kSize = sizeof(T), kBytes = kMamba3InputsWide * kSize;
    const bool wide = rows_aligned(p.q, kSize, kBytes, p.row_stride, p.dstate) && rows_aligned(p.k, kSize, kBytes) &&
                      rows_aligned(p.q_out, kSize, kBytes) && rows_aligned(p.k_out, kSize, kBytes);
    return launch_programmatic_dependent(wide ? mamba3_inputs_kernel<T, kMamba3InputsWide> : mamba3_inputs_kernel<T, 1>,
                                         ceil_div(p.rows, kMamba3InputsWarps), kMamba3InputsThreads, 0, p.run.stream, p);
}

template <typename T>
cudaError_t launch_mamba3_inputs_backward(const MambaMamba3InputsBackward& q, const Mamba3InputsWorkspace& workspace) {
    const MambaMamba3Inputs& p = q.forward;
    constexpr int64_t kSize = sizeof(T), kBytes = kMamba3InputsWide * kSize;
    const bool wide = rows_aligned(p.q, kSize, kBytes, p.row_stride, p.dstate) && rows_aligned(p.k, kSize, kBytes) &&
                      rows_aligned(q.dq, kSize, kBytes, q.drow_stride) && rows_aligned(q.dk, kSize, kBytes) &&
                      rows_aligned(q.dq_out, kSize, kBytes) && rows_aligned(q.dk_out, kSize, kBytes);
    return launch_programmatic_dependent(
        wide ? mamba3_inputs_backward_kernel<T, kMamba3InputsWide> : mamba3_inputs_backward_kernel<T, 1>,
        Grid(workspace.blocks, 3), kMamba3InputsThreads, 0, p.run.stream, q, workspace);
}

template <typename T>
Mamba3InputsLaunchers Mamba3InputsLaunchers::of() {
    Mamba3InputsLaunchers launchers = {};
    launchers.forward = launch_mamba3_inputs<T>;
    launchers.backward = launch_mamba3_inputs_backward<T>;
    return launchers;
}

}  // namespace mamba
