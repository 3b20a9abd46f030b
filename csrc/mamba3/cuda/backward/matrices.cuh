// dq and dk from the parts that blocks have left, in the order of memory.
#pragma once

#include "mamba3/cuda/backward/chunk.cuh"

namespace mamba {

constexpr int kMamba3MatricesThreads = 256;

// A block takes a chunk of a group, of dq or dk.
template <typename T>
__global__ void __launch_bounds__(kMamba3MatricesThreads)
    mamba3_finish_matrices_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
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
    const int rows = chunk.steps * static_cast<int>(p.rank);
    const bool aligned = reinterpret_cast<uintptr_t>(to) % (2 * sizeof(T)) == 0;
    if (aligned && dstate % 4 == 0 && p.pairwise == 0) {  // four columns are two elements, and two half of dstate on
        const int pieces = dstate / 4;
#pragma unroll 4
        for (int i = threadIdx.x; i < rows * pieces; i += kMamba3MatricesThreads) {
            const int row = i / pieces, column = i % pieces * 4;
            const int64_t at = ((first + row) * p.ngroups + group) * dstate;
            float sum[4] = {}, part[4];
            for (int64_t split = 0; split < launch.plan.splits; ++split) {
                unpack<float, 4>(packed_load<float, 4>(from + split * matrix + at + column), part);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sum[j] += part[j];
                }
            }
            store_pair<T>(to + at + column / 2, sum[0], sum[2]);
            store_pair<T>(to + at + dstate / 2 + column / 2, sum[1], sum[3]);
        }
        return;
    }
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
