// Mamba-2's scan of mamba_cpu: checks, the choice of instruction set, and the split of the work over threads.
#include <string.h>

#include <atomic>

#include "common/cpu_runtime.h"
#include "ssd/check.h"
#include "ssd/cpu/kernels.h"

namespace mamba {
namespace {

// Steps x channels x (states + their share of what is done within a chunk) that one thread finishes in about 100 us, several
// times what starting a thread costs.
constexpr int64_t kForwardWorkPerThread = 1 << 21;
constexpr int64_t kBackwardWorkPerThread = 1 << 19;
// Backward takes so many heads (and batch entries) at a time as need this much memory for their states, 16 MB ...
constexpr int64_t kBackwardFloats = 1 << 22;
// ... but no fewer, for the threads' sake. Not as many as there are threads: results do not depend on their number.
constexpr int64_t kBackwardRows = 8;

const SsdKernels& ssd_kernels(Isa isa) {
    return kernels_of(isa, generic::ssd_kernels, avx2::ssd_kernels, avx512::ssd_kernels);
}

int64_t useful_threads(const MambaSsd& p, int64_t heads, int64_t work_per_thread) {
    const int64_t work = heads * p.seqlen * p.headdim * (p.dstate + kSsdChunk / 4);
    return worthwhile_threads(p.run, work, work_per_thread);
}

int64_t at_most(int64_t value, int64_t limit) {
    return value < limit ? value : limit;
}

int32_t no_memory(const char* function, const MambaSsd& p) {
    return fail(MAMBA_ERROR_MEMORY, "%s: no memory for scratch space with headdim=%lld dstate=%lld", function,
                static_cast<long long>(p.headdim), static_cast<long long>(p.dstate));
}

// Positions in host memory can be looked at.
int32_t check_cu_seqlens(const char* function, const MambaSsd& p) {
    Check check(function);
    for (int64_t b = 0; b < p.batch && p.cu_seqlens != nullptr; ++b) {
        const int32_t begin = p.cu_seqlens[b], end = p.cu_seqlens[b + 1];
        check.that(begin >= 0 && end >= begin && end <= p.seqlen, MAMBA_ERROR_INVALID,
                   "cu_seqlens must rise from 0 or more to seqlen=%lld at most, but sequence %lld is from %d to %d",
                   static_cast<long long>(p.seqlen), static_cast<long long>(b), static_cast<int>(begin), static_cast<int>(end));
    }
    return check.status();
}

// ---- forward ---------------------------------------------------------------------------------------------------------

// Units are heads of all batch entries, in that order; where these are fewer than threads, parts of heads.
struct ForwardJob {
    const MambaSsd* params;
    const SsdKernels* kernels;
    int64_t parts, part_columns;
    int64_t units, shares;
    std::atomic<bool> out_of_memory;
};

void run_forward_share(void* context, int64_t share) {
    ForwardJob& job = *static_cast<ForwardJob*>(context);
    const MambaSsd& p = *job.params;
    const int64_t begin = share_begin(job.units, job.shares, share), end = share_begin(job.units, job.shares, share + 1);
    const int64_t group_heads = p.nheads / p.ngroups;
    const int64_t most_heads = job.parts > 1 ? 1 : at_most(at_most(end - begin, kSsdSegmentHeads), group_heads);
    const Scratch scratch(job.kernels->forward_scratch(p, most_heads, job.part_columns));
    if (scratch.get() == nullptr) {
        job.out_of_memory = true;
        return;
    }
    for (int64_t unit = begin; unit < end;) {
        const int64_t head = unit / job.parts % p.nheads;
        SsdSegment segment;
        segment.batch = unit / job.parts / p.nheads;
        segment.head = head;
        segment.heads = at_most(at_most(end - unit, most_heads), group_heads - head % group_heads);
        segment.column = unit % job.parts * job.part_columns;
        segment.columns = at_most(job.part_columns, p.headdim - segment.column);
        job.kernels->forward(p, segment, scratch.get());
        unit += segment.heads;
    }
}

int32_t run_forward(const MambaSsd& p, const SsdKernels& kernels) {
    ForwardJob job;
    job.params = &p;
    job.kernels = &kernels;
    job.out_of_memory = false;
    const int64_t heads = p.batch * p.nheads;
    const int64_t threads = useful_threads(p, p.cu_seqlens != nullptr ? p.nheads : heads, kForwardWorkPerThread);
    const int64_t lanes = kernels.lanes, blocks = ceil_div(p.headdim, lanes);
    const int64_t part_blocks = ceil_div(blocks * heads, threads);
    job.part_columns = heads >= threads || part_blocks >= blocks ? p.headdim : part_blocks * lanes;
    job.parts = ceil_div(p.headdim, job.part_columns);
    job.units = heads * job.parts;
    job.shares = at_most(threads, job.units);
    run_shares(job.shares, run_forward_share, &job);
    return job.out_of_memory ? no_memory("ssd_forward", p) : MAMBA_OK;
}

// ---- backward --------------------------------------------------------------------------------------------------------

// Memory of a backward call, in floats: the totals (doubles), and SsdBackwardSpace for as many heads and entries as are worked
// on together. With fewer heads than there are, one entry.
struct BackwardPlan {
    int64_t chunks, heads, entries;
    int64_t totals, states, gradients, partial, sums;
};

BackwardPlan plan_backward(const MambaSsd& p) {
    BackwardPlan plan;
    plan.chunks = ceil_div(p.seqlen, kSsdChunk);
    const int64_t states = plan.chunks * p.headdim * row_pitch(p.dstate);
    const int64_t gradients = plan.chunks * p.dstate * row_pitch(p.headdim);
    const int64_t fitting = states > 0 ? kBackwardFloats / (states + gradients) : p.batch * p.nheads;
    const int64_t rows = fitting > kBackwardRows ? fitting : kBackwardRows;
    plan.heads = at_most(rows, p.nheads);
    plan.entries = at_most(rows / plan.heads, p.batch);
    plan.totals = row_pitch(2 * p.nheads * (2 + p.headdim));
    plan.states = plan.entries * plan.heads * states;
    plan.gradients = plan.entries * plan.heads * gradients;
    plan.partial = plan.heads < p.nheads ? p.ngroups * plan.chunks * 2 * kSsdChunk * row_pitch(p.dstate) : 0;
    plan.sums = row_pitch(p.batch * plan.chunks * p.nheads * (2 + p.headdim));
    return plan;
}

struct BackwardJob {
    const MambaSsdBackward* params;
    const SsdKernels* kernels;
    SsdBackwardSpace space;
    int64_t entries, first_group, groups;
    bool states;  // first pass
    int64_t units, shares;
    std::atomic<bool> out_of_memory;
};

void run_backward_share(void* context, int64_t share) {
    BackwardJob& job = *static_cast<BackwardJob*>(context);
    const MambaSsdBackward& q = *job.params;
    const SsdBackwardSpace& space = job.space;
    const int64_t begin = share_begin(job.units, job.shares, share), end = share_begin(job.units, job.shares, share + 1);
    const Scratch scratch(job.kernels->backward_scratch(q.forward));
    if (scratch.get() == nullptr) {
        job.out_of_memory = true;
        return;
    }
    for (int64_t unit = begin; unit < end; ++unit) {
        if (job.states) {
            const int64_t rows = job.entries * space.heads, row = unit % rows;
            const auto pass = unit < rows ? job.kernels->backward_states : job.kernels->backward_gradients;
            pass(q, space, space.first_batch + row / space.heads, space.first_head + row % space.heads, scratch.get());
        } else {
            const int64_t group_unit = unit / space.chunks;
            job.kernels->backward_chunk(q, space, space.first_batch + group_unit / job.groups,
                                        job.first_group + group_unit % job.groups, unit % space.chunks, scratch.get());
        }
    }
}

// Both passes for the heads and entries of job.space.
void run_passes(BackwardJob& job) {
    const MambaSsd& p = job.params->forward;
    const int64_t threads = useful_threads(p, job.entries * job.space.heads, kBackwardWorkPerThread);
    job.states = true;
    job.units = 2 * job.entries * job.space.heads;
    job.shares = at_most(threads, job.units);
    run_shares(job.shares, run_backward_share, &job);
    job.states = false;
    job.units = job.entries * job.groups * job.space.chunks;
    job.shares = at_most(threads, job.units);
    if (job.units > 0 && !job.out_of_memory) {
        run_shares(job.shares, run_backward_share, &job);
    }
}

// dA, ddt_bias and dD from the chunks' sums, always in the same order.
void add_up(const MambaSsdBackward& q, const SsdBackwardSpace& space, double* totals) {
    const MambaSsd& p = q.forward;
    const int64_t width = 2 + p.headdim, row = p.nheads * width, used = p.D != nullptr ? width : 2;
    for (int64_t i = 0; i < row; ++i) {
        totals[i] = 0.0;
    }
    for (int64_t part = 0; part < p.batch * space.chunks; ++part) {
        for (int64_t head = 0; head < p.nheads; ++head) {
            const float* sums = space.sums + part * row + head * width;
            for (int64_t i = 0; i < used; ++i) {
                totals[head * width + i] += static_cast<double>(sums[i]);
            }
        }
    }
    for (int64_t head = 0; head < p.nheads; ++head) {
        const double* total = totals + head * width;
        q.dA[head] = static_cast<float>(total[0]);
        if (p.dt_bias != nullptr) {
            q.ddt_bias[head] = static_cast<float>(total[1]);
        }
        if (p.D != nullptr && p.D_dim_stride != 0) {
            for (int64_t i = 0; i < p.headdim; ++i) {
                q.dD[head * p.headdim + i] = static_cast<float>(total[2 + i]);
            }
        } else if (p.D != nullptr) {
            double sum = 0.0;
            for (int64_t i = 0; i < p.headdim; ++i) {
                sum += total[2 + i];
            }
            q.dD[head] = static_cast<float>(sum);
        }
    }
}

int32_t run_backward(const MambaSsdBackward& q, const SsdKernels& kernels) {
    const MambaSsd& p = q.forward;
    const BackwardPlan plan = plan_backward(p);
    BackwardJob job;
    job.params = &q;
    job.kernels = &kernels;
    job.out_of_memory = false;
    // The totals come first: doubles, at the workspace's alignment.
    double* totals = static_cast<double*>(p.workspace);
    job.space.chunks = plan.chunks;
    job.space.states = static_cast<float*>(p.workspace) + plan.totals;
    job.space.gradients = job.space.states + plan.states;
    job.space.partial = job.space.gradients + plan.gradients;
    job.space.sums = job.space.partial + plan.partial;
    const int64_t group_heads = p.nheads / p.ngroups;
    for (int64_t batch = 0; batch < p.batch; batch += plan.entries) {
        job.space.first_batch = batch;
        job.entries = at_most(plan.entries, p.batch - batch);
        for (int64_t head = 0; head < p.nheads && !job.out_of_memory; head += plan.heads) {
            job.space.first_head = head;
            job.space.heads = at_most(plan.heads, p.nheads - head);
            job.first_group = head / group_heads;
            job.groups = ceil_div(head + job.space.heads, group_heads) - job.first_group;
            run_passes(job);
        }
    }
    if (job.out_of_memory) {
        return no_memory("ssd_backward", p);
    }
    add_up(q, job.space, totals);
    return MAMBA_OK;
}

// ---- pieces ----------------------------------------------------------------------------------------------------------

// Elements of states that one thread takes through a piece in about 100 us.
constexpr int64_t kCarryWorkPerThread = 1 << 18;
constexpr int64_t kCarryElements = 256;  // taken through all pieces together

struct CarryJob {
    const MambaSsdCarry* params;
    int64_t units, shares;  // a unit is a head of a batch entry
};

// Elements first .. first + count - 1 of a head's state.
void carry_elements(const MambaSsdCarry& p, int64_t unit, int64_t first, int64_t count) {
    const int64_t batch = unit / p.nheads, head = unit % p.nheads;
    const float* const passed = p.passed + batch * p.passed_batch_stride + head * p.state_size + first;
    const float* const factors = p.factors + batch * p.factors_batch_stride + head * p.factors_head_stride;
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    float state[kCarryElements] = {};
    if (p.initial != nullptr) {
        memcpy(state, p.initial + unit * p.state_size + first, bytes);
    }
    for (int64_t k = 0; k < p.pieces; ++k) {
        const int64_t piece = p.reverse ? p.pieces - 1 - k : k;
        const float* const end = passed + piece * p.passed_piece_stride;
        const float factor = factors[piece * p.factors_piece_stride];
        if (p.before != nullptr) {
            memcpy(p.before + ((batch * p.pieces + piece) * p.nheads + head) * p.state_size + first, state, bytes);
        }
        for (int64_t i = 0; i < count; ++i) {
            // A state of zero stays zero even where the factor has overflowed, as it would step by step.
            state[i] = state[i] == 0.0f ? end[i] : factor * state[i] + end[i];
        }
    }
    if (p.last != nullptr) {
        memcpy(p.last + unit * p.state_size + first, state, bytes);
    }
}

float product_of_factors(const MambaSsdCarry& p, int64_t unit) {
    const float* const factors = p.factors + unit / p.nheads * p.factors_batch_stride + unit % p.nheads * p.factors_head_stride;
    float product = 1.0f;
    for (int64_t piece = 0; piece < p.pieces; ++piece) {
        product *= factors[piece * p.factors_piece_stride];
    }
    return product;
}

void run_carry_share(void* context, int64_t share) {
    const CarryJob& job = *static_cast<const CarryJob*>(context);
    const MambaSsdCarry& p = *job.params;
    const int64_t end = share_begin(job.units, job.shares, share + 1);
    for (int64_t unit = share_begin(job.units, job.shares, share); unit < end; ++unit) {
        for (int64_t first = 0; first < p.state_size; first += kCarryElements) {
            carry_elements(p, unit, first, at_most(kCarryElements, p.state_size - first));
        }
        if (p.product != nullptr) {
            p.product[unit] = product_of_factors(p, unit);
        }
    }
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_ssd_forward(const MambaSsd* params) {
    const char* const function = "ssd_forward";
    int32_t status = check_ssd_forward(function, params);
    if (status != MAMBA_OK || ssd_forward_is_empty(*params)) {
        return status;
    }
    Isa isa;
    status = check_cu_seqlens(function, *params);
    status = status != MAMBA_OK ? status : begin_call(function, params->run, &isa);
    return status != MAMBA_OK ? status : run_forward(*params, ssd_kernels(isa));
}

int32_t mamba_ssd_backward(const MambaSsdBackward* params) {
    const char* const function = "ssd_backward";
    int32_t status = check_ssd_backward(function, params);
    if (status != MAMBA_OK || ssd_is_empty(params->forward)) {
        return status;
    }
    Isa isa;
    status = check_ssd_workspace(function, params->forward, mamba_ssd_backward_workspace(&params->forward));
    status = status != MAMBA_OK ? status : begin_call(function, params->forward.run, &isa);
    return status != MAMBA_OK ? status : run_backward(*params, ssd_kernels(isa));
}

int64_t mamba_ssd_forward_workspace(const MambaSsd*) {
    return 0;
}

int64_t mamba_ssd_backward_workspace(const MambaSsd* params) {
    if (check_ssd_problem("ssd_backward_workspace", params) != MAMBA_OK || ssd_is_empty(*params)) {
        return 0;
    }
    const BackwardPlan plan = plan_backward(*params);
    return (plan.totals + plan.states + plan.gradients + plan.partial + plan.sums) * static_cast<int64_t>(sizeof(float));
}

int32_t mamba_ssd_carry(const MambaSsdCarry* params) {
    const char* const function = "ssd_carry";
    int32_t status = check_ssd_carry(function, params);
    if (status != MAMBA_OK || ssd_carry_is_empty(*params)) {
        return status;
    }
    Isa isa;
    status = begin_call(function, params->run, &isa);
    if (status != MAMBA_OK) {
        return status;
    }
    const MambaSsdCarry& p = *params;
    CarryJob job;
    job.params = &p;
    job.units = p.batch * p.nheads;
    job.shares = at_most(worthwhile_threads(p.run, job.units * p.pieces * p.state_size, kCarryWorkPerThread), job.units);
    run_shares(job.shares, run_carry_share, &job);
    return MAMBA_OK;
}
