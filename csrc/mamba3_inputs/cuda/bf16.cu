// What Mamba-3's scan takes, for bfloat16.
#include "mamba3_inputs/cuda/launchers.cuh"

namespace mamba {
template Mamba3InputsLaunchers Mamba3InputsLaunchers::of<__nv_bfloat16>();
}  // namespace mamba
