// Norm and SwiGLU of mamba_cpu: checks, the choice of instruction set, and the split of the rows over threads.
#include "common/cpu_runtime.h"
#include "norm/check.h"
#include "norm/cpu/kernels.h"

namespace mamba {
namespace {

// Elements that one thread finishes in about 100 us, several times what starting a thread costs.
constexpr int64_t kWorkPerThread = 1 << 17;

const NormKernels& kernels_of(Isa isa) {
    switch (isa) {
        case Isa::avx512:
            return avx512::norm_kernels;
        case Isa::avx2:
            return avx2::norm_kernels;
        default:
            return generic::norm_kernels;
    }
}

// Threads for so many rows; fails where none is allowed.
int32_t choose_shares(const char* function, const MambaRun& run, int64_t rows, int64_t width, int64_t* shares) {
    const int32_t status = require_range(run.num_threads, 1, kNoLimit, function, "run.num_threads");
    if (status == MAMBA_OK) {
        *shares = worthwhile_threads(run, rows * width, kWorkPerThread);
        *shares = *shares < rows ? *shares : rows;
    }
    return status;
}

template <typename Params>
struct NormJob {
    const Params* params;
    void (*kernel)(const Params& params, int64_t begin, int64_t end, float* scratch);
    int64_t rows, shares, pitch;
    float* scratch;
};

template <typename Params>
void run_norm_share(void* context, int64_t share) {
    const NormJob<Params>& job = *static_cast<const NormJob<Params>*>(context);
    job.kernel(*job.params, share_begin(job.rows, job.shares, share), share_begin(job.rows, job.shares, share + 1),
               job.scratch + share * job.pitch);
}

struct SwigluJob {
    const MambaSwiglu* params;
    void (*kernel)(const MambaSwiglu& params, int64_t begin, int64_t end);
    int64_t shares;
};

void run_swiglu_share(void* context, int64_t share) {
    const SwigluJob& job = *static_cast<const SwigluJob*>(context);
    job.kernel(*job.params, share_begin(job.params->rows, job.shares, share),
               share_begin(job.params->rows, job.shares, share + 1));
}

int32_t no_memory(const char* function, int64_t floats) {
    return fail(MAMBA_ERROR_MEMORY, "%s: no memory for %lld floats of scratch space", function, static_cast<long long>(floats));
}

int32_t swiglu(const char* function, const MambaSwiglu* params, bool backward) {
    int32_t status = check_swiglu(function, params, backward);
    if (status != MAMBA_OK || params->rows == 0 || params->width == 0) {
        return status;
    }
    Isa isa;
    SwigluJob job;
    status = choose_shares(function, params->run, params->rows, params->width, &job.shares);
    status = status != MAMBA_OK ? status : choose_isa(&isa);
    if (status != MAMBA_OK) {
        return status;
    }
    job.params = params;
    job.kernel = backward ? kernels_of(isa).swiglu_backward : kernels_of(isa).swiglu_forward;
    run_shares(job.shares, run_swiglu_share, &job);
    return MAMBA_OK;
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_norm_forward(const MambaNorm* params) {
    const char* function = "norm_forward";
    int32_t status = check_norm_forward(params);
    if (status != MAMBA_OK || params->rows == 0) {
        return status;
    }
    Isa isa;
    NormJob<MambaNorm> job;
    status = choose_shares(function, params->run, params->rows, params->ngroups * params->group_size, &job.shares);
    status = status != MAMBA_OK ? status : choose_isa(&isa);
    if (status != MAMBA_OK) {
        return status;
    }
    job.params = params;
    job.kernel = kernels_of(isa).forward;
    job.rows = params->rows;
    job.pitch = norm_forward_scratch(*params);
    const Scratch scratch(job.shares * job.pitch);
    if (scratch.get() == nullptr) {
        return no_memory(function, job.shares * job.pitch);
    }
    job.scratch = scratch.get();
    run_shares(job.shares, run_norm_share<MambaNorm>, &job);
    return MAMBA_OK;
}

// The sums are in host memory that the call allocates itself.
int64_t mamba_norm_backward_workspace(const MambaNorm*) {
    return 0;
}

int32_t mamba_norm_backward(const MambaNormBackward* params) {
    const char* function = "norm_backward";
    int32_t status = check_norm_backward(params);
    if (status != MAMBA_OK || params->forward.rows == 0) {
        return status;
    }
    const MambaNorm& p = params->forward;
    Isa isa;
    NormJob<MambaNormBackward> job;
    status = choose_shares(function, p.run, p.rows, p.ngroups * p.group_size, &job.shares);
    status = status != MAMBA_OK ? status : choose_isa(&isa);
    if (status != MAMBA_OK) {
        return status;
    }
    job.params = params;
    job.kernel = kernels_of(isa).backward;
    job.rows = p.rows;
    job.pitch = norm_backward_scratch(p);
    const Scratch scratch(job.shares * job.pitch);
    if (scratch.get() == nullptr) {
        return no_memory(function, job.shares * job.pitch);
    }
    job.scratch = scratch.get();
    run_shares(job.shares, run_norm_share<MambaNormBackward>, &job);
    kernels_of(isa).add_shares(*params, job.shares, job.pitch, job.scratch);
    return MAMBA_OK;
}

int32_t mamba_swiglu_forward(const MambaSwiglu* params) {
    return swiglu("swiglu_forward", params, false);
}

int32_t mamba_swiglu_backward(const MambaSwiglu* params) {
    return swiglu("swiglu_backward", params, true);
}
