// The cross entropy's kernel, of MAMBA_DTYPE.
#include "cross_entropy/cuda/kernel.cuh"

namespace mamba {
template CrossEntropyLaunchers CrossEntropyLaunchers::of<MAMBA_DTYPE>();
}  // namespace mamba
