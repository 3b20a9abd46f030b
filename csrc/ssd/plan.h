// How Mamba-2's scan runs on CUDA: layout, segments of the length and workspace.
#pragma once

#include "common/integers.h"
#include "ssd/kernels.h"
#include "ssd/layouts.h"

namespace mamba {

// With that much (9.0 and 10.x) a multiprocessor holds four blocks of the forward kernels without warpgroups, see
// forward_blocks.
constexpr int kRoomyShared = 200 * 1024;

// Forward on warpgroups finds the state at so many places of each segment's length: with one slice the pass that does so would
// not fill the GPU with segments as long as those of the results.
MAMBA_HOST_DEVICE constexpr int ends_a_segment(int slices) {
    return slices > 1 ? 1 : 2;
}

// Which row of the table runs, and what follows from its sizes.
struct SsdPlan {
    int32_t kernel;  // of kSsdForwardKernels or kSsdBackwardKernels
    bool ahead;      // backward.cuh: the next item's tiles are on their way
    int64_t steps;
    int64_t chunks;
    int64_t segments;  // parts that the walk along the length is split into, where heads are too few to fill the GPU
    int64_t chunks_a_segment;
    int64_t end_size;  // elements of a head's state at the end of a segment
    int64_t slots;     // of chunks, for which forward keeps what blocks share (products.cuh)
};

// Offsets in bytes. ends and decays hold one direction after the other.
struct SsdWorkspace {
    int64_t group_heads;  // heads of each group that one launch of the backward kernels takes
    int64_t splits;       // blocks that share a chunk and group's heads
    int64_t row_tiles;    // of headdim
    int64_t slices;       // of the states, for backward_warpgroup.cuh
    int64_t ends, decays, products, tiles, chunk_decays, states, dstates, dB, dC, ddt, dA, ddt_bias, dD;
    int64_t bytes;
};

// A chunk's decays of one head in the workspace, for forward on warpgroups, and for backward_warpgroup.cuh.
constexpr int64_t kChunkDecaysBytes = 1552;
constexpr int64_t kBackwardDecaysBytes = 2064;

// Bytes of both states of all chunks that one launch of the backward kernels may take; more heads take another launch. The
// warpgroup kernels take twice the bytes of x, but not less than the second.
constexpr int64_t kStatesBudget = int64_t{256} << 20;
constexpr int64_t kLeastStatesBudget = int64_t{64} << 20;

// Room for `bytes` more, at a multiple of 256.
inline int64_t reserve(int64_t& total, int64_t bytes) {
    const int64_t at = total;
    total += round_up(bytes, 256);
    return at;
}

// What a call needs besides its tensors. out: forward writes it.
struct SsdProblem {
    SsdPlan plan;
    SsdWorkspace workspace;
    cudaError_t error;

    SsdProblem(const MambaSsd& p, bool backward, bool out) : plan(), workspace(), error(cudaSuccess) {
        const DeviceLimits device(p.run.device);
        error = device.error;
        if (error != cudaSuccess) {
            return;
        }
        plan.kernel = backward ? choose_kernel(ssd_backward_table, kSsdBackwardKernels, device.major, p.dtype, p, device)
                               : choose_kernel(ssd_forward_table, kSsdForwardKernels, device.major, p.dtype, p, device);
        if (plan.kernel < 0) {
            error = cudaErrorInvalidDeviceFunction;  // the general rows are switched off
            return;
        }
        const SsdKernel& row = backward ? kSsdBackwardKernels[plan.kernel] : kSsdForwardKernels[plan.kernel];
        plan.ahead = row.shared_ahead != 0 && device.shared >= row.shared_ahead;
        plan.steps = row.steps;
        plan.chunks = ceil_div(p.seqlen, plan.steps);
        const int64_t ends = !backward && row.on_warpgroups() ? ends_a_segment(row.slices()) : 1;
        const bool four = !backward && out && !row.on_warpgroups() && device.shared >= kRoomyShared;  // blocks a multiprocessor
        plan_segments(p, (four ? 4 : 2) * device.processors, ends);
        plan.end_size = row.end_size(p);
        plan_ends(p, ends * (backward ? 2 : 1));
        if (backward) {
            plan_backward_workspace(p, row, device.processors);
        } else {
            plan_forward_workspace(p, row, out);
        }
    }

 private:
    // That a walk along a whole length has.
    static int64_t head_blocks(const MambaSsd& p) { return p.batch * p.nheads * ceil_div(p.headdim, kForwardRows); }

    // Splits the length where the forward kernels have less than half of the blocks that are wanted.
    void plan_segments(const MambaSsd& p, int64_t wanted, int64_t ends) {
        const int64_t blocks = head_blocks(p);
        plan.segments = 1;
        if (p.cu_seqlens == nullptr && blocks > 0 && 2 * blocks <= wanted) {
            const int64_t most = plan.chunks / 8;
            const int64_t segments = wanted / blocks < most ? wanted / blocks : most;
            plan.segments = segments > 1 ? segments : 1;
        }
        plan.chunks_a_segment = round_up(ceil_div(plan.chunks, plan.segments), ends);
        if (plan.chunks_a_segment > 0) {
            plan.segments = ceil_div(plan.chunks, plan.chunks_a_segment);  // none is empty
        }
    }

