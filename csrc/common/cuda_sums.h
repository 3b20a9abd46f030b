// The sums of part_sums.h on CUDA.
#pragma once

#include <cuda_runtime.h>

#include "common/part_sums.h"

namespace mamba {

// The kernel ahead of it in the stream writes the parts.
cudaError_t launch_part_sums(PartSums sums, void* stream);

}  // namespace mamba
