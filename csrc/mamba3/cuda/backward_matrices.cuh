// dq and dk from the parts that blocks have left, in the order of memory.
#pragma once

#include "mamba3/cuda/backward_chunk.cuh"

namespace mamba {

constexpr int kMamba3MatricesThreads = 256;

// A block takes a chunk of a group, of dq or dk.
template <typename T>
__global__ void __launch_bounds__(kMamba3MatricesThreads)
    mamba3_finish_matrices_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const bool is_k = blockIdx.y != 0;
    const int64_t group = blockIdx.x % p.ngroups, slot = blockIdx.x / p.ngroups;
    const Mamba3Chunk chunk = find_chunk(p, launch.chunks, slot);
    const int dstate = static_cast<int>(p.dstate);
    const int64_t matrix = p.batch * p.seqlen * p.rank * p.ngroups * dstate;
    const int64_t first = (chunk.row * p.seqlen + chunk.first) * p.rank;
    const float* const from = launch.at<const float>(is_k ? w.dk : w.dq);
    T* const to = static_cast<T*>(is_k ? q.dk : q.dq);
#pragma unroll 4
    for (int i = threadIdx.x; i < chunk.steps * static_cast<int>(p.rank) * dstate; i += kMamba3MatricesThreads) {
        const int row = i / dstate, column = i % dstate;
        const int64_t at = ((first + row) * p.ngroups + group) * dstate;
        float sum = 0.0f;
        for (int64_t split = 0; split < launch.plan.splits; ++split) {
            sum += from[split * matrix + at + column];
        }
        to[at + element_of_column(p, column)] = from_float<T>(sum);
    }
}

}  // namespace mamba
