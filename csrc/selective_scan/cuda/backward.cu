// The backward scan's kernels, of MAMBA_DTYPE.
#include "selective_scan/cuda/backward.cuh"

namespace mamba {
template ScanBackwardLaunchers ScanBackwardLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
