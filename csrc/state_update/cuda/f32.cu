// The decode step's kernels for a float32 state.
#include "state_update/cuda/launch.cuh"

namespace mamba {
template StateUpdateLaunchers StateUpdateLaunchers::of<float>();
}  // namespace mamba
