// The norm's and SwiGLU's kernels for bfloat16.
#include "norm/cuda/backward.cuh"
#include "norm/cuda/forward.cuh"
#include "norm/cuda/swiglu.cuh"

namespace mamba {

template cudaError_t launch_norm_forward<__nv_bfloat16>(const MambaNorm& params, const NormLayout& layout);
template cudaError_t launch_norm_backward<__nv_bfloat16>(const MambaNormBackward& params, const NormBackwardPlan& plan);
template cudaError_t launch_swiglu<__nv_bfloat16>(const MambaSwiglu& params, bool backward);

}  // namespace mamba
