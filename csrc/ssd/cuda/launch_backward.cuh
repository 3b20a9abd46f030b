// Launches of the backward scan: the states of both directions, the chunks, and the sums, some heads at a time.
#pragma once

#include "ssd/cuda/backward.cuh"
#include "ssd/cuda/launch_states.cuh"

namespace mamba {

template <typename T, class Layout, bool kAhead>
cudaError_t launch_backward_layout(const MambaSsdBackward& q, const SsdPlan& plan, const SsdWorkspace& workspace) {
    const MambaSsd& p = q.forward;
    const int64_t size = sizeof(T);
    char* const memory = static_cast<char*>(p.workspace);
    const int64_t ends = (plan.segments - 1) * p.batch * p.nheads;

    StatesLaunch states = {};
    StateWalk& walk = states.walks[0];
    walk = forward_walk(p, size);
    walk.ends = reinterpret_cast<float*>(memory + workspace.ends);
    walk.decays = reinterpret_cast<float*>(memory + workspace.decays);
    walk.chunks = memory + workspace.states;
    const int64_t dout_strides[3] = {q.dout_batch_stride, q.dout_len_stride, q.dout_head_stride};
    const int64_t C_strides[3] = {p.C_batch_stride, p.C_len_stride, p.C_group_stride};
    StateWalk& back = states.walks[1];
    back = state_walk(p, q.dout, dout_strides, p.C, C_strides, size);
    back.first = q.dfinal_state;
    back.last = q.dinitial_state;
    back.ends = walk.ends + ends * p.headdim * p.dstate;
    back.decays = walk.decays + ends;
    back.chunks = memory + workspace.dstates;
    states.segments = plan.segments;
    states.chunks_a_segment = plan.chunks_a_segment;

    BackwardLaunch launch = {};
    launch.chunks = plan.chunks;
    launch.splits = workspace.splits;
    launch.row_tiles = workspace.row_tiles;
    launch.states = walk.chunks;
    launch.dstates = back.chunks;
    launch.dB = reinterpret_cast<float*>(memory + workspace.dB);
    launch.dC = reinterpret_cast<float*>(memory + workspace.dC);
    launch.ddt = reinterpret_cast<float*>(memory + workspace.ddt);
    launch.dA = reinterpret_cast<float*>(memory + workspace.dA);
    launch.ddt_bias = reinterpret_cast<float*>(memory + workspace.ddt_bias);
    launch.dD = p.D == nullptr ? nullptr : reinterpret_cast<float*>(memory + workspace.dD);
    launch.x_vectors = walk.x_vectors;
    launch.dout_vectors = back.x_vectors;
    launch.B_vectors = walk.B_vectors;
    launch.C_vectors = back.B_vectors;
    launch.dx_vectors = rows_aligned(q.dx, size, 8, p.headdim, q.dx_batch_stride, q.dx_len_stride, q.dx_head_stride);
    launch.state_vectors = p.dstate * size % 16 == 0;

    constexpr int kShared = backward_shared_bytes<T, Layout, kAhead>();
    constexpr int kLimit = kAhead ? kAheadShared : Layout::kWarps > 4 ? kMiddleShared : kEveryShared;
    static_assert(kShared <= kLimit, "the plan counts on that");
    const auto kernel = ssd_backward_kernel<T, Layout, kAhead>;
    cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), kShared);
    const unsigned int blocks = static_cast<unsigned int>(p.batch * plan.chunks * p.ngroups * workspace.splits);
    const int64_t heads_of_group = p.nheads / p.ngroups;
    for (int64_t head = 0; head < heads_of_group && error == cudaSuccess; head += workspace.group_heads) {
        const int64_t left = heads_of_group - head;
        states.first_head = launch.first_head = head;
        states.group_heads = launch.group_heads = left < workspace.group_heads ? left : workspace.group_heads;
        if (plan.segments > 1) {
            states.ends_only = 1;
            error = launch_states<T, Layout>(p, states, 2);
            states.ends_only = 0;
        }
        if (error == cudaSuccess) {
            error = launch_states<T, Layout>(p, states, 2);
        }
        if (error == cudaSuccess && blocks > 0) {
            error = launch_kernel(kernel, blocks, Layout::kThreads, kShared, p.run.stream, q, launch);
        }
    }
    return error != cudaSuccess ? error : launch_finish<T>(q, launch);
}

template <typename T>
cudaError_t launch_ssd_backward(const MambaSsdBackward& q, const SsdPlan& plan, const SsdWorkspace& workspace) {
    using Layouts = SsdLayouts<T>;
    switch (plan.layout) {
        case kSsdSmall:
            return launch_backward_layout<T, typename Layouts::Small, false>(q, plan, workspace);
        case kSsdMiddle:
            return launch_backward_layout<T, typename Layouts::Middle, false>(q, plan, workspace);
        case kSsdMiddleAhead:
            return launch_backward_layout<T, typename Layouts::Middle, true>(q, plan, workspace);
        case kSsdLarge:
            return launch_backward_layout<T, typename Layouts::Large, false>(q, plan, workspace);
        default:
            return launch_backward_layout<T, typename Layouts::Little, false>(q, plan, workspace);
    }
}

}  // namespace mamba
