#include "selective_scan/cuda/backward.cuh"

namespace mamba {
template cudaError_t launch_selective_scan_backward<float>(const MambaSelectiveScanBackward& q, bool aligned, bool small);

int backward_channels(int64_t dstate, bool small) {
    if (dstate <= Backward8::kSlice && !small) {
        return Backward8::kChannels;
    }
    if (dstate <= Backward16::kSlice) {
        return Backward16::kChannels;
    }
    return small ? Backward32Small::kChannels : Backward32::kChannels;
}
}  // namespace mamba
