// The kernels of a Mamba-2 layer's decode step for a float32 state.
#include "mamba2_step/cuda/launchers.cuh"

namespace mamba {
template Mamba2StepLaunchers Mamba2StepLaunchers::of<float>();
}  // namespace mamba
