// selective_scan of mamba_cpu: checks, the choice of instruction set, and the split of the work over threads.
#include <string.h>

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
    part.blocks_per_group = ceil_div(part.group_channels, lanes);
    part.units = p.batch * p.ngroups * part.blocks_per_group;
    const int64_t work = p.batch * p.dim * p.dstate * (p.seqlen > 0 ? p.seqlen : 1);
    part.shares = worthwhile_threads(p.run, work, work_per_thread);
    part.shares = part.shares < part.units ? part.shares : part.units;
    return part;
}

const ScanKernels& scan_kernels(Isa isa) {
    return kernels_of(isa, generic::scan_kernels, avx2::scan_kernels, avx512::scan_kernels);
}

// What the plan says here: threads share out channels, never the length.
int32_t check_segments(const char* function, const MambaSelectiveScan& p) {
    Check check(function);
    check.that(p.segments == 1, MAMBA_ERROR_INVALID, "segments must be 1, as mamba_selective_scan_plan says, got %lld",
               static_cast<long long>(p.segments));
    return check.status();
}

int32_t check_slots(const char* function, const Partition& partition, int64_t slots) {
    Check check(function);
    check.that(slots >= partition.slots(), MAMBA_ERROR_INVALID,
               "slots must be %lld, as mamba_selective_scan_plan says, got %lld", static_cast<long long>(partition.slots()),
               static_cast<long long>(slots));
    return check.status();
}

struct ScanJob {
    const MambaSelectiveScan* forward = nullptr;
    const ScanBackward* backward = nullptr;  // neither this nor the next: run the forward scan
    const MambaSelectiveScanDoubleBackward* double_backward = nullptr;
    bool carry_only = false;
    const ScanKernels* kernels = nullptr;
    Partition partition;
    std::atomic<bool> out_of_memory{false};

    int64_t scratch_floats(int64_t channels) const {
        if (double_backward != nullptr) {
            return kernels->double_backward_scratch(*forward, channels);
        }
        const bool gradients = backward != nullptr && !carry_only;
        return (gradients ? kernels->backward_scratch : kernels->forward_scratch)(*forward, channels);
    }

    void run(const ScanSegment& segment, float* scratch) const {
        if (double_backward != nullptr) {
            kernels->double_backward(*double_backward, segment, scratch);
        } else if (backward != nullptr) {
            (carry_only ? kernels->backward_carry : kernels->backward)(*backward, segment, scratch);
        } else {
            (carry_only ? kernels->forward_carry : kernels->forward)(*forward, segment, scratch);
        }
    }
};

void run_scan_share(void* context, int64_t share) {
    ScanJob& job = *static_cast<ScanJob*>(context);
    const Partition& part = job.partition;
    const int64_t begin = part.first_unit(share), end = part.first_unit(share + 1);
    const int64_t most_blocks = end - begin < part.blocks_per_group ? end - begin : part.blocks_per_group;
    const Scratch scratch(job.scratch_floats(most_blocks * part.lanes));
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
        job.run(segment, scratch.get());
        unit = segment_end;
        slot = 0;
    }
}

int32_t run_job(ScanJob& job, const char* function) {
    const MambaSelectiveScan& p = *job.forward;
    run_shares(job.partition.shares, run_scan_share, &job);
    if (job.out_of_memory) {
        return fail(MAMBA_ERROR_MEMORY, "%s: no memory for scratch space with batch=%lld dim=%lld seqlen=%lld dstate=%lld",
                    function, static_cast<long long>(p.batch), static_cast<long long>(p.dim), static_cast<long long>(p.seqlen),
                    static_cast<long long>(p.dstate));
    }
    return MAMBA_OK;
}

