// The kernels of what Mamba-3's scan takes: one each way, whose accesses are vectors where the tensors are aligned.
#pragma once

#include "common/kernel_table.h"
#include "mamba_kernels.h"

namespace mamba {

struct Mamba3InputsKernel : KernelRow {
    bool (*takes)(const MambaMamba3Inputs& p);
};

inline bool is_any_mamba3_inputs(const MambaMamba3Inputs&) {
    return true;
}

inline constexpr Mamba3InputsKernel kMamba3InputsForwardKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes
    {{"any", "", "8 rows, a warp each", kAllDtypes, 256, 0, 75}, is_any_mamba3_inputs},
};
inline constexpr Mamba3InputsKernel kMamba3InputsBackwardKernels[] = {
    {{"any", "", "32 rows, of q, of k or of the heads", kAllDtypes, 256, 0, 75}, is_any_mamba3_inputs},
};
extern KernelTable mamba3_inputs_forward_table, mamba3_inputs_backward_table;

}  // namespace mamba
