// selective_state_update of mamba_cpu: checks, the choice of instruction set, and the split of the work over threads.
#include "common/cpu_runtime.h"
#include "state_update/cpu/kernels.h"

namespace mamba {
namespace {

// State elements that one thread finishes in about 100 us, several times what starting a thread costs.
constexpr int64_t kWorkPerThread = 1 << 17;

const StateUpdateKernels& kernels_of(Isa isa) {
    switch (isa) {
        case Isa::avx512:
            return avx512::state_update_kernels;
        case Isa::avx2:
            return avx2::state_update_kernels;
        default:
            return generic::state_update_kernels;
    }
}

int32_t check_dtypes(const MambaSelectiveStateUpdate& p) {
    int32_t status = check_dtype("selective_state_update: state", p.state_dtype);
    status = status != MAMBA_OK ? status : check_dtype("selective_state_update: x", p.x_dtype);
    status = status != MAMBA_OK ? status : check_dtype("selective_state_update: dt", p.dt_dtype);
    status = status != MAMBA_OK ? status : check_dtype("selective_state_update: A", p.A_dtype);
    status = status != MAMBA_OK ? status : check_dtype("selective_state_update: B and C", p.BC_dtype);
    if (status == MAMBA_OK && p.D != nullptr) {
        status = check_dtype("selective_state_update: D", p.D_dtype);
    }
    if (status == MAMBA_OK && p.dt_bias != nullptr) {
        status = check_dtype("selective_state_update: dt_bias", p.dt_bias_dtype);
    }
    return status;
}

int32_t check_sizes(const char* function, const MambaSelectiveStateUpdate& p) {
    int32_t status = require_range(p.batch, 0, kNoLimit, function, "batch");
    status = status != MAMBA_OK ? status : require_range(p.nheads, 0, kNoLimit, function, "nheads");
    status = status != MAMBA_OK ? status : require_range(p.headdim, 0, kNoLimit, function, "headdim");
    status = status != MAMBA_OK ? status : require_range(p.dstate, 1, MAMBA_MAX_DSTATE, function, "dstate");
    status = status != MAMBA_OK ? status : require_range(p.run.num_threads, 1, kNoLimit, function, "run.num_threads");
    if (status == MAMBA_OK && (p.ngroups < 1 || p.nheads % p.ngroups != 0)) {
        return fail(MAMBA_ERROR_INVALID, "%s: ngroups must divide nheads, got ngroups=%lld nheads=%lld", function,
                    static_cast<long long>(p.ngroups), static_cast<long long>(p.nheads));
    }
    return status;
}

int32_t check_pointers(const char* function, const MambaSelectiveStateUpdate& p) {
    int32_t status = require(p.state, function, "state");
    status = status != MAMBA_OK ? status : require(p.x, function, "x");
    status = status != MAMBA_OK ? status : require(p.dt, function, "dt");
    status = status != MAMBA_OK ? status : require(p.A, function, "A");
    status = status != MAMBA_OK ? status : require(p.B, function, "B");
    status = status != MAMBA_OK ? status : require(p.C, function, "C");
    status = status != MAMBA_OK ? status : require(p.out, function, "out");
    if (status != MAMBA_OK) {
        return status;
    }
    if (p.state_batch_indices == nullptr) {
        return require_range(p.state_rows, p.batch, kNoLimit, function, "state_rows (one a batch entry)");
    }
    for (int64_t b = 0; b < p.batch; ++b) {
        if (p.state_batch_indices[b] >= p.state_rows) {
            return fail(MAMBA_ERROR_INVALID, "%s: state_batch_indices[%lld] must be below state_rows=%lld, got %d", function,
                        static_cast<long long>(b), static_cast<long long>(p.state_rows),
                        static_cast<int>(p.state_batch_indices[b]));
        }
    }
    return MAMBA_OK;
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
    const char* function = "selective_state_update";
    int32_t status = require(params, function, "params");
    status = status != MAMBA_OK ? status : check_sizes(function, *params);
    status = status != MAMBA_OK ? status : check_dtypes(*params);
    if (status != MAMBA_OK || params->batch == 0 || params->nheads == 0 || params->headdim == 0) {
        return status;
    }
    Isa isa;
    status = check_pointers(function, *params);
    status = status != MAMBA_OK ? status : choose_isa(&isa);
    if (status != MAMBA_OK) {
        return status;
    }
    StateUpdateJob job;
    job.params = params;
    job.kernels = &kernels_of(isa);
    const int64_t rows = params->batch * params->nheads;
    job.blocks = rows * ((params->headdim + job.kernels->lanes - 1) / job.kernels->lanes);
    job.shares = worthwhile_threads(params->run, rows * params->headdim * params->dstate, kWorkPerThread);
    job.shares = job.shares < job.blocks ? job.shares : job.blocks;
    run_shares(job.shares, run_state_update_share, &job);
    return MAMBA_OK;
}
