// The forward scan's kernels, of MAMBA_DTYPE.
#include "selective_scan/cuda/forward.cuh"

namespace mamba {
template ScanForwardLaunchers ScanForwardLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
