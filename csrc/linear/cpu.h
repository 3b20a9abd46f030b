// The linear layer as other ops of mamba_cpu run it.
#pragma once

#include "common/cpu_runtime.h"
#include "linear/cpu/kernels.h"

namespace mamba {

// False without memory for x as floats.
bool run_projection(const MambaRun& run, Isa isa, const Projection& projection);

}  // namespace mamba
