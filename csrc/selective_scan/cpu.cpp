// selective_scan of mamba_cpu: checks, the choice of instruction set, and the split of the work over threads.
#include <atomic>

#include "common/cpu_runtime.h"
#include "selective_scan/check.h"
#include "selective_scan/cpu/kernels.h"

namespace mamba {
namespace {

// Steps x states x channels that one thread finishes in about 100 us, several times what starting a thread costs.
constexpr int64_t kForwardWorkPerThread = 1 << 19;
constexpr int64_t kBackwardWorkPerThread = 1 << 18;

// How blocks of channels are dealt to threads. Units are the blocks of all groups of all batch entries, in that order; a share
// is a range of units. Units of one (batch, group) add to the same dB and dC, so shares that split one need a slot each.
struct Partition {
    int64_t lanes, group_channels, blocks_per_group, units, shares;

    int64_t first_unit(int64_t share) const { return share_begin(units, shares, share); }

    // Which of the shares that split its first (batch, group) this one is, counted from 0.
    int64_t slot_of_first_group(int64_t share) const {
        const int64_t group_begin = first_unit(share) / blocks_per_group * blocks_per_group;
        int64_t slot = 0;
        while (slot < share && first_unit(share - slot) > group_begin) {
            ++slot;
        }
        return slot;
    }

