// causal_conv1d of mamba_cpu: checks, the choice of instruction set, and the split of the work over threads.
#include "causal_conv1d/check.h"
#include "causal_conv1d/cpu/kernels.h"
#include "common/cpu_runtime.h"

namespace mamba {
namespace {

// Elements that one thread finishes in about 100 us, several times what starting a thread costs.
constexpr int64_t kForwardWorkPerThread = 1 << 17;
constexpr int64_t kBackwardWorkPerThread = 1 << 16;

// Indices in host memory can be looked at.
int32_t check_indices(const char* function, const MambaCausalConv1dUpdate& p) {
    Check check(function);
    for (int64_t b = 0; b < p.batch && p.conv_state_indices != nullptr; ++b) {
        check.that(p.conv_state_indices[b] < p.state_rows, MAMBA_ERROR_INVALID,
                   "conv_state_indices[%lld] must be below state_rows=%lld, got %d", static_cast<long long>(b),
                   static_cast<long long>(p.state_rows), static_cast<int>(p.conv_state_indices[b]));
    }
    return check.status();
}

// A job's units are blocks of `lanes` channels: unit = row * blocks + block, where a row is a batch entry or a slot.
struct ConvJob {
    const ConvKernels* kernels;
    int64_t blocks, units, shares;
    const MambaCausalConv1d* forward;
    const ConvBackward* backward;
    const MambaCausalConv1dUpdate* update;
    int64_t slots;  // of dweight and dbias
};

void run_conv_share(void* context, int64_t share) {
    const ConvJob& job = *static_cast<const ConvJob*>(context);
    const int64_t end = share_begin(job.units, job.shares, share + 1);
    for (int64_t unit = share_begin(job.units, job.shares, share); unit < end; ++unit) {
        const int64_t row = unit / job.blocks, channel = unit % job.blocks * job.kernels->lanes;
        if (job.update != nullptr) {
            job.kernels->update(*job.update, row, channel);
        } else if (job.backward != nullptr) {
            const int64_t batch = job.backward->forward.batch;
            job.kernels->backward(*job.backward, row, share_begin(batch, job.slots, row),
                                  share_begin(batch, job.slots, row + 1), channel);
        } else {
            job.kernels->forward(*job.forward, row, channel);
        }
    }
}

ConvJob make_job(Isa isa, const MambaRun& run, int64_t batch, int64_t dim, int64_t seqlen, int64_t work_per_thread) {
    ConvJob job = {};
    job.kernels = &kernels_of(isa, generic::conv_kernels, avx2::conv_kernels, avx512::conv_kernels);
    job.blocks = ceil_div(dim, job.kernels->lanes);
    job.units = batch * job.blocks;
    job.shares = worthwhile_threads(run, batch * dim * seqlen, work_per_thread);
    job.shares = job.shares < job.units ? job.shares : job.units;
    return job;
}

// Each slot sums its share of the batch. With fewer blocks of channels than threads it takes several to keep all threads busy.
ConvJob make_backward_job(Isa isa, const MambaCausalConv1d& p) {
    ConvJob job = make_job(isa, p.run, p.batch, p.dim, p.seqlen, kBackwardWorkPerThread);
    job.slots = job.shares > job.blocks ? ceil_div(job.shares, job.blocks) : 1;
    job.slots = job.slots < p.batch ? job.slots : p.batch > 0 ? p.batch : 1;
    job.units = job.slots * job.blocks;
    job.shares = job.shares < 1 ? 1 : job.shares < job.units ? job.shares : job.units;
    return job;
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_causal_conv1d_forward(const MambaCausalConv1d* params) {
    const char* const function = "causal_conv1d_forward";
    int32_t status = check_conv_forward(function, params);
    if (status != MAMBA_OK || params->batch == 0 || params->dim == 0) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    ConvJob job = make_job(isa, params->run, params->batch, params->dim, params->seqlen, kForwardWorkPerThread);
    job.forward = params;
    run_shares(job.shares, run_conv_share, &job);
    return MAMBA_OK;
}

int64_t mamba_causal_conv1d_backward_workspace(const MambaCausalConv1d* params) {
    // A problem that backward will refuse needs none; there is no other way to answer here.
    Isa isa;
    if (params == nullptr || !conv_has_elements(*params) || params->run.num_threads < 1 || choose_isa(&isa) != MAMBA_OK) {
        return 0;
    }
    return conv_workspace_bytes(*params, make_backward_job(isa, *params).slots);
}

int32_t mamba_causal_conv1d_backward(const MambaCausalConv1dBackward* params) {
    const char* const function = "causal_conv1d_backward";
    int32_t status = check_conv_backward(function, params);
    if (status != MAMBA_OK || params->forward.dim == 0) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->forward.run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    ConvJob job = make_backward_job(isa, params->forward);
    const ConvBackward q = conv_backward(*params, job.slots);
    job.backward = &q;
    run_shares(job.shares, run_conv_share, &job);
    const PartSums sums = conv_part_sums(q);
    for (int i = 0; i < sums.count; ++i) {
        job.kernels->add_parts(sums.of[i]);
    }
    return MAMBA_OK;
}

int32_t mamba_causal_conv1d_update(const MambaCausalConv1dUpdate* params) {
    const char* const function = "causal_conv1d_update";
    int32_t status = check_conv_update(function, params);
    if (status != MAMBA_OK || !conv_has_elements(*params)) {
        return status;
    }
    Isa isa;
    status = check_indices(function, *params);
    status = status != MAMBA_OK ? status : begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    ConvJob job = make_job(isa, params->run, params->batch, params->dim, params->seqlen, kForwardWorkPerThread);
    job.update = params;
    run_shares(job.shares, run_conv_share, &job);
    return MAMBA_OK;
}
