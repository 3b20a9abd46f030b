// The causal convolution's kernels, of MAMBA_DTYPE.
#include "causal_conv1d/cuda/launchers.cuh"

namespace mamba {
template ConvLaunchers ConvLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
