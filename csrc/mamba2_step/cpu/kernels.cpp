// The parts of a Mamba-2 layer's decode step that no other op has, compiled once per instruction set. No STL here: see
// common/cpu_vector.h.
#include "mamba2_step/cpu/kernels.h"

#include "mamba2_step/cpu/ends.h"

namespace mamba {
namespace MAMBA_ISA {

extern const Mamba2StepKernels mamba2_step_kernels = {begin_step, end_step};

}  // namespace MAMBA_ISA
}  // namespace mamba
