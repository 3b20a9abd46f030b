// The typed launchers that cuda/f32.cu, f16.cu and bf16.cu instantiate and cuda.cu chooses from.
#pragma once

#include <cuda_runtime.h>

#include "mamba_kernels.h"

namespace mamba {

// aligned: every row of every (B, D, L) tensor and of variable B and C starts at a multiple of 16 bytes, and L is a multiple
// of 8.
template <typename T>
cudaError_t launch_selective_scan_forward(const MambaSelectiveScan& p, bool aligned, bool wide);
// channels: of kPipelineChannels. For 9 to 16 states, B and C that vary, aligned rows, and no seq_idx.
template <typename T>
cudaError_t launch_selective_scan_pipeline(const MambaSelectiveScan& p, int channels);
template <typename T>
cudaError_t launch_selective_scan_backward(const MambaSelectiveScanBackward& q, bool aligned, bool small);

// Channels that a block of forward_pipeline.cuh may take, and the bytes of shared memory that it needs then: all fit 8.0, 9.0
// and 10.x, 16 channels fit every GPU since.
constexpr int kPipelineChannels[] = {12, 16, 32};
constexpr int pipeline_shared(int channels, int64_t element_size) {
    if (channels == 12) {
        return element_size == 4 ? 152320 : 108800;
    }
    if (channels == 16) {
        return element_size == 4 ? 96256 : 71168;
    }
    return element_size == 4 ? 166912 : 129536;
}

// Bytes of shared memory a block that the backward scan needs at most, unless it is told to be small.
constexpr int kBackwardShared = 99072;
// What the smallest GPUs have (compute capability 7.5).
constexpr int kSmallestShared = 65536;

// Channels that one block takes.
int forward_channels(int64_t dstate, bool wide);
int backward_channels(int64_t dstate, bool small);

}  // namespace mamba
