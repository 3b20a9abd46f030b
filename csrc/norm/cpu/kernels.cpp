// The kernels of norm and SwiGLU, compiled once per instruction set. No STL here: see common/cpu_vector.h.
#include "norm/cpu/kernels.h"

#include "norm/cpu/backward.h"
#include "norm/cpu/forward.h"
#include "norm/cpu/swiglu.h"

namespace mamba {
namespace MAMBA_ISA {

extern const NormKernels norm_kernels = {norm_forward, norm_backward, norm_add_shares, swiglu_forward, swiglu_backward};

}  // namespace MAMBA_ISA
}  // namespace mamba
