// What cuda.cu runs; cuda/f32.cu, f16.cu and bf16.cu compile it, one dtype of x each.
#pragma once

#include "ssd/plan.h"

namespace mamba {

struct SsdLaunchers {
    cudaError_t (*forward)(const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace);
    cudaError_t (*backward)(const MambaSsdBackward& q, const SsdPlan& plan, const SsdWorkspace& workspace);

    template <typename T>
    static SsdLaunchers of();
};

}  // namespace mamba