    int64_t slots() const {
        int64_t most = 1;
        for (int64_t share = 0; share < shares; ++share) {
            const int64_t slot = slot_of_first_group(share);
            most = slot + 1 > most ? slot + 1 : most;
        }
        return most;
    }
};

Partition make_partition(const MambaSelectiveScan& p, int64_t lanes, int64_t work_per_thread) {
    Partition part;
    part.lanes = lanes;
    part.group_channels = p.dim / p.ngroups;
    part.blocks_per_group = (part.group_channels + lanes - 1) / lanes;
    part.units = p.batch * p.ngroups * part.blocks_per_group;
    const int64_t work = p.batch * p.dim * p.dstate * (p.seqlen > 0 ? p.seqlen : 1);
    part.shares = worthwhile_threads(p.run, work, work_per_thread);
    part.shares = part.shares < part.units ? part.shares : part.units;
    return part;
}

const ScanKernels& kernels_of(Isa isa) {
    switch (isa) {
        case Isa::avx512:
            return avx512::scan_kernels;
        case Isa::avx2:
            return avx2::scan_kernels;
        default:
            return generic::scan_kernels;
    }
}

struct ScanJob {
    const MambaSelectiveScan* forward;
    const MambaSelectiveScanBackward* backward;  // null: run the forward scan
    const ScanKernels* kernels;
    Partition partition;
    std::atomic<bool> out_of_memory;
};

void run_scan_share(void* context, int64_t share) {
    ScanJob& job = *static_cast<ScanJob*>(context);
    const Partition& part = job.partition;
    const int64_t begin = part.first_unit(share), end = part.first_unit(share + 1);
    const int64_t most_blocks = end - begin < part.blocks_per_group ? end - begin : part.blocks_per_group;
    const auto scratch_floats = job.backward != nullptr ? job.kernels->backward_scratch : job.kernels->forward_scratch;
    const Scratch scratch(scratch_floats(*job.forward, most_blocks * part.lanes));
    if (scratch.get() == nullptr) {
        job.out_of_memory = true;
        return;
    }
    int64_t slot = part.slot_of_first_group(share);
    for (int64_t unit = begin; unit < end;) {
        const int64_t group_unit = unit / part.blocks_per_group, group_end = (group_unit + 1) * part.blocks_per_group;
        const int64_t segment_end = end < group_end ? end : group_end;
        const int64_t first = (unit - group_unit * part.blocks_per_group) * part.lanes;
        const int64_t blocks_end = (segment_end - group_unit * part.blocks_per_group) * part.lanes;
        ScanSegment segment;
        segment.batch = group_unit / job.forward->ngroups;
        segment.group = group_unit % job.forward->ngroups;
        segment.channel = segment.group * part.group_channels + first;
        segment.channels = (blocks_end < part.group_channels ? blocks_end : part.group_channels) - first;
        segment.slot = slot;
        if (job.backward != nullptr) {
            job.kernels->backward(*job.backward, segment, scratch.get());
        } else {
            job.kernels->forward(*job.forward, segment, scratch.get());
        }
        unit = segment_end;
        slot = 0;
    }
}

int32_t run_job(ScanJob& job, const char* function) {
    const MambaSelectiveScan& p = *job.forward;
    job.out_of_memory = false;
    run_shares(job.partition.shares, run_scan_share, &job);
    if (job.out_of_memory) {
        return fail(MAMBA_ERROR_MEMORY, "%s: no memory for scratch space with batch=%lld dim=%lld seqlen=%lld dstate=%lld",
                    function, static_cast<long long>(p.batch), static_cast<long long>(p.dim), static_cast<long long>(p.seqlen),
                    static_cast<long long>(p.dstate));
    }
    return MAMBA_OK;
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_selective_scan_forward(const MambaSelectiveScan* params) {
    Isa isa;
    int32_t status = check_selective_scan(params);
    if (status == MAMBA_OK) {
        status = require_range(params->run.num_threads, 1, kNoLimit, "selective_scan", "run.num_threads");
    }
    if (status == MAMBA_OK) {
        status = require_range(params->segments, 1, 1, "selective_scan", "segments");
    }
    if (status == MAMBA_OK) {
        status = choose_isa(&isa);
    }
    if (status != MAMBA_OK || params->batch == 0 || params->dim == 0) {
        return status;
    }
    ScanJob job;
    job.forward = params;
    job.backward = nullptr;
    job.kernels = &kernels_of(isa);
    job.partition = make_partition(*params, job.kernels->lanes, kForwardWorkPerThread);
    return run_job(job, "selective_scan_forward");
}

int32_t mamba_selective_scan_backward(const MambaSelectiveScanBackward* params) {
    Isa isa;
    int32_t status = check_selective_scan_backward(params);
    if (status == MAMBA_OK) {
        status = require_range(params->forward.run.num_threads, 1, kNoLimit, "selective_scan_backward", "run.num_threads");
    }
    if (status == MAMBA_OK) {
        status = require_range(params->forward.segments, 1, 1, "selective_scan_backward", "segments");
    }
    if (status == MAMBA_OK) {
        status = choose_isa(&isa);
    }
    if (status != MAMBA_OK || params->forward.batch == 0 || params->forward.dim == 0) {
        return status;
    }
    ScanJob job;
    job.forward = &params->forward;
    job.backward = params;
    job.kernels = &kernels_of(isa);
    job.partition = make_partition(params->forward, job.kernels->lanes, kBackwardWorkPerThread);
    const int64_t slots = job.partition.slots();
    if ((params->forward.variable_B || params->forward.variable_C) && params->slots < slots) {
        return fail(MAMBA_ERROR_INVALID,
                    "selective_scan_backward: slots must be what mamba_selective_scan_plan said (%lld), got %lld",
                    static_cast<long long>(slots), static_cast<long long>(params->slots));
    }
    return run_job(job, "selective_scan_backward");
}

int32_t mamba_selective_scan_plan(const MambaSelectiveScan* params, int32_t, MambaSelectiveScanPlan* plan) {
    const char* function = "selective_scan_plan";
    int32_t status = require(params, function, "params");
    status = status != MAMBA_OK ? status : require(plan, function, "plan");
    status = status != MAMBA_OK ? status : require_range(params->batch, 0, kNoLimit, function, "batch");
    status = status != MAMBA_OK ? status : require_range(params->dim, 0, kNoLimit, function, "dim");
    status = status != MAMBA_OK ? status : require_range(params->dstate, 1, MAMBA_MAX_DSTATE, function, "dstate");
    status = status != MAMBA_OK ? status : require_range(params->ngroups, 1, kNoLimit, function, "ngroups");
    status = status != MAMBA_OK ? status : require_range(params->run.num_threads, 1, kNoLimit, function, "run.num_threads");
    Isa isa;
    status = status != MAMBA_OK ? status : choose_isa(&isa);
    if (status != MAMBA_OK) {
        return status;
    }
    // Threads share out channels, never the length.
    plan->forward_segments = 1;
    plan->backward_segments = 1;
    plan->slots = 1;
    plan->zeroed_sums = 1;
    if (params->batch > 0 && params->dim > 0) {
        plan->slots = make_partition(*params, kernels_of(isa).lanes, kBackwardWorkPerThread).slots();
    }
    return MAMBA_OK;
}
