// The decode step's kernels for a bfloat16 state.
#include "state_update/cuda/launch.cuh"

namespace mamba {
template StateUpdateLaunchers StateUpdateLaunchers::of<__nv_bfloat16>();
}  // namespace mamba
