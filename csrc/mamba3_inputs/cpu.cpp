// What Mamba-3's scan takes, of mamba_cpu: checks, the choice of instruction set, and the split of the rows over threads.
#include "common/cpu_runtime.h"
#include "mamba3_inputs/check.h"
#include "mamba3_inputs/cpu/kernels.h"

namespace mamba {
namespace {

// Elements that one thread finishes in about 100 us, several times what starting a thread costs.
constexpr int64_t kWorkPerThread = 1 << 17;

const Mamba3InputsKernels& inputs_kernels(Isa isa) {
    return kernels_of(isa, generic::mamba3_inputs_kernels, avx2::mamba3_inputs_kernels, avx512::mamba3_inputs_kernels);
}

int64_t at_most(int64_t value, int64_t limit) {
    return value < limit ? value : limit;
}

int64_t elements_of(const MambaMamba3Inputs& p) {
    return p.rows * (2 * p.matrices * p.dstate + 2 * p.nheads);
}

struct BackwardJob {
    const MambaMamba3InputsBackward* params;
    const Mamba3InputsKernels* kernels;
    int64_t parts, shares;
};

void run_backward_share(void* context, int64_t share) {
    const BackwardJob& job = *static_cast<const BackwardJob*>(context);
    const MambaMamba3Inputs& p = job.params->forward;
    float* const sums = static_cast<float*>(job.params->workspace);
    const int64_t end = share_begin(job.parts, job.shares, share + 1);
    for (int64_t part = share_begin(job.parts, job.shares, share); part < end; ++part) {
        job.kernels->backward(*job.params, share_begin(p.rows, job.parts, part), share_begin(p.rows, job.parts, part + 1),
                              sums + part * mamba3_inputs_sums(p));
    }
}

int64_t parts_of(const MambaMamba3Inputs& p) {
    return at_most(p.rows, kMamba3InputsParts);
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_mamba3_inputs_forward(const MambaMamba3Inputs* params) {
    const char* const function = "mamba3_inputs_forward";
    int32_t status = check_mamba3_inputs_forward(function, params);
    if (status != MAMBA_OK || mamba3_inputs_are_empty(*params)) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    run_rows(inputs_kernels(isa).forward, *params, params->rows, elements_of(*params), kWorkPerThread);
    return MAMBA_OK;
}

int64_t mamba_mamba3_inputs_backward_workspace(const MambaMamba3Inputs* params) {
    if (check_mamba3_inputs_problem("mamba3_inputs_backward_workspace", params) != MAMBA_OK ||
        mamba3_inputs_are_empty(*params)) {
        return 0;  // the call itself will say what is wrong
    }
    return parts_of(*params) * mamba3_inputs_sums(*params) * static_cast<int64_t>(sizeof(float));
}

int32_t mamba_mamba3_inputs_backward(const MambaMamba3InputsBackward* params) {
    const char* const function = "mamba3_inputs_backward";
    int32_t status = check_mamba3_inputs_backward(function, params);
    if (status != MAMBA_OK || mamba3_inputs_are_empty(params->forward)) {
        return status;
    }
    const MambaMamba3Inputs& p = params->forward;
    Isa isa;
    status = begin_call(function, p.run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    const int64_t parts = parts_of(p);
    const int64_t threads = worthwhile_threads(p.run, elements_of(p), kWorkPerThread);
    BackwardJob job = {params, &inputs_kernels(isa), parts, at_most(threads, parts)};
    run_shares(job.shares, run_backward_share, &job);
    job.kernels->add_parts(*params, parts);
    return MAMBA_OK;
}
