// What cuda.cu runs; cuda/kernels.cu compiles it once for each dtype of q (step: of the state).
#pragma once

#include "mamba3/backward_plan.h"
#include "mamba3/forward_plan.h"

namespace mamba {

struct Mamba3BackwardLaunch;

struct Mamba3Launchers {
    cudaError_t (*forward)(const MambaMamba3& p, const Mamba3Forward& plan);
    cudaError_t (*backward)(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch);  // of some heads
    cudaError_t (*step)(const MambaMamba3Step& q, int kernel, const DeviceLimits& device);

    template <typename T>
    static Mamba3Launchers of();
};

// The same for all dtypes, in cuda.cu. ends, from what the pass before has left of each segment:
cudaError_t launch_mamba3_carry_states(const MambaMamba3& p, int64_t segments, float* ends, const float* decays);
// The output, from rows of y that wait.
cudaError_t launch_mamba3_finish_rows(const MambaMamba3& p, const float* rows);

}  // namespace mamba
