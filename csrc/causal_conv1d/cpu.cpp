// causal_conv1d of mamba_cpu: checks, the choice of instruction set, and the split of the work over threads.
#include "causal_conv1d/cpu/kernels.h"
#include "common/cpu_runtime.h"

namespace mamba {
namespace {

// Elements that one thread finishes in about 100 us, several times what starting a thread costs.
constexpr int64_t kForwardWorkPerThread = 1 << 17;
constexpr int64_t kBackwardWorkPerThread = 1 << 16;

const ConvKernels& kernels_of(Isa isa) {
    switch (isa) {
        case Isa::avx512:
            return avx512::conv_kernels;
        case Isa::avx2:
            return avx2::conv_kernels;
        default:
            return generic::conv_kernels;
    }
}

int32_t check_sizes(const char* function, const MambaRun& run, int64_t batch, int64_t dim, int64_t seqlen, int32_t width) {
    int32_t status = require_range(batch, 0, kNoLimit, function, "batch");
    status = status != MAMBA_OK ? status : require_range(dim, 0, kNoLimit, function, "dim");
    status = status != MAMBA_OK ? status : require_range(seqlen, 0, kNoLimit, function, "seqlen");
    status = status != MAMBA_OK ? status : require_range(width, 2, 4, function, "width");
    return status != MAMBA_OK ? status : require_range(run.num_threads, 1, kNoLimit, function, "run.num_threads");
}

int32_t check_weights(const char* function, int32_t weight_dtype, const void* weight, int32_t bias_dtype, const void* bias,
                      int64_t dim) {
    int32_t status = check_dtype("causal_conv1d: weight", weight_dtype);
    if (status == MAMBA_OK && bias != nullptr) {
        status = check_dtype("causal_conv1d: bias", bias_dtype);
    }
    return status != MAMBA_OK || dim == 0 ? status : require(weight, function, "weight");
}

int32_t check_conv(const char* function, const MambaCausalConv1d& p) {
    int32_t status = check_sizes(function, p.run, p.batch, p.dim, p.seqlen, p.width);
    status = status != MAMBA_OK ? status : check_dtype("causal_conv1d: x", p.dtype);
    status = status != MAMBA_OK ? status : check_weights(function, p.weight_dtype, p.weight, p.bias_dtype, p.bias, p.dim);
    if (status != MAMBA_OK) {
        return status;
    }
    if (p.seq_idx != nullptr && (p.initial_states != nullptr || p.final_states != nullptr)) {
        return fail(MAMBA_ERROR_INVALID, "%s: seq_idx cannot be given together with initial_states or final_states", function);
    }
    return p.batch * p.dim * p.seqlen == 0 ? status : require(p.x, function, "x");
}

int32_t check_update(const char* function, const MambaCausalConv1dUpdate& p) {
    int32_t status = check_sizes(function, p.run, p.batch, p.dim, p.seqlen, p.width);
    status = status != MAMBA_OK ? status : check_dtype("causal_conv1d: x", p.dtype);
    status = status != MAMBA_OK ? status : check_dtype("causal_conv1d: conv_state", p.state_dtype);
    status = status != MAMBA_OK ? status : check_weights(function, p.weight_dtype, p.weight, p.bias_dtype, p.bias, p.dim);
    status = status != MAMBA_OK ? status : require_range(p.state_len, p.width - 1, kNoLimit, function, "state_len");
    if (status != MAMBA_OK || p.batch == 0 || p.dim == 0 || p.seqlen == 0) {
        return status;
    }
    status = require(p.x, function, "x");
    status = status != MAMBA_OK ? status : require(p.out, function, "out");
    status = status != MAMBA_OK ? status : require(p.conv_state, function, "conv_state");
    if (status != MAMBA_OK) {
        return status;
    }
    if (p.conv_state_indices == nullptr) {
        return require_range(p.state_rows, p.batch, kNoLimit, function, "state_rows (one a batch entry)");
    }
    for (int64_t b = 0; b < p.batch; ++b) {
        if (p.conv_state_indices[b] >= p.state_rows) {
            return fail(MAMBA_ERROR_INVALID, "%s: conv_state_indices[%lld] must be below state_rows=%lld, got %d", function,
                        static_cast<long long>(b), static_cast<long long>(p.state_rows),
                        static_cast<int>(p.conv_state_indices[b]));
        }
    }
    return MAMBA_OK;
}

// A job's units are blocks of `lanes` channels: unit = row * blocks + block, where a row is a batch entry or a slot.
struct ConvJob {
    const ConvKernels* kernels;
    int64_t blocks, units, shares;
    const MambaCausalConv1d* forward;
    const MambaCausalConv1dBackward* backward;
    const MambaCausalConv1dUpdate* update;
    int64_t slots;
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
    job.kernels = &kernels_of(isa);
    job.blocks = (dim + job.kernels->lanes - 1) / job.kernels->lanes;
    job.units = batch * job.blocks;
    job.shares = worthwhile_threads(run, batch * dim * seqlen, work_per_thread);
    job.shares = job.shares < job.units ? job.shares : job.units;
    return job;
}

// Each slot sums its share of the batch. With fewer blocks of channels than threads it takes several to keep all threads busy.
ConvJob make_backward_job(Isa isa, const MambaCausalConv1d& p) {
    ConvJob job = make_job(isa, p.run, p.batch, p.dim, p.seqlen, kBackwardWorkPerThread);
    job.slots = job.shares > job.blocks ? (job.shares + job.blocks - 1) / job.blocks : 1;
    job.slots = job.slots < p.batch ? job.slots : p.batch > 0 ? p.batch : 1;
    job.units = job.slots * job.blocks;
    job.shares = job.shares < 1 ? 1 : job.shares < job.units ? job.shares : job.units;
    return job;
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_causal_conv1d_forward(const MambaCausalConv1d* params) {
    const char* function = "causal_conv1d_forward";
    int32_t status = require(params, function, "params");
    status = status != MAMBA_OK ? status : check_conv(function, *params);
    if (status != MAMBA_OK || params->batch == 0 || params->dim == 0) {
        return status;
    }
    Isa isa;
    status = params->seqlen == 0 ? MAMBA_OK : require(params->out, function, "out");
    status = status != MAMBA_OK ? status : choose_isa(&isa);
    if (status != MAMBA_OK) {
        return status;
    }
    ConvJob job = make_job(isa, params->run, params->batch, params->dim, params->seqlen, kForwardWorkPerThread);
    job.forward = params;
    run_shares(job.shares, run_conv_share, &job);
    return MAMBA_OK;
}

int64_t mamba_causal_conv1d_backward_slots(const MambaCausalConv1d* params) {
    // A problem that backward will refuse needs no slots; there is no other way to answer here.
    Isa isa;
    if (params == nullptr || params->batch < 1 || params->dim < 1 || params->seqlen < 1 || params->run.num_threads < 1 ||
        choose_isa(&isa) != MAMBA_OK) {
        return 1;
    }
    return make_backward_job(isa, *params).slots;
}

int32_t mamba_causal_conv1d_backward(const MambaCausalConv1dBackward* params) {
    const char* function = "causal_conv1d_backward";
    int32_t status = require(params, function, "params");
    status = status != MAMBA_OK ? status : check_conv(function, params->forward);
    if (status != MAMBA_OK || params->forward.dim == 0) {
        return status;
    }
    const MambaCausalConv1d& p = params->forward;
    Isa isa;
    status = require(params->dweight, function, "dweight");
    status = status != MAMBA_OK || p.bias == nullptr ? status : require(params->dbias, function, "dbias");
    if (status == MAMBA_OK && p.batch > 0 && p.seqlen > 0) {
        status = require(params->dout, function, "dout");
        status = status != MAMBA_OK ? status : require(params->dx, function, "dx");
    }
    status = status != MAMBA_OK ? status : choose_isa(&isa);
    if (status != MAMBA_OK) {
        return status;
    }
    ConvJob job = make_backward_job(isa, p);
    job.backward = params;
    status = require_range(params->slots, job.slots, job.slots, function, "slots");
    if (status != MAMBA_OK) {
        return status;
    }
    run_shares(job.shares, run_conv_share, &job);
    return MAMBA_OK;
}

int32_t mamba_causal_conv1d_update(const MambaCausalConv1dUpdate* params) {
    const char* function = "causal_conv1d_update";
    int32_t status = require(params, function, "params");
    status = status != MAMBA_OK ? status : check_update(function, *params);
    if (status != MAMBA_OK || params->batch == 0 || params->dim == 0 || params->seqlen == 0) {
        return status;
    }
    Isa isa;
    status = choose_isa(&isa);
    if (status != MAMBA_OK) {
        return status;
    }
    ConvJob job = make_job(isa, params->run, params->batch, params->dim, params->seqlen, kForwardWorkPerThread);
    job.update = params;
    run_shares(job.shares, run_conv_share, &job);
    return MAMBA_OK;
}
