// The convolution kernels, compiled once per instruction set. No STL here: see common/cpu_vector.h.
#include "causal_conv1d/cpu/kernels.h"

#include "causal_conv1d/cpu/backward.h"
#include "causal_conv1d/cpu/forward.h"
#include "common/cpu_sums.h"

namespace mamba {
namespace MAMBA_ISA {

extern const ConvKernels conv_kernels = {kLanes, conv_forward, conv_backward, conv_update, add_parts};

}  // namespace MAMBA_ISA
}  // namespace mamba
