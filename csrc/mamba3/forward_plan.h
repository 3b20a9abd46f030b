// How Mamba-3's forward scan runs on CUDA: its row of the table, chunks, segments of the length, workspace.
#pragma once

#include "mamba3/kernels.h"

namespace mamba {

// With that much a multiprocessor holds as many blocks as the table says, else two.
constexpr int kMamba3RoomyShared = 200 * 1024;

// What a forward call needs besides its tensors.
struct Mamba3Forward {
    int kernel;       // of kMamba3ForwardKernels
    int64_t ranks;    // rows of a step in a tile: a power of two that divides a tile of 16, or one launch does not take all
    int64_t passes;   // parts of the rank that a launch takes, of q and of k: passes^2 launches
    bool rows_apart;  // the scan leaves its rows in the workspace as float32, another kernel makes the output of them
    int64_t segments, chunks_a_segment;  // parts that the walk along the length is split into
    Mamba3ChunksPlan chunks;
    int64_t ends, decays, rows;  // offsets; see forward/general.cuh
    int64_t bytes;

    Mamba3Forward(const MambaMamba3& p, const DeviceLimits& device)
        : kernel(choose_kernel(mamba3_forward_table, kMamba3ForwardKernels, device.major, p.dtype, p)),
          segments(1),
          ends(0),
          decays(0),
          rows(0),
          bytes(0) {
        const Mamba3ForwardKernel& row = kMamba3ForwardKernels[kernel < 0 ? 0 : kernel];  // < 0: the launch will say so
        passes = ceil_div(p.rank, kMamba3MostRanks);
        ranks = int64_t{1} << ceil_log2(ceil_div(p.rank, passes), 0, 4);
        const int64_t steps = row.rows / ranks;
        const int64_t part = row.warpgroup_ranks > 0 && steps > mamba3_part_steps(p) ? mamba3_part_steps(p) : 0;
        chunks = Mamba3ChunksPlan(p, steps, kMamba3ForwardArrays, bytes, part);
        rows_apart = passes > 1 || (p.norm_weight != nullptr && p.headdim > kMamba3StateRows);
        const int64_t all_rows = p.batch * p.seqlen * p.rank;
        rows = mamba3_reserve(bytes, rows_apart ? all_rows * p.nheads * p.headdim * 4 : 0);
        plan_segments(p, device, row.blocks);
    }

 private:
    // Splits the length where there are less than half of the blocks that the GPU has room for.
    void plan_segments(const MambaMamba3& p, const DeviceLimits& device, int64_t blocks_of_multiprocessor) {
        const int64_t all = ceil_div(p.seqlen, chunks.chunks.steps);
        const int64_t blocks = p.batch * p.nheads * ceil_div(p.headdim, kMamba3StateRows);
        const int64_t wanted = (device.shared >= kMamba3RoomyShared ? blocks_of_multiprocessor : 2) * device.processors;
        if (p.cu_seqlens == nullptr && passes == 1 && blocks > 0 && 2 * blocks <= wanted) {
            const int64_t most = all / 8;
            const int64_t fit = wanted / blocks < most ? wanted / blocks : most;
            segments = fit > 1 ? fit : 1;
        }
        chunks_a_segment = ceil_div(all, segments);
        if (chunks_a_segment > 0) {
            segments = ceil_div(all, chunks_a_segment);  // none is empty
        }
        ends = mamba3_reserve(bytes, (segments - 1) * p.batch * p.nheads * p.headdim * p.dstate * 4);
        decays = mamba3_reserve(bytes, (segments - 1) * p.batch * p.nheads * 4);
    }
};

}  // namespace mamba
