// The kernels of a Mamba layer's decode step for float16 activations.
#include "mamba_step/cuda/launchers.cuh"

namespace mamba {
template MambaStepLaunchers MambaStepLaunchers::of<__half>();
}  // namespace mamba
