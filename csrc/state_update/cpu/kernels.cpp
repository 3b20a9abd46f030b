// The decode step, compiled once per instruction set. No STL here: see common/cpu_vector.h.
#include "state_update/cpu/kernels.h"

#include "state_update/cpu/update.h"

namespace mamba {
namespace MAMBA_ISA {

extern const StateUpdateKernels state_update_kernels = {kLanes, update_blocks};

}  // namespace MAMBA_ISA
}  // namespace mamba
