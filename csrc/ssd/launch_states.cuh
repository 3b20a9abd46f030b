// Launches of the state walk, shared by both directions.
#pragma once

#include "ssd/launch.cuh"
#include "ssd/states.cuh"

namespace mamba {

// With ends_only also what makes starts of the ends. directions: 1 for the forward walk alone, 2 for both.
template <typename T, class Layout>
cudaError_t launch_states(const MambaSsd& p, const StatesLaunch& launch, int directions) {
    constexpr int kShared = states_shared_bytes<T, Layout>();
    static_assert(kShared <= kEveryShared, "every GPU has that");
    const auto kernel = ssd_states_kernel<T, Layout>;
    const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), kShared);
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t row_tiles = (p.headdim + kForwardRows - 1) / kForwardRows;
    const int64_t walked = launch.ends_only ? launch.segments - 1 : launch.segments;
    const int64_t blocks = row_tiles * launch.group_heads * p.ngroups * walked * p.batch * directions;
    kernel<<<static_cast<unsigned int>(blocks), kStatesThreads, kShared, static_cast<cudaStream_t>(p.run.stream)>>>(p, launch);
    if (launch.ends_only && launch.segments > 2) {
        const int64_t state_blocks = (p.headdim * p.dstate + kCarryThreads - 1) / kCarryThreads;
        const int64_t carry_blocks = state_blocks * launch.group_heads * p.ngroups * p.batch * directions;
        ssd_carry_kernel<<<static_cast<unsigned int>(carry_blocks), kCarryThreads, 0,
                           static_cast<cudaStream_t>(p.run.stream)>>>(p, launch);
    }
    return cudaGetLastError();
}

}  // namespace mamba
