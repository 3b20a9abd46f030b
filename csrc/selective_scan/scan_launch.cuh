// The typed launchers that forward_*.cu and backward_*.cu instantiate and cuda.cu chooses from.
#pragma once

#include <cuda_runtime.h>

#include "mamba_kernels.h"

namespace mamba {

// aligned_rows: u, delta, z, out (and dout, du, ddelta, dz) allow 16-byte accesses. aligned_BC: variable B and C do.
template <typename T>
cudaError_t launch_selective_scan_forward(const MambaSelectiveScan& p, bool aligned_rows, bool aligned_BC);
template <typename T>
cudaError_t launch_selective_scan_backward(const MambaSelectiveScanBackward& q, bool aligned_rows, bool aligned_BC);

// Channels that one block of the backward scan takes.
int backward_channels(int64_t dstate);

}  // namespace mamba
