// The scan's kernels, of MAMBA_DTYPE.
#include "selective_scan/cuda/launchers.cuh"

namespace mamba {
template ScanLaunchers ScanLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
