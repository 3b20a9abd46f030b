// Launches of the state walk, shared by both directions.
#pragma once

#include "ssd/cuda/states.cuh"
#include "ssd/cuda/states_warpgroup.cuh"
#include "ssd/launch.h"

namespace mamba {

// A walk over x (B, L, H, P) and B (B, L, G, N), whose strides are those of batch, length and head or group.
inline StateWalk state_walk(const MambaSsd& p, const void* x, const int64_t (&x_strides)[3], const void* B,
                            const int64_t (&B_strides)[3], int64_t element_size) {
    StateWalk walk = {};
    walk.x = x;
    walk.B = B;
    walk.x_batch_stride = x_strides[0];
    walk.x_len_stride = x_strides[1];
    walk.x_head_stride = x_strides[2];
    walk.B_batch_stride = B_strides[0];
    walk.B_len_stride = B_strides[1];
    walk.B_group_stride = B_strides[2];
    walk.x_vectors = rows_aligned(x, element_size, 16, p.headdim, x_strides[0], x_strides[1], x_strides[2]);
    walk.B_vectors = rows_aligned(B, element_size, 16, p.dstate, B_strides[0], B_strides[1], B_strides[2]);
    return walk;
}

// The state's own walk, from the first step on.
inline StateWalk forward_walk(const MambaSsd& p, int64_t element_size) {
    const int64_t x_strides[3] = {p.x_batch_stride, p.x_len_stride, p.x_head_stride};
    const int64_t B_strides[3] = {p.B_batch_stride, p.B_len_stride, p.B_group_stride};
    StateWalk walk = state_walk(p, p.x, x_strides, p.B, B_strides, element_size);
    walk.first = p.initial_state;
    return walk;
}

// With ends_only also what makes starts of the ends.
template <typename T, int kStates, int kSteps>
cudaError_t launch_states(const MambaSsd& p, const StatesLaunch& launch) {
    constexpr int kShared = sizeof(StatesTiles<T, kStates, kSteps>);
    static_assert(kShared <= kEveryShared, "every GPU has that");
    const auto kernel = ssd_states_kernel<T, kStates, kSteps>;
    cudaError_t error = allow_shared(kernel, kShared);
    if (error == cudaSuccess) {
        const int64_t row_tiles = ceil_div(p.headdim, kForwardRows);
        const int64_t blocks = row_tiles * launch.group_heads * p.ngroups * launch.walked() * p.batch * launch.directions;
        error = launch_kernel(kernel, blocks, kStatesThreads, kShared, p.run.stream, p, launch);
    }
    return error != cudaSuccess || launch.ends_only == 0 ? error : launch_carry(p, launch);
}

// The same, on warpgroups. slices: parts of the states. p.run's device runs code for 9.0a.
template <typename T, int kStates>
cudaError_t launch_states_warpgroups(const MambaSsd& p, const StatesLaunch& launch, int slices) {
    using Shared = StatesSharedMemory<T, kStates>;
    static_assert(2 * (sizeof(Shared) + 1024) <= 228 * 1024, "two blocks a multiprocessor");
    static_assert(3 * (Shared::kBytesWithoutH + 1024) <= 228 * 1024, "three that store no states");
    const auto kernel = ssd_states_warpgroup_kernel<T, kStates>;
    cudaError_t error = allow_shared(kernel, sizeof(Shared));
    if (error == cudaSuccess) {
        const bool stores = launch.ends_only == 0 && launch.walks[0].chunks != nullptr;
        const int64_t shared = stores ? static_cast<int64_t>(sizeof(Shared)) : Shared::kBytesWithoutH;
        const int64_t row_tiles = ceil_div(p.headdim, kForwardRows);
        const int64_t blocks =
            p.batch * launch.walked() * launch.directions * launch.group_heads * p.ngroups * row_tiles * slices;
        error = launch_programmatic_dependent(kernel, blocks, stores ? kStatesWarpgroupThreads : kForwardThreads,
                                              static_cast<size_t>(shared), p.run.stream, p, launch, slices);
    }
    return error != cudaSuccess || launch.ends_only == 0 ? error : launch_carry(p, launch);
}

}  // namespace mamba
