// The kernels of a Mamba layer's decode step for bfloat16 activations.
#include "mamba_step/cuda/launchers.cuh"

namespace mamba {
template MambaStepLaunchers MambaStepLaunchers::of<__nv_bfloat16>();
}  // namespace mamba
