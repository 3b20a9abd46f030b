// The causal convolution's kernels for float32.
#include "causal_conv1d/cuda/launchers.cuh"

namespace mamba {
template ConvLaunchers ConvLaunchers::of<float>();
}  // namespace mamba
