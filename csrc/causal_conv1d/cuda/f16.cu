// The causal convolution's kernels for float16.
#include "causal_conv1d/cuda/launchers.cuh"

namespace mamba {
template ConvLaunchers ConvLaunchers::of<__half>();
}  // namespace mamba
