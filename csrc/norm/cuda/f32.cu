// The norm's and SwiGLU's kernels for float32.
#include "norm/cuda/backward.cuh"
#include "norm/cuda/forward.cuh"
#include "norm/cuda/swiglu.cuh"

namespace mamba {

template cudaError_t launch_norm_forward<float>(const MambaNorm& params, const NormLayout& layout);
template cudaError_t launch_norm_backward<float>(const MambaNormBackward& params, const NormBackwardPlan& plan);
template cudaError_t launch_swiglu<float>(const MambaSwiglu& params, bool backward);

}  // namespace mamba