// q: null for the forward direction.
int32_t run_carry(const char* function, const MambaSelectiveScan& p, const ScanBackward* q) {
    Isa isa;
    int32_t status = check_segments(function, p);
    status = status != MAMBA_OK ? status : begin_call(function, p.run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    ScanJob job;
    job.forward = &p;
    job.backward = q;
    job.carry_only = true;
    job.kernels = &scan_kernels(isa);
    job.partition = make_partition(p, job.kernels->lanes, kForwardWorkPerThread);
    return run_job(job, function);
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_selective_scan_forward(const MambaSelectiveScan* params) {
    const char* const function = "selective_scan_forward";
    int32_t status = check_scan_forward(function, params);
    if (status != MAMBA_OK || scan_is_empty(*params)) {
        return status;
    }
    Isa isa;
    status = check_segments(function, *params);
    status = status != MAMBA_OK ? status : begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    ScanJob job;
    job.forward = params;
    job.kernels = &scan_kernels(isa);
    job.partition = make_partition(*params, job.kernels->lanes, kForwardWorkPerThread);
    return run_job(job, function);
}

int32_t mamba_selective_scan_backward(const MambaSelectiveScanBackward* params) {
    const char* const function = "selective_scan_backward";
    int32_t status = check_scan_backward(function, params);
    if (status != MAMBA_OK || scan_is_empty(params->forward)) {
        return status;
    }
    const MambaSelectiveScan& p = params->forward;
    Isa isa;
    status = check_segments(function, p);
    status = status != MAMBA_OK ? status : begin_call(function, p.run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    const ScanBackward q = scan_backward(*params);
    ScanJob job;
    job.forward = &p;
    job.backward = &q;
    job.kernels = &scan_kernels(isa);
    job.partition = make_partition(p, job.kernels->lanes, kBackwardWorkPerThread);
    status = p.variable_B || p.variable_C ? check_slots(function, job.partition, params->slots) : MAMBA_OK;
    if (status != MAMBA_OK) {
        return status;
    }
    // Not every slot has a share of each batch entry and group.
    const size_t matrix_bytes = static_cast<size_t>(q.slots * p.batch * p.ngroups * p.dstate * p.seqlen) * sizeof(float);
    if (p.variable_B && q.slots > 1) {
        memset(q.parts.dB, 0, matrix_bytes);
    }
    if (p.variable_C && q.slots > 1) {
        memset(q.parts.dC, 0, matrix_bytes);
    }
    status = run_job(job, function);
    const PartSums sums = scan_part_sums(q);
    for (int i = 0; i < sums.count && status == MAMBA_OK; ++i) {
        job.kernels->add_parts(sums.of[i]);
    }
    return status;
}

int32_t mamba_selective_scan_double_backward(const MambaSelectiveScanDoubleBackward* params) {
    const char* const function = "selective_scan_double_backward";
    int32_t status = check_scan_double_backward(function, params);
    if (status != MAMBA_OK || scan_is_empty(params->forward)) {
        return status;
    }
    const MambaSelectiveScan& p = params->forward;
    Isa isa;
    status = check_segments(function, p);
    status = status != MAMBA_OK ? status : begin_call(function, p.run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    ScanJob job;
    job.forward = &p;
    job.double_backward = params;
    job.kernels = &scan_kernels(isa);
    job.partition = make_partition(p, job.kernels->lanes, kBackwardWorkPerThread);
    status = check_slots(function, job.partition, params->slots);
    return status != MAMBA_OK ? status : run_job(job, function);
}

int32_t mamba_selective_scan_plan(const MambaSelectiveScan* params, int32_t, MambaSelectiveScanPlan* plan) {
    const char* const function = "selective_scan_plan";
    int32_t status = check_scan_plan(function, params, plan);
    if (status != MAMBA_OK) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    plan->forward_segments = 1;
    plan->backward_segments = 1;
    plan->slots = 1;
    if (!scan_is_empty(*params)) {
        plan->slots = make_partition(*params, scan_kernels(isa).lanes, kBackwardWorkPerThread).slots();
    }
    plan->backward_workspace = scan_workspace_bytes(*params, 1, plan->slots);
    return MAMBA_OK;
}

int32_t mamba_selective_scan_forward_carry(const MambaSelectiveScan* params) {
    const char* const function = "selective_scan_forward_carry";
    const int32_t status = check_scan_forward_carry(function, params);
    return status != MAMBA_OK || scan_is_empty(*params) ? status : run_carry(function, *params, nullptr);
}

int32_t mamba_selective_scan_backward_carry(const MambaSelectiveScanBackward* params) {
    const char* const function = "selective_scan_backward_carry";
    const int32_t status = check_scan_backward_carry(function, params);
    if (status != MAMBA_OK || scan_is_empty(params->forward)) {
        return status;
    }
    const ScanBackward q = scan_backward(*params);
    return run_carry(function, params->forward, &q);
}
