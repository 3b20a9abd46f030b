// The kernels of a Mamba layer's decode step for float32 activations.
#include "mamba_step/cuda/launchers.cuh"

namespace mamba {
template MambaStepLaunchers MambaStepLaunchers::of<float>();
}  // namespace mamba
