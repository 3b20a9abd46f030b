// The decode step's kernels for a float16 state.
#include "state_update/cuda/launch.cuh"

namespace mamba {
template StateUpdateLaunchers StateUpdateLaunchers::of<__half>();
}  // namespace mamba
