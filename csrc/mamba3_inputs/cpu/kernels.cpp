// What Mamba-3's scan takes, compiled once per instruction set. No STL here: see common/cpu_vector.h.
#include "mamba3_inputs/cpu/kernels.h"

#include "mamba3_inputs/cpu/rows.h"

namespace mamba {
namespace MAMBA_ISA {

extern const Mamba3InputsKernels mamba3_inputs_kernels = {mamba3_inputs_forward, mamba3_inputs_backward,
                                                          mamba3_inputs_add_parts};

}  // namespace MAMBA_ISA
}  // namespace mamba
