// The cross entropy's kernels, compiled once per instruction set. No STL here: see common/cpu_vector.h.
#include "cross_entropy/cpu/kernels.h"

#include "cross_entropy/cpu/rows.h"

namespace mamba {
namespace MAMBA_ISA {

extern const CrossEntropyKernels cross_entropy_kernels = {cross_entropy};

}  // namespace MAMBA_ISA
}  // namespace mamba
