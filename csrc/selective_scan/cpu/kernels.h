// What selective_scan/cpu.cpp asks of cpu/kernels.cpp, once per instruction set.
#pragma once

#include "selective_scan/parts.h"

namespace mamba {

// The unit of work: some channels of one batch entry and one group of B and C, over the whole length.
struct ScanSegment {
    int64_t batch, group;
    int64_t channel, channels;  // first channel, and how many
    int64_t slot;               // backward: the part of dB and dC that is this segment's alone
};

struct ScanKernels {
    int64_t lanes;  // channels that one vector holds
    // Floats of scratch memory that a segment of `channels` channels needs.
    int64_t (*forward_scratch)(const MambaSelectiveScan& params, int64_t channels);
    int64_t (*backward_scratch)(const MambaSelectiveScan& params, int64_t channels);
    int64_t (*double_backward_scratch)(const MambaSelectiveScan& params, int64_t channels);
    void (*forward)(const MambaSelectiveScan& params, const ScanSegment& segment, float* scratch);
    void (*backward)(const ScanBackward& params, const ScanSegment& segment, float* scratch);
    void (*double_backward)(const MambaSelectiveScanDoubleBackward& params, const ScanSegment& segment, float* scratch);
    void (*add_parts)(const PartSum& sum);
    // What the whole length passes on, alone; with forward's scratch memory.
    void (*forward_carry)(const MambaSelectiveScan& params, const ScanSegment& segment, float* scratch);
    void (*backward_carry)(const ScanBackward& params, const ScanSegment& segment, float* scratch);
};

namespace generic {
extern const ScanKernels scan_kernels;
}
namespace avx2 {
extern const ScanKernels scan_kernels;
}
namespace avx512 {
extern const ScanKernels scan_kernels;
}

}  // namespace mamba
