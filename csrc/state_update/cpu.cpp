// selective_state_update of mamba_cpu: checks, the choice of instruction set, and the split of the work over threads.
#include "common/cpu_runtime.h"
#include "state_update/check.h"
#include "state_update/cpu/kernels.h"

namespace mamba {
namespace {

// State elements that one thread finishes in about 20 us, several times what handing work to a thread costs.
constexpr int64_t kWorkPerThread = 1 << 15;

// Indices in host memory can be looked at.
void check_rows(Check& check, const char* name, const int32_t* rows, const MambaSelectiveStateUpdate& p) {
    for (int64_t b = 0; b < p.batch && rows != nullptr; ++b) {
        check.that(rows[b] < p.state_rows, MAMBA_ERROR_INVALID, "%s[%lld] must be below state_rows=%lld, got %d", name,
                   static_cast<long long>(b), static_cast<long long>(p.state_rows), static_cast<int>(rows[b]));
    }
}

int32_t check_indices(const char* function, const MambaSelectiveStateUpdate& p) {
    Check check(function);
    check_rows(check, "state_batch_indices", p.state_batch_indices, p);
    check_rows(check, "dst_state_batch_indices", p.dst_state_batch_indices, p);
    return check.status();
}

struct StateUpdateJob {
    const MambaSelectiveStateUpdate* params;
    const StateUpdateKernels* kernels;
    int64_t blocks, shares;
};

void run_state_update_share(void* context, int64_t share) {
    const StateUpdateJob& job = *static_cast<const StateUpdateJob*>(context);
    job.kernels->update(*job.params, share_begin(job.blocks, job.shares, share),
                        share_begin(job.blocks, job.shares, share + 1));
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_selective_state_update(const MambaSelectiveStateUpdate* params) {
    const char* const function = "selective_state_update";
    int32_t status = check_state_update(function, params);
    if (status != MAMBA_OK || state_update_is_empty(*params)) {
        return status;
    }
    Isa isa;
    status = check_indices(function, *params);
    status = status != MAMBA_OK ? status : begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    StateUpdateJob job;
    job.params = params;
    job.kernels = &kernels_of(isa, generic::state_update_kernels, avx2::state_update_kernels, avx512::state_update_kernels);
    const int64_t rows = params->batch * params->nheads;
    job.blocks = rows * ceil_div(params->headdim, job.kernels->lanes);
    job.shares = worthwhile_threads(params->run, rows * params->headdim * params->dstate * params->seqlen, kWorkPerThread);
    job.shares = job.shares < job.blocks ? job.shares : job.blocks;
    run_shares(job.shares, run_state_update_share, &job);
    return MAMBA_OK;
}
