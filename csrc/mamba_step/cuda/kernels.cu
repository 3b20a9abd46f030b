// The kernels of a Mamba layer's decode step, of activations of MAMBA_DTYPE.
#include "mamba_step/cuda/launchers.cuh"

namespace mamba {
template MambaStepLaunchers MambaStepLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
