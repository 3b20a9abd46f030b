// The causal convolution's kernels for bfloat16.
#include "causal_conv1d/cuda/backward.cuh"
#include "causal_conv1d/cuda/forward.cuh"
#include "causal_conv1d/cuda/update.cuh"

namespace mamba {

template cudaError_t causal_conv1d_forward_launch<__nv_bfloat16>(const MambaCausalConv1d& params);
template cudaError_t causal_conv1d_backward_launch<__nv_bfloat16>(const MambaCausalConv1dBackward& params);
template cudaError_t causal_conv1d_update_launch<__nv_bfloat16>(const MambaCausalConv1dUpdate& params);

}  // namespace mamba
