// Launches of the forward scan: the segments' ends, what heads share, and the results.
#pragma once

#include "common/kernel_launch.cuh"
#include "ssd/cuda/forward.cuh"
#include "ssd/cuda/forward_slices.cuh"
#include "ssd/cuda/forward_warpgroup.cuh"
#include "ssd/cuda/launch_states.cuh"

namespace mamba {

// states: see ProductsLaunch. tiles, decays: in the workspace, for the kernels on warpgroups; or NULL.
template <typename T, int kSteps>
cudaError_t launch_products(const MambaSsd& p, const SsdPlan& plan, float* products, const PreparedChunks& prepared,
                            int states) {
    if (plan.slots == 0) {
        return cudaSuccess;
    }
    const int64_t size = sizeof(T);
    ProductsLaunch launch = {};
    launch.products = products;
    launch.prepared = prepared;
    launch.slots = plan.slots;
    launch.states = states;
    launch.B_vectors = rows_aligned(p.B, size, 16, p.dstate, p.B_batch_stride, p.B_len_stride, p.B_group_stride);
    launch.C_vectors = rows_aligned(p.C, size, 16, p.dstate, p.C_batch_stride, p.C_len_stride, p.C_group_stride);
    const int64_t blocks = plan.slots * p.ngroups + (prepared.decays != nullptr ? decay_blocks(p, plan.slots) : 0);
    const int shared = products_shared_bytes<T, kSteps>(states);
    const auto kernel = ssd_products_kernel<T, kSteps>;
    const cudaError_t error = allow_shared(kernel, shared);
    if (error != cudaSuccess) {
        return error;
    }
    return launch_kernel(kernel, blocks, kProductsThreads, shared, p.run.stream, p, launch);
}

// The walk of the state alone. p.out NULL: its last state is the result.
inline StatesLaunch forward_states(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace, int64_t size) {
    char* const memory = static_cast<char*>(p.workspace);
    StatesLaunch states = {};
    states.walks[0] = forward_walk(p, size);
    states.walks[0].last = p.final_state;
    states.walks[0].ends = reinterpret_cast<float*>(memory + workspace.ends);
    states.walks[0].decays = reinterpret_cast<float*>(memory + workspace.decays);
    states.directions = 1;
    states.group_heads = p.nheads / p.ngroups;
    states.segments = plan.segments;
    states.chunks_a_segment = plan.chunks_a_segment;
    states.end_size = plan.end_size;
    return states;
}

template <typename T, int kStates, int kSteps>
cudaError_t launch_forward_blocks(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace) {
    StatesLaunch states = forward_states(p, plan, workspace, sizeof(T));
    if (plan.segments > 1) {
        states.ends_only = 1;
        const cudaError_t error = launch_states<T, kStates, kSteps>(p, states);
        if (error != cudaSuccess) {
            return error;
        }
        states.ends_only = 0;
    }
    if (p.out == nullptr) {
        return launch_states<T, kStates, kSteps>(p, states);
    }
    float* const products = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + workspace.products);
    const int64_t multiplied = round_up(p.dstate, 32);
    cudaError_t error = launch_products<T, kSteps>(p, plan, products, PreparedChunks{}, static_cast<int>(multiplied));
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t size = sizeof(T);
    ForwardLaunch launch = {};
    launch.products = products;
    launch.segments = plan.segments;
    launch.chunks_a_segment = plan.chunks_a_segment;
    launch.end_size = plan.end_size;
    launch.ends = states.walks[0].ends;
    launch.x_vectors = states.walks[0].x_vectors;
    launch.B_vectors = states.walks[0].B_vectors;
    launch.C_vectors = rows_aligned(p.C, size, 16, p.dstate, p.C_batch_stride, p.C_len_stride, p.C_group_stride);
    launch.out_vectors = rows_aligned(p.out, size, 8, p.headdim, p.out_batch_stride, p.out_len_stride, p.out_head_stride);
    constexpr int kShared = sizeof(ForwardTiles<T, kStates, kSteps>);
    static_assert(kShared <= kEveryShared, "every GPU has that");
    const auto kernel = ssd_forward_kernel<T, kStates, kSteps>;
    error = allow_shared(kernel, kShared);
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t blocks = ceil_div(p.headdim, kForwardRows) * p.nheads * plan.segments * p.batch;
    return launch_kernel(kernel, blocks, kForwardThreads, kShared, p.run.stream, p, launch);
}

