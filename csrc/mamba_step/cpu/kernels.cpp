// The parts of a Mamba layer's decode step that no other op has, compiled once per instruction set. No STL here: see
// common/cpu_vector.h.
#include "mamba_step/cpu/kernels.h"

#include "mamba_step/cpu/ends.h"

namespace mamba {
namespace MAMBA_ISA {

extern const MambaStepKernels mamba_step_kernels = {begin_step, end_step};

}  // namespace MAMBA_ISA
}  // namespace mamba
