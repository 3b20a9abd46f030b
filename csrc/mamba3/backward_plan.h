// How Mamba-3's backward scan runs on CUDA: chunks, workspace, and how blocks share the work.
#pragma once

#include "mamba3/backward_kernels.h"

namespace mamba {

// Offsets in bytes. Heads of a launch: those of one window.
struct Mamba3BackwardWorkspace {
    int64_t states;              // (slots, heads of a launch, P, N) of T: before each chunk; with warpgroups as tiles
    int64_t dstates;             // the same: gradient after each chunk
    int64_t q, k;                // (slots, heads of a launch, rows of a chunk, N) of T: rotated, in the order of tiles
    int64_t cos_sin;             // (slots, heads of a launch, steps of a chunk, S) float2; these three not with warpgroups
    int64_t dy;                  // (B, L, R, heads of a launch, P) of T: gradient of the scan's rows
    int64_t dq_parts, dk_parts;  // (splits, B, L, R, G, N) float, in the order of tiles, unless blocks write them whole
    int64_t step_terms;          // (row tiles, B, L, H) float4
    int64_t dturns;              // (slots, H, steps of a chunk, S) float: what a step's rows give to its angles
    int64_t angle_totals;        // (slots, H, S) float: of what reaches the chunk's first step
    int64_t angle_carry;         // (slots, H, S) float: what later chunks add
    int64_t turned;              // (32 angles each, B, L, H) float: what angles give to the gradient of dt
    int64_t bias;                // (2, row tiles, slots, H, R, N) float
    int64_t mimo_v;              // (slots + U, H, R, P) float
    int64_t mimo_z, mimo_out;    // (ranges, H, R, P) float; with warpgroups (U, H, R, P)
    int64_t norm;                // (ranges, R, H, P) float
    int64_t D;                   // (ranges, H) float; with warpgroups (U, row tiles, H), SISO's (slots, row tiles, H)
    int64_t before;              // (U, H) float: gradient of the scale of the step before a sequence
    int64_t bytes;
};

// The states of a tile of the kernels on warpgroups, and the rows of a chunk that a warp rotates there.
constexpr int kMamba3WarpgroupStates = 128;
constexpr int kMamba3WarpgroupRows = 4;

struct Mamba3BackwardPlan {
    int32_t kernel;  // of kMamba3BackwardKernels
    bool warpgroups;
    Mamba3ChunksPlan chunks;
    int64_t row_tiles;    // of headdim
    int64_t group_heads;  // of each group, in a launch
    int64_t splits;       // blocks that share a chunk and group's heads, of each all rows of headdim
    bool whole;           // a block on warpgroups has all heads of its group, and so writes dq and dk itself
    int64_t ranges;       // of slots, each with its own sums of parameters
    int64_t slots_a_range;
    Mamba3BackwardWorkspace workspace;
};

// Bytes of both states and of the rotated q and k of all chunks that one launch takes: four times those of v, or with several
// ranks, whose chunks are shorter, eight times, but not less than this. On warpgroups a launch of few heads leaves
// multiprocessors without a walk.
constexpr int64_t kMamba3LeastBudget = int64_t{128} << 20;
constexpr int64_t kMamba3LeastWarpgroupBudget = int64_t{1} << 30;

// Elements of one of the states of a head before a chunk.
MAMBA_HOST_DEVICE inline int64_t mamba3_state_size(const MambaMamba3& p, const Mamba3BackwardPlan& plan) {
    return plan.warpgroups ? plan.row_tiles * kMamba3StateRows * kMamba3WarpgroupStates : p.headdim * p.dstate;
}

// Floats from one step of `dturns` to the next.
MAMBA_HOST_DEVICE inline int64_t mamba3_dturns_pitch(const MambaMamba3& p) {
    return round_up(p.nangles, 4);
}

// Partial sums of D's gradient, (parts, H), and of those of mimo_z and mimo_out, (parts, H, R, P).
inline int64_t mamba3_D_parts(const MambaMamba3& p, const Mamba3BackwardPlan& plan) {
    const int64_t walked = p.rank == 1 ? plan.chunks.chunks.slots : p.sequences;
    return plan.warpgroups ? walked * plan.row_tiles : plan.ranges;
}
inline int64_t mamba3_projection_parts(const MambaMamba3& p, const Mamba3BackwardPlan& plan) {
    return plan.warpgroups ? p.sequences : plan.ranges;
}

inline void plan_mamba3_workspace(const MambaMamba3& p, Mamba3BackwardPlan& plan) {
    Mamba3BackwardWorkspace& w = plan.workspace;
    const Mamba3Chunks& chunks = plan.chunks.chunks;
    const int64_t size = dtype_size(p.dtype), all_steps = p.batch * p.seqlen, rows = all_steps * p.rank;
    const int64_t launch_heads = plan.group_heads * p.ngroups, tiles = plan.row_tiles, slots = chunks.slots;
    const int64_t states = slots * launch_heads * mamba3_state_size(p, plan) * size;
    const int64_t rotated_steps = plan.warpgroups ? 0 : slots * launch_heads * chunks.steps;
    const int64_t matrix = plan.whole ? 0 : plan.splits * rows * p.ngroups * p.dstate * 4;
    const int64_t turns = slots * p.nheads * p.nangles * 4;
    const int64_t projection = p.nheads * p.rank * p.headdim * 4;
    int64_t& total = w.bytes;
    w.states = mamba3_reserve(total, states);
    w.dstates = mamba3_reserve(total, states);
    w.q = mamba3_reserve(total, rotated_steps * p.rank * p.dstate * size);
    w.k = mamba3_reserve(total, rotated_steps * p.rank * p.dstate * size);
    w.cos_sin = mamba3_reserve(total, rotated_steps * p.nangles * 8);
    w.dy = mamba3_reserve(total, rows * launch_heads * p.headdim * size);
    w.dq_parts = mamba3_reserve(total, matrix);
    w.dk_parts = mamba3_reserve(total, matrix);
    w.step_terms = mamba3_reserve(total, tiles * all_steps * p.nheads * 16);
    // finish_angles reads steps by eight.
    w.dturns = mamba3_reserve(total, (slots * p.nheads * chunks.steps + 8) * mamba3_dturns_pitch(p) * 4);
    w.angle_totals = mamba3_reserve(total, turns);
    w.angle_carry = mamba3_reserve(total, turns);
    w.turned = mamba3_reserve(total, ceil_div(p.nangles, 32) * all_steps * p.nheads * 4);
    w.bias = mamba3_reserve(total, 2 * tiles * slots * p.nheads * p.rank * p.dstate * 4);
    w.mimo_v = mamba3_reserve(total, p.mimo_v != nullptr ? (slots + p.sequences) * projection : 0);
    w.mimo_z = mamba3_reserve(total, p.mimo_z != nullptr ? mamba3_projection_parts(p, plan) * projection : 0);
    w.mimo_out = mamba3_reserve(total, p.mimo_out != nullptr ? mamba3_projection_parts(p, plan) * projection : 0);
    w.norm = mamba3_reserve(total, p.norm_weight != nullptr ? plan.ranges * projection : 0);
    w.D = mamba3_reserve(total, mamba3_D_parts(p, plan) * p.nheads * 4);
    w.before = mamba3_reserve(total, p.sequences * p.nheads * 4);
}

// How many blocks share a chunk and group's heads: what takes the least time, counted in heads. The last launch may have fewer
// than the others, and no launch fewer than blocks share.
inline int64_t mamba3_backward_splits(const MambaMamba3& p, const Mamba3BackwardPlan& plan, int64_t processors) {
    const int64_t heads_of_group = p.nheads / p.ngroups, launches = ceil_div(heads_of_group, plan.group_heads);
    const int64_t heads = heads_of_group - (launches - 1) * plan.group_heads;
    const int64_t chunk_groups = plan.chunks.chunks.slots * p.ngroups;
    int64_t best = 1, least = 0;
    for (int64_t splits = 1; splits <= heads && splits <= processors && chunk_groups > 0; ++splits) {
        const int64_t time = ceil_div(chunk_groups * splits, processors) * (ceil_div(heads, splits) + 1);
        if (splits == 1 || time < least) {
            best = splits;
            least = time;
        }
    }
    return best;
}

// With the row `kernel` of the table.
inline Mamba3BackwardPlan plan_mamba3_backward(const MambaMamba3& p, int32_t kernel, const DeviceLimits& device) {
    const Mamba3BackwardKernel& row = kMamba3BackwardKernels[kernel];
    Mamba3BackwardPlan plan = {};
    plan.kernel = kernel;
    plan.warpgroups = row.warpgroup_ranks > 0;
    plan.chunks = Mamba3ChunksPlan(p, row.rows / p.rank, kMamba3BackwardArrays, plan.workspace.bytes,
                                   plan.warpgroups ? kMamba3WarpgroupRows / p.rank : 0);
    const int64_t slots = plan.chunks.chunks.slots, heads_of_group = p.nheads / p.ngroups, size = dtype_size(p.dtype);
    plan.row_tiles = ceil_div(p.headdim, row.inner);

    const int64_t rotated = plan.warpgroups ? 0 : plan.chunks.chunks.steps * (2 * p.rank * p.dstate * size + 8 * p.nangles);
    const int64_t head_bytes = slots * p.ngroups * (2 * mamba3_state_size(p, plan) * size + rotated);
    const int64_t some_v = (p.rank > 1 ? 8 : 4) * p.batch * p.seqlen * p.nheads * p.headdim * size;
    const int64_t least = plan.warpgroups ? kMamba3LeastWarpgroupBudget : kMamba3LeastBudget;
    const int64_t budget = some_v > least ? some_v : least;
    plan.group_heads = heads_of_group;
    if (head_bytes * heads_of_group > budget) {
        const int64_t fit = budget / head_bytes > 1 ? budget / head_bytes : 1;
        plan.group_heads = ceil_div(heads_of_group, ceil_div(heads_of_group, fit));
    }
    plan.splits = mamba3_backward_splits(p, plan, device.processors);
    plan.whole = plan.warpgroups && plan.splits == 1 && plan.group_heads == heads_of_group;
    // A range of slots for each of 16 blocks a multiprocessor, one after the other.
    const int64_t wanted = ceil_div(slots * p.nheads, 16 * device.processors);
    plan.slots_a_range = wanted > 8 ? 8 : wanted > 1 ? wanted : 1;
    plan.ranges = ceil_div(slots, plan.slots_a_range);
    plan_mamba3_workspace(p, plan);
    return plan;
}

// What a call with any gradients of the output needs: the row depends on how these are aligned.
inline int64_t mamba3_backward_workspace_bytes(const MambaMamba3& p, const DeviceLimits& device) {
    MambaMamba3Backward q = {};
    q.forward = p;
    const int64_t aligned = plan_mamba3_backward(p, choose_mamba3_backward(q, device), device).workspace.bytes;
    q.dout = &p;
    q.dout_len_stride = 1;
    const int64_t unaligned = plan_mamba3_backward(p, choose_mamba3_backward(q, device), device).workspace.bytes;
    return aligned > unaligned ? aligned : unaligned;
}

}  // namespace mamba
