#include "selective_scan/forward.cuh"

namespace mamba {
template cudaError_t launch_selective_scan_forward<float>(const MambaSelectiveScan& p, bool aligned);

int forward_channels(int64_t dstate) {
    if (dstate <= Forward8::kSlice) {
        return Forward8::kChannels;
    }
    if (dstate <= Forward16::kSlice) {
        return Forward16::kChannels;
    }
    return dstate <= Forward32::kSlice ? Forward32::kChannels : Forward64::kChannels;
}
}  // namespace mamba
