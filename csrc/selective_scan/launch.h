// What cuda.cu runs; cuda/f32.cu, f16.cu and bf16.cu compile it, one dtype of u each, and *_reverse.cu with reverse.
#pragma once

#include <cuda_runtime.h>

#include "selective_scan/layouts.h"
#include "selective_scan/parts.h"

namespace mamba {

// aligned: see inputs_aligned and gradients_aligned in plan.h.
struct ScanLaunchers {
    cudaError_t (*forward)(const MambaSelectiveScan& p, bool aligned, BlockChannels channels);
    // channels: of kPipelineChannels. For up to 16 states, B and C that vary, aligned rows, and no seq_idx.
    cudaError_t (*pipeline)(const MambaSelectiveScan& p, int channels);
    // Parts of gradients remain to be added up.
    cudaError_t (*backward)(const ScanBackward& q, bool aligned, BackwardKind kind);
    // What all segments pass on, alone.
    cudaError_t (*forward_carry)(const MambaSelectiveScan& p, bool aligned);
    cudaError_t (*backward_carry)(const ScanBackward& q, bool aligned, BackwardKind kind);
};

template <bool kReverse>
struct ScanLaunchersOf : ScanLaunchers {
    template <typename T>
    static ScanLaunchersOf of();
};

}  // namespace mamba
