// Launches of the backward scan: the states of both directions, the chunks, and the sums, some heads at a time.
#pragma once

#include "common/kernel_launch.cuh"
#include "ssd/cuda/backward.cuh"
#include "ssd/cuda/backward_warpgroup.cuh"
#include "ssd/cuda/launch_states.cuh"

namespace mamba {

// What both ways launch, but for the heads that a launch takes.
struct BackwardLaunches {
    StatesLaunch states;
    BackwardLaunch chunks;
};

template <typename T>
BackwardLaunches backward_launches(const MambaSsdBackward& q, const SsdPlan& plan, const SsdWorkspace& workspace) {
    const MambaSsd& p = q.forward;
    const int64_t size = sizeof(T);
    char* const memory = static_cast<char*>(p.workspace);
    const int64_t ends = (plan.segments - 1) * p.batch * p.nheads;
    BackwardLaunches launches = {};

    StatesLaunch& states = launches.states;
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
    back.ends = walk.ends + ends * plan.end_size;
    back.decays = walk.decays + ends;
    back.chunks = memory + workspace.dstates;
    states.directions = 2;
    states.segments = plan.segments;
    states.chunks_a_segment = plan.chunks_a_segment;
    states.end_size = plan.end_size;

    BackwardLaunch& launch = launches.chunks;
    launch.chunks = plan.chunks;
    launch.splits = workspace.splits;
    launch.row_tiles = workspace.row_tiles;
    launch.parts = workspace.row_tiles * workspace.slices;
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
    launch.state_vectors = p.dstate * size % 16 == 0;
    return launches;
}

// For some heads of each group at a time: the states in both directions (`launch_walk`; where the length is split, first the
// segments' ends), then the chunks (`launch_chunks`). In the end the sums over blocks.
template <class Walk, class Chunks>
cudaError_t launch_backward_heads(const MambaSsdBackward& q, BackwardLaunches& launches, const SsdWorkspace& workspace,
                                  const Walk& launch_walk, const Chunks& launch_chunks) {
    StatesLaunch& states = launches.states;
    const int64_t heads_of_group = q.forward.nheads / q.forward.ngroups;
    cudaError_t error = cudaSuccess;
    for (int64_t head = 0; head < heads_of_group && error == cudaSuccess; head += workspace.group_heads) {
        const int64_t left = heads_of_group - head;
        states.first_head = launches.chunks.first_head = head;
        states.group_heads = launches.chunks.group_heads = left < workspace.group_heads ? left : workspace.group_heads;
        if (states.segments > 1) {
            states.ends_only = 1;
            error = launch_walk(states);
            states.ends_only = 0;
        }
        if (error == cudaSuccess) {
            error = launch_walk(states);
        }
        if (error == cudaSuccess && launches.chunks.chunks > 0) {
            error = launch_chunks(launches.chunks);
        }
    }
    return error != cudaSuccess ? error : launch_finish(q, launches.chunks);
}

template <typename T, class Layout>
cudaError_t launch_backward_blocks(const MambaSsdBackward& q, const SsdPlan& plan, const SsdWorkspace& workspace) {
    const MambaSsd& p = q.forward;
    BackwardLaunches launches = backward_launches<T>(q, plan, workspace);
    launches.chunks.ahead = plan.ahead ? 1 : 0;
    launches.chunks.dx_vectors =
        rows_aligned(q.dx, sizeof(T), 8, p.headdim, q.dx_batch_stride, q.dx_len_stride, q.dx_head_stride);
    const int shared = backward_shared_bytes<T, Layout>(plan.ahead);
    const auto kernel = ssd_backward_kernel<T, Layout>;
    const cudaError_t error = allow_shared(kernel, shared);
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t blocks = p.batch * plan.chunks * p.ngroups * workspace.splits;
    return launch_backward_heads(
        q, launches, workspace,
        [&](const StatesLaunch& states) { return launch_states<T, Layout::kStates, Layout::kSteps>(p, states); },
        [&](const BackwardLaunch& launch) {
            return launch_kernel(kernel, blocks, Layout::kThreads, shared, p.run.stream, q, launch);
        });
}

// p.run's device runs code for 9.0a.
template <typename T, int kStates, int kSlices>
cudaError_t launch_backward_warpgroups(const MambaSsdBackward& q, const SsdPlan& plan, const SsdWorkspace& workspace) {
    const MambaSsd& p = q.forward;
    char* const memory = static_cast<char*>(p.workspace);
    BackwardLaunches launches = backward_launches<T>(q, plan, workspace);
    PrepareLaunch prepare = {};
    prepare.prepared = {memory + workspace.tiles, 3, memory + workspace.chunk_decays, kBackwardDecaysBytes};
    prepare.chunks = plan.chunks;
    prepare.states = kStates * kSlices;
    prepare.B_vectors = launches.chunks.B_vectors;
    prepare.C_vectors = launches.chunks.C_vectors;
    launches.states.prepared = launches.chunks.prepared = prepare.prepared;
    launches.chunks.dx_vectors =
        rows_aligned(q.dx, sizeof(T), 16, p.headdim, q.dx_batch_stride, q.dx_len_stride, q.dx_head_stride);

    constexpr int kShared = sizeof(BackwardSharedMemory<T, kStates, kSlices>);
    const auto kernel = ssd_backward_warpgroup_kernel<T, kStates, kSlices>;
    cudaError_t error = allow_shared(kernel, kShared);
    if (error == cudaSuccess) {
        error = launch_prepare(p, prepare);
    }
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t blocks = p.batch * plan.chunks * p.ngroups * workspace.splits * kSlices;
    return launch_backward_heads(
        q, launches, workspace,
        [&](const StatesLaunch& states) { return launch_states_warpgroups<T, kStates>(p, states, kSlices); },
        [&](const BackwardLaunch& launch) {
            return launch_programmatic_dependent(kernel, blocks, kWarpgroupBackwardThreads, kShared, p.run.stream, q, launch);
        });
}

template <typename T>
cudaError_t launch_ssd_backward(const MambaSsdBackward& q, const SsdPlan& plan, const SsdWorkspace& workspace) {
    return launch_row<T, kSsdBackwardKernels>(ssd_backward_table, plan.kernel, [&](auto number) {
        constexpr SsdKernel row = kSsdBackwardKernels[decltype(number)::kRow];
        if constexpr (row.on_warpgroups()) {
            static_assert(sizeof(BackwardSharedMemory<T, row.states / row.slices(), row.slices()>) <= row.shared_bytes,
                          "the table says so");
            return launch_backward_warpgroups<T, row.states / row.slices(), row.slices()>(q, plan, workspace);
        } else {
            using Layout = SsdLayout<row.states, row.steps, row.rows, row.threads / 32>;
            static_assert(backward_shared_bytes<T, Layout>(row.shared_ahead != 0) <= row.shared_bytes, "the table says so");
            static_assert(backward_shared_bytes<T, Layout>(false) <= (row.architecture < 80 ? kEveryShared : kAmpereShared),
                          "what all GPUs have that run it");
            return launch_backward_blocks<T, Layout>(q, plan, workspace);
        }
    });
}

}  // namespace mamba
