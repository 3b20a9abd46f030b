// Launches of the state walk, shared by both directions.
#pragma once

#include "ssd/cuda/states.cuh"
#include "ssd/plan.h"

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

// Makes starts of the segments' ends, where a segment has more than one before it. directions: 1 for the forward walk alone, 2
// for both.
inline cudaError_t launch_carry(const MambaSsd& p, const StatesLaunch& launch, int directions) {
    if (launch.segments <= 2) {
        return cudaSuccess;
    }
    const int64_t state_size = p.headdim * p.dstate;
    const int64_t vector = state_size % 4 == 0 ? 4 : 1;
    const int64_t state_blocks = ceil_div(state_size / vector, kCarryThreads);
    const int64_t blocks = state_blocks * launch.group_heads * p.ngroups * p.batch * directions;
    auto kernel = ssd_carry_kernel<4>;
    if (vector == 1) {
        kernel = ssd_carry_kernel<1>;
    }
    return launch_programmatic_dependent(kernel, static_cast<unsigned>(blocks), kCarryThreads, 0, p.run.stream, p, launch);
}

// With ends_only also what makes starts of the ends. directions: as above.
template <typename T, class Layout>
cudaError_t launch_states(const MambaSsd& p, const StatesLaunch& launch, int directions) {
    constexpr int kShared = states_shared_bytes<T, Layout>();
    static_assert(kShared <= kEveryShared, "every GPU has that");
    const auto kernel = ssd_states_kernel<T, Layout>;
    const cudaError_t error = allow_shared(kernel, kShared);
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t row_tiles = ceil_div(p.headdim, kForwardRows);
    const int64_t walked = launch.ends_only ? launch.segments - 1 : launch.segments;
    const int64_t blocks = row_tiles * launch.group_heads * p.ngroups * walked * p.batch * directions;
    const cudaError_t launched =
        launch_kernel(kernel, static_cast<unsigned>(blocks), kStatesThreads, kShared, p.run.stream, p, launch);
    return launched != cudaSuccess || !launch.ends_only ? launched : launch_carry(p, launch, directions);
}

}  // namespace mamba
