// The kernels of Mamba-3's scan, compiled once per instruction set. No STL here: see common/cpu_vector.h.
#include "mamba3/cpu/kernels.h"

#include "mamba3/cpu/backward_chunk.h"
#include "mamba3/cpu/step.h"

namespace mamba {
namespace MAMBA_ISA {

extern const Mamba3Kernels mamba3_kernels = {mamba3::forward_scratch, mamba3::backward_scratch, mamba3::sum_floats,
                                             mamba3::step_scratch,    mamba3::forward,          mamba3::backward,
                                             mamba3::finish,          mamba3::finish_head,      mamba3::step_heads};

}  // namespace MAMBA_ISA
}  // namespace mamba
