// Mamba-3's backward scan behind prepare.cuh: some heads at a time, then what goes over all of them.
#pragma once

#include "mamba3/cuda/backward/finish.cuh"
#include "mamba3/cuda/backward/rotate.cuh"
#include "mamba3/launch.h"

namespace mamba {

inline cudaError_t launch_mamba3_backward(const MambaMamba3Backward& q, const Mamba3BackwardPlan& plan) {
    const MambaMamba3& p = q.forward;
    const int64_t size = dtype_size(p.dtype), heads_of_group = p.nheads / p.ngroups;
    Mamba3BackwardLaunch launch = mamba3_backward_launch(q, plan);
    launch.v_vectors = rows_aligned(p.v, size, 16, p.headdim, p.v_batch_stride, p.v_len_stride, p.v_head_stride);
    launch.dv_vectors = rows_aligned(q.dv, size, 16, p.headdim, q.dv_step_stride);
    launch.dy_vectors = p.headdim * size % 16 == 0;
    launch.state_vectors = p.dstate * size % 16 == 0;
    cudaError_t error = cudaSuccess;
    for (int64_t head = 0; head < heads_of_group && error == cudaSuccess; head += plan.group_heads) {
        const int64_t left = heads_of_group - head;
        launch.first_head = head;
        launch.group_heads = left < plan.group_heads ? left : plan.group_heads;
        if (!plan.warpgroups) {
            error = launch_mamba3_rotate(q, launch);
        }
        if (error == cudaSuccess) {
            error = launchers_of<Mamba3Launchers>(p.dtype).backward(q, launch);
        }
    }
    return error == cudaSuccess ? launch_mamba3_finish(q, plan) : error;
}

}  // namespace mamba
