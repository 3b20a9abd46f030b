// The linear layer of few rows and what dequantises its weights, compiled once per instruction set. No STL here: see
// common/cpu_vector.h.
#include "linear/cpu/kernels.h"

#include "linear/cpu/dequantize.h"
#include "linear/cpu/project.h"

namespace mamba {
namespace MAMBA_ISA {

extern const LinearKernels linear_kernels = {prepare_input, project_outputs, dequantize};

}  // namespace MAMBA_ISA
}  // namespace mamba
