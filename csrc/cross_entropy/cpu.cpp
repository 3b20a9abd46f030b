// cross_entropy of mamba_cpu: checks, the choice of instruction set, and the split of the rows over threads.
#include "common/cpu_runtime.h"
#include "cross_entropy/check.h"
#include "cross_entropy/cpu/kernels.h"

namespace mamba {
namespace {

// Logits that one thread finishes in about 100 us, several times what starting a thread costs.
constexpr int64_t kWorkPerThread = 1 << 17;

struct CrossEntropyJob {
    const MambaCrossEntropy* params;
    const CrossEntropyKernels* kernels;
    int64_t shares;
};

void run_cross_entropy_share(void* context, int64_t share) {
    const CrossEntropyJob& job = *static_cast<const CrossEntropyJob*>(context);
    const int64_t rows = job.params->rows;
    job.kernels->cross_entropy(*job.params, share_begin(rows, job.shares, share), share_begin(rows, job.shares, share + 1));
}

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
    const MambaCrossEntropy& p = *params;
    CrossEntropyJob job;
    job.params = params;
    job.kernels = &kernels_of(isa, generic::cross_entropy_kernels, avx2::cross_entropy_kernels, avx512::cross_entropy_kernels);
    const int64_t threads = worthwhile_threads(p.run, p.rows * p.vocabulary, kWorkPerThread);
    job.shares = threads < p.rows ? threads : p.rows;
    run_shares(job.shares, run_cross_entropy_share, &job);
    return MAMBA_OK;
}
