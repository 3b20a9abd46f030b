// Norm and SwiGLU of mamba_cpu: checks, the choice of instruction set, and the split of the rows over threads.
#include "common/cpu_runtime.h"
#include "norm/check.h"
#include "norm/cpu/kernels.h"

namespace mamba {
namespace {

// Elements that one thread finishes in about 100 us, several times what starting a thread costs.
constexpr int64_t kWorkPerThread = 1 << 17;

const NormKernels& norm_kernels(Isa isa) {
    return kernels_of(isa, generic::norm_kernels, avx2::norm_kernels, avx512::norm_kernels);
}

int64_t choose_shares(const MambaRun& run, int64_t rows, int64_t width) {
    const int64_t shares = worthwhile_threads(run, rows * width, kWorkPerThread);
    return shares < rows ? shares : rows;
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

int32_t no_memory(const char* function, int64_t floats) {
    return fail(MAMBA_ERROR_MEMORY, "%s: no memory for %lld floats of scratch space", function, static_cast<long long>(floats));
}

int32_t swiglu(const char* function, const MambaSwiglu* params, bool backward) {
    int32_t status = check_swiglu(function, params, backward);
    if (status != MAMBA_OK || swiglu_is_empty(*params)) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    const NormKernels& kernels = norm_kernels(isa);
    run_rows(backward ? kernels.swiglu_backward : kernels.swiglu_forward, *params, params->rows, params->rows * params->width,
             kWorkPerThread);
    return MAMBA_OK;
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_norm_forward(const MambaNorm* params) {
    const char* const function = "norm_forward";
    int32_t status = check_norm_forward(function, params);
    if (status != MAMBA_OK || params->rows == 0) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    NormJob<MambaNorm> job;
    job.shares = choose_shares(params->run, params->rows, params->ngroups * params->group_size);
    job.params = params;
    job.kernel = norm_kernels(isa).forward;
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
    const char* const function = "norm_backward";
    int32_t status = check_norm_backward(function, params);
    if (status != MAMBA_OK || params->forward.rows == 0) {
        return status;
    }
    const MambaNorm& p = params->forward;
    Isa isa;
    status = begin_call(function, p.run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    NormJob<MambaNormBackward> job;
    job.shares = choose_shares(p.run, p.rows, p.ngroups * p.group_size);
    job.params = params;
    job.kernel = norm_kernels(isa).backward;
    job.rows = p.rows;
    job.pitch = norm_backward_scratch(p);
    const Scratch scratch(job.shares * job.pitch);
    if (scratch.get() == nullptr) {
        return no_memory(function, job.shares * job.pitch);
    }
    job.scratch = scratch.get();
    run_shares(job.shares, run_norm_share<MambaNormBackward>, &job);
    norm_kernels(isa).add_shares(*params, job.shares, job.pitch, job.scratch);
    return MAMBA_OK;
}

int32_t mamba_swiglu_forward(const MambaSwiglu* params) {
    return swiglu("swiglu_forward", params, false);
}

int32_t mamba_swiglu_backward(const MambaSwiglu* params) {
    return swiglu("swiglu_backward", params, true);
}
