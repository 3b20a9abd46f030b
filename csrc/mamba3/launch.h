// What cuda.cu runs; cuda/f32.cu, f16.cu and bf16.cu compile it, one dtype of q (step: of the state) each.
#pragma once

#include "mamba3/backward_plan.h"

namespace mamba {

struct Mamba3BackwardLaunch;

struct Mamba3Launchers {
    cudaError_t (*forward)(const MambaMamba3& p, const Mamba3Forward& plan);
    cudaError_t (*backward)(const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch);  // of some heads
    cudaError_t (*step)(const MambaMamba3Step& q, const DeviceLimits& limits);

    template <typename T>
    static Mamba3Launchers of();
};

}  // namespace mamba
