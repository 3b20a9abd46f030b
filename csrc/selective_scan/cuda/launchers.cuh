// The scan's kernels as cuda.cu sees them.
#pragma once

#include "selective_scan/cuda/backward.cuh"
#include "selective_scan/cuda/forward.cuh"
#include "selective_scan/cuda/forward_pipeline.cuh"
#include "selective_scan/launch.h"

namespace mamba {

template <bool kReverse>
template <typename T>
ScanLaunchersOf<kReverse> ScanLaunchersOf<kReverse>::of() {
    ScanLaunchersOf launchers;
    launchers.forward = launch_scan_forward<T, kReverse>;
    launchers.pipeline = launch_scan_pipeline<T, kReverse>;
    launchers.backward = launch_scan_backward<T, kReverse>;
    launchers.forward_carry = launch_scan_forward_carry<T, kReverse>;
    launchers.backward_carry = launch_scan_backward_carry<T, kReverse>;
    return launchers;
}

}  // namespace mamba
