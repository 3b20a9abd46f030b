// The kernels of a Mamba-2 layer's decode step, of states of MAMBA_DTYPE.
#include "mamba2_step/cuda/launchers.cuh"

namespace mamba {
template Mamba2StepLaunchers Mamba2StepLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