// The shared memory and the kernel for so many states, which are cut into so many slices.
template <typename T, int kStates, int kSlices>
struct ForwardOnWarpgroups;
template <typename T, int kStates>
struct ForwardOnWarpgroups<T, kStates, 1> {
    using Shared = ForwardSharedMemory<T, kStates>;
    static auto kernel() { return ssd_warpgroup_kernel<T, kStates>; }
    static_assert(sizeof(Shared) <= 227 * 1024 / Shared::kBlocks - 1024, "what a multiprocessor has room for");
};
template <typename T, int kStates>
struct ForwardOnWarpgroups<T, kStates, 2> {
    using Shared = SlicesSharedMemory<T, kStates>;
    static auto kernel() { return ssd_slices_kernel<T, kStates>; }
    static_assert(Shared::kSlices == 2, "the kernel reads as many ends");
};

// p.run's device runs code for 9.0a. kStates: 64, 128 or 256. kSlices: what they are cut into.
template <typename T, int kStates, int kSlices>
cudaError_t launch_forward_warpgroups(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace) {
    using Shared = typename ForwardOnWarpgroups<T, kStates, kSlices>::Shared;
    char* const memory = static_cast<char*>(p.workspace);
    const PreparedChunks prepared = {memory + workspace.tiles, 2, memory + workspace.chunk_decays, kChunkDecaysBytes};
    float* const products = reinterpret_cast<float*>(memory + workspace.products);
    cudaError_t error = launch_products<T, kWarpgroupSteps>(p, plan, products, prepared, kStates);
    if (error != cudaSuccess) {
        return error;
    }
    StatesLaunch states = forward_states(p, plan, workspace, sizeof(T));
    states.prepared = prepared;
    if (plan.segments > 1) {
        StatesLaunch ends = states;
        ends.ends_only = 1;
        constexpr int kEnds = ends_a_segment(kSlices);
        ends.segments = (plan.segments - 1) * kEnds + 1;
        ends.chunks_a_segment = plan.chunks_a_segment / kEnds;
        error = launch_states_warpgroups<T, kStates / kSlices>(p, ends, kSlices);
        if (error != cudaSuccess) {
            return error;
        }
    }
    if (p.out == nullptr) {
        return launch_states_warpgroups<T, kStates / kSlices>(p, states, kSlices);
    }
    ForwardLaunch launch = {};
    launch.segments = plan.segments;
    launch.chunks_a_segment = plan.chunks_a_segment;
    launch.end_size = plan.end_size;
    launch.ends = states.walks[0].ends;
    launch.products = products;
    launch.prepared = prepared;
    const auto kernel = ForwardOnWarpgroups<T, kStates, kSlices>::kernel();
    error = allow_shared(kernel, sizeof(Shared));
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t blocks = ceil_div(p.headdim, kForwardRows) * p.nheads * plan.segments * p.batch;
    return launch_programmatic_dependent(kernel, blocks, Shared::kThreads, sizeof(Shared), p.run.stream, p, launch);
}

template <typename T>
cudaError_t launch_ssd_forward(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace) {
    return launch_row<T, kSsdForwardKernels>(ssd_forward_table, plan.kernel, [&](auto number) {
        constexpr SsdKernel row = kSsdForwardKernels[decltype(number)::kRow];
        if constexpr (row.on_warpgroups()) {
            static_assert(sizeof(typename ForwardOnWarpgroups<T, row.states, row.slices()>::Shared) == row.shared_bytes,
                          "the table says so");
            return launch_forward_warpgroups<T, row.states, row.slices()>(p, plan, workspace);
        } else {
            static_assert(sizeof(ForwardTiles<T, row.states, row.steps>) <= row.shared_bytes, "the table says so");
            return launch_forward_blocks<T, row.states, row.steps>(p, plan, workspace);
        }
    });
}

}  // namespace mamba
