// The scan kernels, compiled once per instruction set. No STL here: see common/cpu_vector.h.
#include "selective_scan/cpu/kernels.h"

#include "common/cpu_sums.h"
#include "selective_scan/cpu/backward.h"
#include "selective_scan/cpu/carry.h"
#include "selective_scan/cpu/double_backward.h"
#include "selective_scan/cpu/forward.h"

namespace mamba {
namespace MAMBA_ISA {

extern const ScanKernels scan_kernels = {
    kLanes,           forward_scratch,         backward_scratch, double_backward_scratch, forward_segment,
    backward_segment, double_backward_segment, add_parts,        forward_carry_segment,   backward_carry_segment,
};

}  // namespace MAMBA_ISA
}  // namespace mamba
