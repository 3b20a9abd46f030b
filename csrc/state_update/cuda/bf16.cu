// The decode step's kernels for a bfloat16 state.
#include "state_update/cuda/kernel.cuh"

namespace mamba {
template StateUpdateLaunchers StateUpdateLaunchers::of<__nv_bfloat16>();
}  // namespace mamba
