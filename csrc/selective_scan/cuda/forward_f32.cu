#include "selective_scan/cuda/forward.cuh"
#include "selective_scan/cuda/forward_pipeline.cuh"

namespace mamba {
template cudaError_t launch_selective_scan_forward<float>(const MambaSelectiveScan& p, bool aligned, bool wide);
template cudaError_t launch_selective_scan_pipeline<float>(const MambaSelectiveScan& p, int channels);

int forward_channels(int64_t dstate, bool wide) {
    if (dstate <= Forward8::kSlice) {
        return Forward8::kChannels;
    }
    if (dstate <= Forward16::kSlice) {
        return wide ? Forward16Wide::kChannels : Forward16::kChannels;
    }
    return dstate <= Forward32::kSlice ? Forward32::kChannels : Forward64::kChannels;
}
}  // namespace mamba
