// Launches of the forward scan: the segments' ends, what heads share, and the results.
#pragma once

#include "ssd/cuda/forward.cuh"
#include "ssd/cuda/launch_states.cuh"
#ifdef MAMBA_WARPGROUPS
#include "ssd/cuda/forward_warpgroup.cuh"
#endif

namespace mamba {

template <typename T, class Layout>
cudaError_t launch_products(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace) {
    if (plan.slots == 0) {
        return cudaSuccess;
    }
    char* const memory = static_cast<char*>(p.workspace);
    const int64_t size = sizeof(T);
    ProductsLaunch launch = {};
    launch.products = reinterpret_cast<float*>(memory + workspace.products);
    launch.slots = plan.slots;
    launch.B_vectors = rows_aligned(p.B, size, 16, p.dstate, p.B_batch_stride, p.B_len_stride, p.B_group_stride);
    launch.C_vectors = rows_aligned(p.C, size, 16, p.dstate, p.C_batch_stride, p.C_len_stride, p.C_group_stride);
    int64_t blocks = plan.slots * p.ngroups;
    if (plan.warpgroups) {
        launch.tiles = memory + workspace.tiles;
        launch.decays = memory + workspace.chunk_decays;
        blocks += decay_blocks(p, plan.slots);
    }
    constexpr int kShared = products_shared_bytes<T, Layout>();
    static_assert(kShared <= (Layout::kSteps * Layout::kStates > 64 * 128 ? kMiddleShared : kEveryShared),
                  "every GPU that runs this has that");
    const auto kernel = ssd_products_kernel<T, Layout>;
    const cudaError_t error = allow_shared(kernel, kShared);
    if (error != cudaSuccess) {
        return error;
    }
    return launch_kernel(kernel, static_cast<unsigned>(blocks), kProductsThreads, kShared, p.run.stream, p, launch);
}

template <typename T, class Layout>
cudaError_t launch_forward_layout(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace) {
    const int64_t size = sizeof(T);
    StateWalk walk = forward_walk(p, size);
    char* const memory = static_cast<char*>(p.workspace);
    float* const ends = reinterpret_cast<float*>(memory + workspace.ends);
    float* const decays = reinterpret_cast<float*>(memory + workspace.decays);
    if (plan.segments > 1 || p.out == nullptr) {
        StatesLaunch states = {};
        walk.last = p.final_state;
        walk.ends = ends;
        walk.decays = decays;
        states.walks[0] = walk;
        states.group_heads = p.nheads / p.ngroups;
        states.segments = plan.segments;
        states.chunks_a_segment = plan.chunks_a_segment;
        if (plan.segments > 1) {
            states.ends_only = 1;
            const cudaError_t error = launch_states<T, Layout>(p, states, 1);
            if (error != cudaSuccess) {
                return error;
            }
            states.ends_only = 0;
        }
        if (p.out == nullptr) {
            return launch_states<T, Layout>(p, states, 1);
        }
    }
    cudaError_t error = launch_products<T, Layout>(p, plan, workspace);
    if (error != cudaSuccess) {
        return error;
    }
    ForwardLaunch launch = {};
    launch.products = reinterpret_cast<float*>(memory + workspace.products);
    launch.segments = plan.segments;
    launch.chunks_a_segment = plan.chunks_a_segment;
    launch.ends = ends;
    launch.x_vectors = walk.x_vectors;
    launch.B_vectors = walk.B_vectors;
    launch.C_vectors = rows_aligned(p.C, size, 16, p.dstate, p.C_batch_stride, p.C_len_stride, p.C_group_stride);
    launch.out_vectors = rows_aligned(p.out, size, 16, p.headdim, p.out_batch_stride, p.out_len_stride, p.out_head_stride);
    constexpr int kShared = forward_shared_bytes<T, Layout>();
    static_assert(kShared <= kEveryShared, "every GPU has that");
    const auto kernel = ssd_forward_kernel<T, Layout>;
    error = allow_shared(kernel, kShared);
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t row_tiles = ceil_div(p.headdim, kForwardRows);
    const int64_t blocks = row_tiles * p.nheads * plan.segments * p.batch;
    return launch_kernel(kernel, static_cast<unsigned>(blocks), kForwardThreads, kShared, p.run.stream, p, launch);
}

#ifdef MAMBA_WARPGROUPS
template <typename T, class Layout>
cudaError_t launch_forward_warpgroups(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace) {
    constexpr int kStates = Layout::kStates;
    cudaError_t error = launch_products<T, Layout>(p, plan, workspace);
    if (error != cudaSuccess) {
        return error;
    }
    char* const memory = static_cast<char*>(p.workspace);
    ForwardLaunch launch = {};
    launch.products = reinterpret_cast<float*>(memory + workspace.products);
    launch.tiles = memory + workspace.tiles;
    launch.chunk_decays = memory + workspace.chunk_decays;
    launch.ends = reinterpret_cast<float*>(memory + workspace.ends);
    launch.decays = reinterpret_cast<float*>(memory + workspace.decays);
    if (p.out == nullptr) {  // the state is where the first pass finds the only segment's end
        launch.ends = p.final_state;
        return launch_warpgroup<T, kStates, false>(p, launch, plan.segments, plan.chunks_a_segment);
    }
    if (plan.segments > 1) {
        const int64_t ends = (plan.segments - 1) * kEndsASegment;
        error = launch_warpgroup<T, kStates, false>(p, launch, ends, plan.chunks_a_segment / kEndsASegment);
        if (error == cudaSuccess) {
            StatesLaunch states = {};
            states.walks[0].ends = launch.ends;
            states.walks[0].decays = launch.decays;
            states.group_heads = p.nheads / p.ngroups;
            states.segments = ends + 1;
            error = launch_carry(p, states, 1);
        }
        if (error != cudaSuccess) {
            return error;
        }
    }
    return launch_warpgroup<T, kStates, true>(p, launch, plan.segments, plan.chunks_a_segment);
}
#endif

template <typename T>
cudaError_t launch_ssd_forward(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace) {
    using Layouts = SsdLayouts<T>;
#ifdef MAMBA_WARPGROUPS
    if constexpr (sizeof(T) == 2) {
        if (plan.warpgroups) {
            return plan.layout == kSsdSmall   ? launch_forward_warpgroups<T, typename Layouts::Small>(p, plan, workspace)
                   : plan.layout == kSsdLarge ? launch_forward_warpgroups<T, SsdWide256>(p, plan, workspace)
                                              : launch_forward_warpgroups<T, typename Layouts::Middle>(p, plan, workspace);
        }
    }
#endif
    switch (plan.layout) {
        case kSsdSmall:
            return launch_forward_layout<T, typename Layouts::Small>(p, plan, workspace);
        case kSsdMiddle:
        case kSsdMiddleAhead:
        case kSsdLittle:
            return launch_forward_layout<T, typename Layouts::Middle>(p, plan, workspace);
        default:
            return launch_forward_layout<T, typename Layouts::Large>(p, plan, workspace);
    }
}

}  // namespace mamba
