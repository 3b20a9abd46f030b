// Mamba-3's scan of mamba_cpu: checks, the choice of instruction set, and the split of the work over threads.
#include <atomic>

#include "common/cpu_runtime.h"
#include "mamba3/check.h"
#include "mamba3/cpu/kernels.h"

namespace mamba {

Mamba3Layout mamba3_layout(const MambaMamba3& p) {
    const int64_t half = p.dstate / 2, S = p.nangles, N = p.dstate;
    Mamba3Layout layout = {};
    if (p.pairwise != 0) {
        const int64_t parts[3][3] = {{S, 0, 2}, {S, 1, 2}, {N - 2 * S, 2 * S, 1}};
        for (int part = 0; part < 3; ++part) {
            layout.count[part] = parts[part][0];
            layout.begin[part] = parts[part][1];
            layout.stride[part] = parts[part][2];
        }
        layout.stride[3] = 1;
    } else {
        const int64_t parts[4][2] = {{S, 0}, {S, half}, {half - S, S}, {N - half - S, half + S}};
        for (int part = 0; part < 4; ++part) {
            layout.count[part] = parts[part][0];
            layout.begin[part] = parts[part][1];
            layout.stride[part] = 1;
        }
    }
    for (int part = 0; part < 4; ++part) {
        layout.column[part] = layout.width;
        layout.width += row_pitch(layout.count[part]);
    }
    layout.turned = row_pitch(S);
    layout.pitch_P = row_pitch(p.headdim);
    return layout;
}

namespace {

// Rows x channels x (states + their share of what is done within a chunk) that one thread finishes in about 100 us, several
// times what starting a thread costs.
constexpr int64_t kForwardWorkPerThread = 1 << 20;
constexpr int64_t kBackwardWorkPerThread = 1 << 18;
// Backward's unit of work is a block of heads in a slot of sequences. Fixed, so that results do not depend on the number of
// threads, and small, since each block has its own dq and dk and each slot its own sums.
constexpr int64_t kBlocksOfAGroup = 8;
constexpr int64_t kSlots = 16;

const Mamba3Kernels& mamba3_kernels(Isa isa) {
    return kernels_of(isa, generic::mamba3_kernels, avx2::mamba3_kernels, avx512::mamba3_kernels);
}

int64_t useful_threads(const MambaMamba3& p, int64_t work_per_thread) {
    const int64_t work = p.batch * p.seqlen * p.rank * p.nheads * p.headdim * (p.dstate + kMamba3Rows / 4);
    return worthwhile_threads(p.run, work, work_per_thread);
}

int64_t at_most(int64_t value, int64_t limit) {
    return value < limit ? value : limit;
}

int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

int32_t no_memory(const char* function, const MambaMamba3& p) {
    return fail(MAMBA_ERROR_MEMORY, "%s: no memory for scratch space with seqlen=%lld headdim=%lld dstate=%lld", function,
                static_cast<long long>(p.seqlen), static_cast<long long>(p.headdim), static_cast<long long>(p.dstate));
}

// Positions in host memory can be looked at.
int32_t check_cu_seqlens(const char* function, const MambaMamba3& p) {
    Check check(function);
    for (int64_t u = 0; u < p.sequences && p.cu_seqlens != nullptr; ++u) {
        const int32_t begin = p.cu_seqlens[u], end = p.cu_seqlens[u + 1];
        check.that(begin >= 0 && end >= begin && end <= p.seqlen, MAMBA_ERROR_INVALID,
                   "cu_seqlens must rise from 0 or more to seqlen=%lld at most, but sequence %lld is from %d to %d",
                   static_cast<long long>(p.seqlen), static_cast<long long>(u), static_cast<int>(begin), static_cast<int>(end));
    }
    return check.status();
}

// ---- forward ---------------------------------------------------------------------------------------------------------

// Units are heads of all sequences, in that order.
struct ForwardJob {
    const MambaMamba3* params;
    const Mamba3Kernels* kernels;
    Mamba3Layout layout;
    int64_t shares;
    std::atomic<bool> out_of_memory;
};

void run_forward_share(void* context, int64_t share) {
    ForwardJob& job = *static_cast<ForwardJob*>(context);
    const MambaMamba3& p = *job.params;
    const int64_t units = p.sequences * p.nheads, group_heads = p.nheads / p.ngroups;
    const int64_t begin = share_begin(units, job.shares, share), end = share_begin(units, job.shares, share + 1);
    const Scratch scratch(job.kernels->forward_scratch(p, job.layout));
    if (scratch.get() == nullptr) {
        job.out_of_memory = true;
        return;
    }
    for (int64_t unit = begin; unit < end;) {
        const int64_t head = unit % p.nheads;
        const int64_t heads = at_most(at_most(end - unit, kMamba3Heads), group_heads - head % group_heads);
        job.kernels->forward(p, job.layout, unit / p.nheads, head, heads, scratch.get());
        unit += heads;
    }
}

int32_t run_forward(const MambaMamba3& p, const Mamba3Kernels& kernels) {
    ForwardJob job;
    job.params = &p;
    job.kernels = &kernels;
    job.layout = mamba3_layout(p);
    job.out_of_memory = false;
    job.shares = at_most(useful_threads(p, kForwardWorkPerThread), p.sequences * p.nheads);
    run_shares(job.shares, run_forward_share, &job);
    return job.out_of_memory ? no_memory("mamba3_forward", p) : MAMBA_OK;
}

// ---- backward --------------------------------------------------------------------------------------------------------

// Memory of a backward call, in floats.
struct BackwardPlan {
    int64_t blocks, block_heads, slots;
    int64_t matrices, angles, sums, sum_floats;
};

BackwardPlan plan_backward(const MambaMamba3& p, const Mamba3Kernels& kernels) {
    const Mamba3Layout layout = mamba3_layout(p);
    const int64_t group_heads = p.nheads / p.ngroups, steps = p.batch * p.seqlen;
    BackwardPlan plan;
    plan.block_heads = ceil_div(group_heads, kBlocksOfAGroup);
    plan.blocks = ceil_div(group_heads, plan.block_heads);
    plan.slots = at_most(p.sequences, kSlots);
    plan.sum_floats = kernels.sum_floats(p, layout);
    plan.matrices = 2 * p.ngroups * plan.blocks * steps * p.rank * layout.width;
    plan.angles = p.angles_of_heads != 0 ? 0 : p.ngroups * plan.blocks * steps * layout.turned;
    plan.sums = plan.slots * p.nheads * plan.sum_floats;
    return plan;
}

struct BackwardJob {
    const MambaMamba3Backward* params;
    const Mamba3Kernels* kernels;
    Mamba3Layout layout;
    Mamba3Space space;
    bool adds_up;  // the second pass
    int64_t units, shares;
    std::atomic<bool> out_of_memory;
};

int64_t window_of(const MambaMamba3& p) {
    return p.rank < kMamba3Rows ? kMamba3Rows / p.rank : 1;
}

// Steps of a row that are in a sequence.
int64_t row_steps(const MambaMamba3& p) {
    return p.cu_seqlens != nullptr ? p.cu_seqlens[p.sequences] : p.seqlen;
}

// Units of the second pass: windows of dq and dk by group, windows of dangles, heads.
void add_up(const BackwardJob& job, int64_t unit, float* scratch) {
    const MambaMamba3Backward& q = *job.params;
    const MambaMamba3& p = q.forward;
    const int64_t window = window_of(p), steps = row_steps(p), windows = p.batch * ceil_div(steps, window);
    const int64_t groups = p.ngroups + (p.angles_of_heads != 0 ? 0 : 1);
    if (unit >= groups * windows) {
        job.kernels->finish_head(q, job.layout, job.space, unit - groups * windows, scratch);
        return;
    }
    const int64_t group = unit / windows, row = unit % windows / ceil_div(steps, window);
    const int64_t begin = unit % ceil_div(steps, window) * window;
    job.kernels->finish(q, job.layout, job.space, group < p.ngroups ? group : -1, row, begin, at_most(begin + window, steps),
                        scratch);
}

void run_backward_share(void* context, int64_t share) {
    BackwardJob& job = *static_cast<BackwardJob*>(context);
    const MambaMamba3Backward& q = *job.params;
    const MambaMamba3& p = q.forward;
    const int64_t begin = share_begin(job.units, job.shares, share), end = share_begin(job.units, job.shares, share + 1);
    const int64_t tile = kMamba3Rows * larger(job.layout.width, job.layout.turned);
    const Scratch scratch(job.adds_up ? larger(tile, job.space.sum_floats) : job.kernels->backward_scratch(p, job.layout));
    if (scratch.get() == nullptr) {
        job.out_of_memory = true;
        return;
    }
    for (int64_t unit = begin; unit < end; ++unit) {
        if (job.adds_up) {
            add_up(job, unit, scratch.get());
        } else {
            const int64_t block = unit % job.space.blocks, group = unit / job.space.blocks % p.ngroups;
            job.kernels->backward(q, job.layout, job.space, unit / job.space.blocks / p.ngroups, group, block, scratch.get());
        }
    }
}

int32_t run_backward(const MambaMamba3Backward& q, const Mamba3Kernels& kernels) {
    const MambaMamba3& p = q.forward;
    const BackwardPlan plan = plan_backward(p, kernels);
    const int64_t threads = useful_threads(p, kBackwardWorkPerThread);
    BackwardJob job;
    job.params = &q;
    job.kernels = &kernels;
    job.layout = mamba3_layout(p);
    job.out_of_memory = false;
    job.space.blocks = plan.blocks;
    job.space.block_heads = plan.block_heads;
    job.space.slots = plan.slots;
    job.space.sum_floats = plan.sum_floats;
    job.space.matrices = static_cast<float*>(p.workspace);
    job.space.angles = job.space.matrices + plan.matrices;
    job.space.sums = job.space.angles + plan.angles;
    job.adds_up = false;
    job.units = plan.slots * p.ngroups * plan.blocks;
    job.shares = at_most(threads, job.units);
    run_shares(job.shares, run_backward_share, &job);
    job.adds_up = true;
    const int64_t windows = p.batch * ceil_div(row_steps(p), window_of(p));
    job.units = (p.ngroups + (p.angles_of_heads != 0 ? 0 : 1)) * windows + p.nheads;
    job.shares = at_most(threads, job.units);
    if (!job.out_of_memory) {
        run_shares(job.shares, run_backward_share, &job);
    }
    return job.out_of_memory ? no_memory("mamba3_backward", p) : MAMBA_OK;
}

// ---- step ------------------------------------------------------------------------------------------------------------

struct StepJob {
    const MambaMamba3Step* params;
    const Mamba3Kernels* kernels;
    Mamba3Layout layout;
    int64_t shares;
    std::atomic<bool> out_of_memory;
};

void run_step_share(void* context, int64_t share) {
    StepJob& job = *static_cast<StepJob*>(context);
    const MambaMamba3& p = job.params->scan;
    const int64_t units = p.batch * p.nheads;
    const int64_t begin = share_begin(units, job.shares, share), end = share_begin(units, job.shares, share + 1);
    const Scratch scratch(job.kernels->step_scratch(p, job.layout));
    if (scratch.get() == nullptr) {
        job.out_of_memory = true;
        return;
    }
    job.kernels->step(*job.params, job.layout, begin, end, scratch.get());
}

int32_t run_step(const MambaMamba3Step& q, const Mamba3Kernels& kernels) {
    StepJob job;
    job.params = &q;
    job.kernels = &kernels;
    job.layout = mamba3_layout(q.scan);
    job.out_of_memory = false;
    job.shares = at_most(useful_threads(q.scan, kForwardWorkPerThread), q.scan.batch * q.scan.nheads);
    run_shares(job.shares, run_step_share, &job);
    return job.out_of_memory ? no_memory("mamba3_step", q.scan) : MAMBA_OK;
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_mamba3_forward(const MambaMamba3* params) {
    const char* const function = "mamba3_forward";
    int32_t status = check_mamba3_forward(function, params);
    if (status != MAMBA_OK || mamba3_is_empty(*params)) {
        return status;
    }
    Isa isa;
    status = check_cu_seqlens(function, *params);
    status = status != MAMBA_OK ? status : begin_call(function, params->run, &isa);
    return status != MAMBA_OK ? status : run_forward(*params, mamba3_kernels(isa));
}

int32_t mamba_mamba3_backward(const MambaMamba3Backward* params) {
    const char* const function = "mamba3_backward";
    int32_t status = check_mamba3_backward(function, params);
    if (status != MAMBA_OK || mamba3_is_empty(params->forward)) {
        return status;
    }
    const int64_t bytes = mamba_mamba3_backward_workspace(&params->forward);
    Check check(function);
    check.that(bytes == 0 || params->forward.workspace != nullptr, MAMBA_ERROR_INVALID,
               "workspace is NULL, this problem needs %lld bytes", static_cast<long long>(bytes));
    Isa isa;
    status = check.ok() ? check_cu_seqlens(function, params->forward) : check.status();
    status = status != MAMBA_OK ? status : begin_call(function, params->forward.run, &isa);
    return status != MAMBA_OK ? status : run_backward(*params, mamba3_kernels(isa));
}

int32_t mamba_mamba3_step(const MambaMamba3Step* params) {
    const char* const function = "mamba3_step";
    int32_t status = check_mamba3_step(function, params);
    if (status != MAMBA_OK || mamba3_is_empty(params->scan)) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->scan.run, &isa);
    return status != MAMBA_OK ? status : run_step(*params, mamba3_kernels(isa));
}

int64_t mamba_mamba3_forward_workspace(const MambaMamba3* params) {
    check_mamba3_problem("mamba3_forward_workspace", params);
    return 0;
}

int64_t mamba_mamba3_backward_workspace(const MambaMamba3* params) {
    if (check_mamba3_problem("mamba3_backward_workspace", params) != MAMBA_OK || mamba3_is_empty(*params)) {
        return 0;
    }
    const BackwardPlan plan = plan_backward(*params, generic::mamba3_kernels);  // sizes are the same with all
    return (plan.matrices + plan.angles + plan.sums) * static_cast<int64_t>(sizeof(float));
}
