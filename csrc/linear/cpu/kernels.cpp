// The linear layer of few rows, what dequantises its weights and greedy decoding's choice, compiled once per instruction set.
// No STL here: see common/cpu_vector.h.
#include "linear/cpu/kernels.h"

#include "linear/cpu/dequantize.h"
#include "linear/cpu/greedy.h"
#include "linear/cpu/project.h"

namespace mamba {
namespace MAMBA_ISA {

extern const LinearKernels linear_kernels = {prepare_input, project_outputs, dequantize, greedy_token};

}  // namespace MAMBA_ISA
}  // namespace mamba
