// The kernels of Mamba-2's scan, compiled once per instruction set. No STL here: see common/cpu_vector.h.
#include "ssd/cpu/kernels.h"

#include "ssd/cpu/backward_chunk.h"
#include "ssd/cpu/forward.h"

namespace mamba {
namespace MAMBA_ISA {

extern const SsdKernels ssd_kernels = {kLanes,          forward_scratch,    backward_scratch, forward_segment,
                                       backward_states, backward_gradients, backward_chunk};

}  // namespace MAMBA_ISA
}  // namespace mamba
