// The scan's kernels as cuda.cu sees them.
#pragma once

#include "selective_scan/cuda/backward.cuh"
#include "selective_scan/cuda/forward.cuh"
#include "selective_scan/launch.h"

namespace mamba {

template <typename T>
ScanLaunchers ScanLaunchers::of() {
    ScanLaunchers launchers;
    launchers.forward = launch_scan_forward<T>;
    launchers.backward = launch_scan_backward<T>;
    launchers.forward_carry = launch_scan_forward_carry<T>;
    launchers.backward_carry = launch_scan_backward_carry<T>;
    return launchers;
}

}  // namespace mamba
