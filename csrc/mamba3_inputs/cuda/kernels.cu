// What Mamba-3's scan takes, of MAMBA_DTYPE.
#include "mamba3_inputs/cuda/launchers.cuh"

namespace mamba {
template Mamba3InputsLaunchers Mamba3InputsLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
