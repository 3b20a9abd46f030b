// How Mamba-3's backward scan runs on CUDA: chunks, workspace, and how blocks share the work.
#pragma once

#include "mamba3/backward_layouts.h"
#include "mamba3/plan.h"

namespace mamba {

// Offsets in bytes. Heads of a launch: those of one window.
struct Mamba3BackwardWorkspace {
    int64_t states;            // (slots, heads of a launch, P, N) of T: before each chunk; with warpgroups as tiles
    int64_t dstates;           // the same: gradient after each chunk
    int64_t dy;                // (B, L, R, heads of a launch, P) of T: gradient of the scan's rows
    int64_t dq, dk;            // (splits, B, L, R, G, N) float, in the order of tiles, unless they are whole
    int64_t step_terms;        // (row tiles, B, L, H) float4
    int64_t angle_totals;      // (row tiles, slots, H, S) float: of what reaches the chunk's first step
    int64_t angle_carry;       // (slots, H, S) float: what later chunks add
    int64_t dangles;           // (splits G, B, L, S) float, or (row tiles, B, L, H, S)
    int64_t bias;              // (2, row tiles, slots, H, R, N) float
    int64_t mimo_v;            // (slots + U, H, R, P) float
    int64_t mimo_z, mimo_out;  // (ranges, H, R, P) float, or what kMamba3GateBack leaves
    int64_t norm;              // (ranges, R, H, P) float
    int64_t D;                 // (ranges, H) float, or what kMamba3GateBack leaves
    int64_t before;            // (U, H) float: gradient of the scale of the step before a sequence
    int64_t bytes;
};

// Of Mamba3BackwardLayouts.
enum Mamba3BackwardLayout { kBackwardSmall, kBackwardMiddle, kBackwardLarge, kBackwardLittle, kBackwardLeast };

// Most ranks of backward_warpgroup.cuh, the states that it counts, and the rows of a chunk that a warp turns.
constexpr int kMamba3WarpgroupRank = 4;
constexpr int kMamba3WarpgroupStates = 128;
constexpr int kMamba3WarpgroupRows = 4;

struct Mamba3BackwardPlan {
    Mamba3BackwardLayout layout;
    bool warpgroups;  // runs backward_warpgroup.cuh, and for states the passes of forward_warpgroup.cuh
    int rows, inner;  // of it
    Mamba3ChunksPlan chunks;
    int64_t row_tiles;    // of headdim
    int64_t group_heads;  // of each group, in a launch
    int64_t splits;       // blocks that share a chunk and group's heads
    bool whole;           // a block of backward_warpgroup.cuh has all heads of its group, and so writes dq and dk itself
    int64_t ranges;       // of slots, each with its own sums of parameters
    int64_t slots_a_range;
    Mamba3BackwardWorkspace workspace;
    cudaError_t error;
};

template <class Tiles>
void set_sizes(Mamba3BackwardPlan& plan) {
    plan.rows = Tiles::kRows;
    plan.inner = Tiles::kInner;
}
template <typename T>
void set_layout_sizes(Mamba3BackwardPlan& plan) {
    using Layouts = Mamba3BackwardLayouts<T>;
    switch (plan.layout) {
        case kBackwardSmall:
            return set_sizes<typename Layouts::Small>(plan);
        case kBackwardMiddle:
            return set_sizes<typename Layouts::Middle>(plan);
        case kBackwardLarge:
            return set_sizes<typename Layouts::Large>(plan);
        case kBackwardLittle:
            return set_sizes<typename Layouts::Little>(plan);
        default:
            return set_sizes<typename Layouts::Least>(plan);
    }
}

// Shared memory a block that the first three layouts may take.
constexpr int kMamba3BackwardShared = 220 * 1024;
// And backward_warpgroup.cuh.
constexpr int kMamba3WarpgroupShared = 227 * 1024;

// Bytes of both states of all chunks that one launch takes: four times those of v, or with several ranks, whose chunks are
// shorter, eight times, but not less than this.
constexpr int64_t kMamba3LeastBudget = int64_t{64} << 20;

// Elements of one of the states of a head before a chunk.
MAMBA_HOST_DEVICE inline int64_t mamba3_state_size(const MambaMamba3& p, const Mamba3BackwardPlan& plan) {
    return plan.warpgroups ? plan.row_tiles * kMamba3StateRows * kMamba3WarpgroupStates : p.headdim * p.dstate;
}

inline void plan_mamba3_workspace(const MambaMamba3& p, Mamba3BackwardPlan& plan) {
    Mamba3BackwardWorkspace& w = plan.workspace;
    const int64_t size = dtype_size(p.dtype), all_steps = p.batch * p.seqlen, rows = all_steps * p.rank;
    const int64_t launch_heads = plan.group_heads * p.ngroups, tiles = plan.row_tiles, slots = plan.chunks.chunks.slots;
    const int64_t states = slots * launch_heads * mamba3_state_size(p, plan) * size;
    const int64_t matrix = plan.whole ? 0 : plan.splits * rows * p.ngroups * p.dstate * 4;
    const int64_t turns = slots * p.nheads * p.nangles * 4;
    const int64_t projection = p.nheads * p.rank * p.headdim * 4;
    int64_t& total = w.bytes;
    w.states = mamba3_reserve(total, states);
    w.dstates = mamba3_reserve(total, states);
    w.dy = mamba3_reserve(total, rows * launch_heads * p.headdim * size);
    w.dq = mamba3_reserve(total, matrix);
    w.dk = mamba3_reserve(total, matrix);
    w.step_terms = mamba3_reserve(total, tiles * all_steps * p.nheads * 16);
    w.angle_totals = mamba3_reserve(total, tiles * turns);
    w.angle_carry = mamba3_reserve(total, turns);
    w.dangles = mamba3_reserve(
        total, (p.angles_of_heads != 0 ? tiles * p.nheads : plan.splits * p.ngroups) * all_steps * p.nangles * 4);
    w.bias = mamba3_reserve(total, 2 * tiles * slots * p.nheads * p.rank * p.dstate * 4);
    w.mimo_v = mamba3_reserve(total, p.mimo_v != nullptr ? (slots + p.sequences) * projection : 0);
    const int64_t parts = plan.ranges > p.sequences ? plan.ranges : p.sequences;
    w.mimo_z = mamba3_reserve(total, p.mimo_z != nullptr ? parts * projection : 0);
    w.mimo_out = mamba3_reserve(total, p.mimo_out != nullptr ? parts * projection : 0);
    w.norm = mamba3_reserve(total, p.norm_weight != nullptr ? plan.ranges * projection : 0);
    const int64_t walks = p.sequences * tiles;
    w.D = mamba3_reserve(total, (plan.ranges > walks ? plan.ranges : walks) * p.nheads * 4);
    w.before = mamba3_reserve(total, p.sequences * p.nheads * 4);
}

// Whether a call of kBackwardMiddle runs backward_warpgroup.cuh.
inline cudaError_t choose_mamba3_backward_warpgroups(const MambaMamba3& p, bool* warpgroups) {
    const cudaError_t error = mamba3_has_warpgroups(p, warpgroups);
    const bool rank = p.rank <= kMamba3WarpgroupRank && (p.rank & (p.rank - 1)) == 0;
    *warpgroups = *warpgroups && mamba3_warpgroups_fit(p) && rank && p.angles_of_heads == 0;
    return error;
}

// Whether one walk finds the states and goes back through the gate: kMamba3GateBack.
inline bool mamba3_gates_back(const MambaMamba3Backward& q, const Mamba3BackwardPlan& plan) {
    const MambaMamba3& p = q.forward;
    const int64_t size = dtype_size(p.dtype);
    const bool plain = p.pairwise != 0 && p.mimo_v == nullptr && p.mimo_z == nullptr && p.mimo_out == nullptr;
    const bool ranks = p.pairwise == 0 && p.rank == 4 && p.mimo_v != nullptr && p.mimo_z != nullptr && p.mimo_out != nullptr;
    return plan.warpgroups && (plain || ranks) && p.z != nullptr && p.norm_weight == nullptr &&
           rows_aligned(p.z, size, 16, p.z_batch_stride, p.z_len_stride, p.z_head_stride) &&
           rows_aligned(q.dout, size, plain ? 4 : 16, q.dout_batch_stride, q.dout_len_stride, q.dout_head_stride) &&
           rows_aligned(q.dz, size, 16, p.headdim, q.dz_step_stride);
}
// Whether forward_ranks_warpgroup.cuh does, of four ranks.
inline bool mamba3_ranks_gate_back(const MambaMamba3Backward& q) {
    const int64_t most = INT32_MAX / kMamba3MostSteps;
    const auto fits = [&](int64_t stride) { return -most <= stride && stride <= most; };
    return mamba3_steps_turn(q.forward) && fits(q.forward.z_len_stride) && fits(q.dout_len_stride);
}
// Parts of D's gradient, (parts, H).
inline int64_t mamba3_D_parts(const MambaMamba3Backward& q, const Mamba3BackwardPlan& plan) {
    return mamba3_gates_back(q, plan) ? q.forward.sequences * plan.row_tiles : plan.ranges;
}
// Of those of mimo_z and mimo_out, (parts, H, R, P).
inline int64_t mamba3_projection_parts(const MambaMamba3Backward& q, const Mamba3BackwardPlan& plan) {
    return mamba3_gates_back(q, plan) ? q.forward.sequences : plan.ranges;
}

inline Mamba3BackwardPlan plan_mamba3_backward(const MambaMamba3& p) {
    Mamba3BackwardPlan plan = {};
    const DeviceLimits device(p.run.device);
    plan.error = device.error;
    if (plan.error != cudaSuccess) {
        return plan;
    }
    if (device.shared >= kMamba3BackwardShared) {
        plan.layout = p.dstate <= 64 ? kBackwardSmall : p.dstate <= 128 ? kBackwardMiddle : kBackwardLarge;
    } else {
        plan.layout = p.dstate <= 128 ? kBackwardLittle : kBackwardLeast;
    }
    if (plan.layout == kBackwardMiddle && device.shared >= kMamba3WarpgroupShared) {
        plan.error = choose_mamba3_backward_warpgroups(p, &plan.warpgroups);
        if (plan.error != cudaSuccess) {
            return plan;
        }
    }
    p.dtype == MAMBA_FLOAT32 ? set_layout_sizes<float>(plan) : set_layout_sizes<__half>(plan);
    const int64_t size = dtype_size(p.dtype), heads_of_group = p.nheads / p.ngroups;
    plan.chunks = Mamba3ChunksPlan(p, plan.rows / p.rank, kMamba3BackwardArrays, plan.workspace.bytes,
                                   plan.warpgroups ? kMamba3WarpgroupRows / p.rank : 0);
    const int64_t slots = plan.chunks.chunks.slots;
    plan.row_tiles = ceil_div(p.headdim, plan.inner);

    const int64_t head_states = 2 * slots * p.ngroups * mamba3_state_size(p, plan) * size;
    const int64_t some_v = (p.rank > 1 ? 8 : 4) * p.batch * p.seqlen * p.nheads * p.headdim * size;
    const int64_t budget = some_v > kMamba3LeastBudget ? some_v : kMamba3LeastBudget;
    plan.group_heads = heads_of_group;
    if (head_states * heads_of_group > budget) {
        const int64_t fit = budget / head_states > 1 ? budget / head_states : 1;
        plan.group_heads = ceil_div(heads_of_group, ceil_div(heads_of_group, fit));
    }
    // No launch may have fewer items than blocks share; the last one may have fewer heads than the others.
    const int64_t launches = ceil_div(heads_of_group, plan.group_heads);
    const int64_t items = (heads_of_group - (launches - 1) * plan.group_heads) * plan.row_tiles;
    const int64_t chunk_groups = slots * p.ngroups;
    int64_t least = 0;
    plan.splits = 1;
    for (int64_t splits = 1; splits <= items && splits <= device.processors && chunk_groups > 0; ++splits) {
        const int64_t time = ceil_div(chunk_groups * splits, device.processors) * (ceil_div(items, splits) + 1);
        if (splits == 1 || time < least) {
            plan.splits = splits;
            least = time;
        }
    }
    plan.whole = plan.warpgroups && plan.splits == 1 && launches == 1;
    // Some blocks a multiprocessor take turns.
    const int64_t wanted = ceil_div(slots * p.nheads, 16 * device.processors);
    plan.slots_a_range = wanted > 8 ? 8 : wanted > 1 ? wanted : 1;
    plan.ranges = ceil_div(slots, plan.slots_a_range);
    plan_mamba3_workspace(p, plan);
    return plan;
}

}  // namespace mamba
