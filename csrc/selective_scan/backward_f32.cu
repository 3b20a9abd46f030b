#include "selective_scan/backward.cuh"

namespace mamba {
template cudaError_t launch_selective_scan_backward<float>(const MambaSelectiveScanBackward& q, bool aligned);

int backward_channels(int64_t dstate) {
    if (dstate <= Backward8::kSlice) {
        return Backward8::kChannels;
    }
    return dstate <= Backward16::kSlice ? Backward16::kChannels : Backward32::kChannels;
}
}  // namespace mamba
