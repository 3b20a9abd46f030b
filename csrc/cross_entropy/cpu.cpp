// cross_entropy of mamba_cpu: checks, the choice of instruction set, and the split of the rows over threads.
#include "common/cpu_runtime.h"
#include "cross_entropy/check.h"
#include "cross_entropy/cpu/kernels.h"

namespace mamba {
namespace {

// Logits that one thread finishes in about 100 us, several times what starting a thread costs.
constexpr int64_t kWorkPerThread = 1 << 17;

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_cross_entropy(const MambaCrossEntropy* params) {
    const char* const function = "cross_entropy";
    int32_t status = check_cross_entropy(function, params);
    if (status != MAMBA_OK || params->rows == 0) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    const CrossEntropyKernels& kernels =
        kernels_of(isa, generic::cross_entropy_kernels, avx2::cross_entropy_kernels, avx512::cross_entropy_kernels);
    run_rows(kernels.cross_entropy, *params, params->rows, params->rows * params->vocabulary, kWorkPerThread);
    return MAMBA_OK;
}
