// dq and dk from the partial sums of blocks, in the order of memory.
#pragma once

#include "mamba3/cuda/backward/chunk.cuh"

namespace mamba {

constexpr int kMamba3MatricesThreads = 256;

// A block takes a chunk of a group, of dq or dk; a thread two neighbouring columns of the tiles, which are one pair.
__global__ void __launch_bounds__(kMamba3MatricesThreads)
    mamba3_finish_matrices_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const bool is_k = blockIdx.y != 0;
    const int64_t group = blockIdx.x % p.ngroups, slot = blockIdx.x / p.ngroups;
    const Mamba3Chunk chunk = find_chunk(p, launch.chunks, slot);
    const int dstate = static_cast<int>(p.dstate), pairs = (dstate + 1) / 2;
    const int64_t matrix = p.batch * p.seqlen * p.rank * p.ngroups * dstate;
    const int64_t first = (chunk.row * p.seqlen + chunk.first) * p.rank;
    const float* const from = launch.at<const float>(is_k ? w.dk_parts : w.dq_parts);
    void* const to = is_k ? q.dk : q.dq;
#pragma unroll 4
    for (int i = threadIdx.x; i < chunk.steps * static_cast<int>(p.rank) * pairs; i += kMamba3MatricesThreads) {
        const int row = i / pairs, column = i % pairs * 2;
        const int64_t at = ((first + row) * p.ngroups + group) * dstate;
        const bool both = column + 1 < dstate;
        float sum[2] = {};
        for (int64_t split = 0; split < launch.plan.splits; ++split) {
            const float* const own = from + split * matrix + at + column;
            sum[0] += own[0];
            sum[1] += both ? own[1] : 0.0f;
        }
        store_from_float(to, at + element_of_column(p, column), p.dtype, sum[0]);
        if (both) {
            store_from_float(to, at + element_of_column(p, column + 1), p.dtype, sum[1]);
        }
    }
}

}  // namespace mamba
