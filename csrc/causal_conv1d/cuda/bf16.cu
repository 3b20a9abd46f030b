// The causal convolution's kernels for bfloat16.
#include "causal_conv1d/cuda/launchers.cuh"

namespace mamba {
template ConvLaunchers ConvLaunchers::of<__nv_bfloat16>();
}  // namespace mamba
