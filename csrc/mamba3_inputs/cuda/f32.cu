// What Mamba-3's scan takes, for float32.
#include "mamba3_inputs/cuda/launchers.cuh"

namespace mamba {
template Mamba3InputsLaunchers Mamba3InputsLaunchers::of<float>();
}  // namespace mamba
