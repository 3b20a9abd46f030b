// The decode step's kernels, of states of MAMBA_DTYPE.
#include "state_update/cuda/launch.cuh"

namespace mamba {
template StateUpdateLaunchers StateUpdateLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