    // ends: of a segment, in all directions.
    void plan_ends(const MambaSsd& p, int64_t ends) {
        const int64_t rows = (plan.segments - 1) * ends * p.batch * p.nheads;
        workspace.ends = reserve(workspace.bytes, rows * plan.end_size * 4);
        workspace.decays = reserve(workspace.bytes, rows * 4);
    }

    void plan_forward_workspace(const MambaSsd& p, const SsdKernel& row, bool out) {
        int64_t& total = workspace.bytes;
        if (out || row.on_warpgroups()) {  // there is a pass of ssd_products_kernel
            plan.slots = p.cu_seqlens == nullptr ? p.batch * plan.chunks : p.seqlen / plan.steps + p.batch;
            const int64_t tiles = plan.steps / 16 * (plan.steps / 16 + 1) / 2;
            workspace.products = reserve(total, plan.slots * p.ngroups * tiles * 256 * 4);
        }
        if (row.on_warpgroups()) {
            workspace.tiles = reserve(total, plan.slots * p.ngroups * 2 * plan.steps * row.states * dtype_size(p.dtype));
            workspace.chunk_decays = reserve(total, plan.slots * p.nheads * kChunkDecaysBytes);
        }
    }

    // Blocks that share the items of a chunk and group.
    int64_t choose_splits(int64_t chunk_groups, int64_t items, int64_t processors, bool on_warpgroups) const {
        if (chunk_groups == 0 || !on_warpgroups) {
            const int64_t fill = chunk_groups > 0 ? ceil_div(4 * processors, chunk_groups) : 1;
            return fill < items ? fill : items;
        }
        // A multiprocessor runs one block at a time. To begin and to end takes a block as long as some items.
        constexpr int64_t kItemsForStart = 3;
        int64_t best = 1;
        int64_t least = 0;
        for (int64_t splits = 1; splits <= items && splits <= processors; ++splits) {
            const int64_t rounds = ceil_div(chunk_groups * splits * workspace.slices, processors);
            const int64_t time = rounds * (ceil_div(items, splits) + kItemsForStart);
            if (splits == 1 || time < least) {
                best = splits;
                least = time;
            }
        }
        return best;
    }

    void plan_backward_workspace(const MambaSsd& p, const SsdKernel& row, int64_t processors) {
        const bool on_warpgroups = row.on_warpgroups();
        workspace.row_tiles = ceil_div(p.headdim, row.rows);
        const int64_t states = on_warpgroups ? row.states : p.dstate;
        const int64_t state_rows = on_warpgroups ? workspace.row_tiles * row.rows : p.headdim;
        const int64_t size = dtype_size(p.dtype);
        workspace.slices = row.slices();
        const int64_t head_states = p.batch * p.ngroups * plan.chunks * state_rows * states * size;
        const int64_t heads_of_group = p.nheads / p.ngroups;
        const int64_t twice_x = 2 * p.batch * p.seqlen * p.nheads * p.headdim * size;
        const int64_t budget = !on_warpgroups ? kStatesBudget : twice_x > kLeastStatesBudget ? twice_x : kLeastStatesBudget;
        workspace.group_heads = heads_of_group;
        if (2 * head_states * heads_of_group > budget) {
            const int64_t fit = budget / (2 * head_states);
            const int64_t launches = ceil_div(heads_of_group, fit > 1 ? fit : 1);
            workspace.group_heads = ceil_div(heads_of_group, launches);
        }
        const int64_t chunk_groups = p.batch * plan.chunks * p.ngroups;
        // No launch may have fewer items than blocks share; the last launch may have fewer heads than the others.
        const int64_t last_heads =
            heads_of_group - (ceil_div(heads_of_group, workspace.group_heads) - 1) * workspace.group_heads;
        const int64_t items = last_heads * workspace.row_tiles;
        workspace.splits = choose_splits(chunk_groups, items, processors, on_warpgroups);
        int64_t& total = workspace.bytes;
        if (on_warpgroups) {
            workspace.tiles = reserve(total, chunk_groups * 3 * plan.steps * states * size);
            workspace.chunk_decays = reserve(total, p.batch * plan.chunks * p.nheads * kBackwardDecaysBytes);
        }
        workspace.states = reserve(total, head_states * workspace.group_heads);
        workspace.dstates = reserve(total, head_states * workspace.group_heads);
        const int64_t matrix = workspace.splits * p.batch * p.seqlen * p.ngroups * p.dstate * 4;
        workspace.dB = reserve(total, matrix);
        workspace.dC = reserve(total, matrix);
        const int64_t head_rows = workspace.row_tiles * workspace.slices * p.batch * p.nheads;
        workspace.ddt = reserve(total, head_rows * p.seqlen * 4);
        workspace.dA = reserve(total, head_rows * plan.chunks * 4);
        workspace.ddt_bias = reserve(total, head_rows * plan.chunks * 4);
        workspace.dD = reserve(total, p.batch * p.nheads * plan.chunks * p.headdim * 4);
    }
};

}  // namespace mamba
