// The CUDA forward scan where channels are few: one block on each multiprocessor walks the whole length, so that there is
// nothing to hand on between parts of it, but few warps too, none of which may wait. Its warps have one of two roles:
//
//   behind barrier t        scanning warps         element warps (every other one prepares before it finishes)
//   the block's barrier --------------------------------------------------------------------------------------
//                           walk tile t            finish tile t - 1: add up y, gate, store
//                           (pipeline_scan.cuh)    begin the copies of tile t + kCopied
//                                                  prepare tile t + kAhead: dt, dt * u, B and C in float32
//   the block's barrier --------------------------------------------------------------------------------------
//                           walk tile t + 1        ...                       (pipeline_elements.cuh)
//
// There is no named barrier. Both roles pass the block's one 1 + tiles times: when the first tiles are prepared, and behind
// each walk; warps without a role have ended by then. Of 16 bits two tiles are prepared when one is scanned (kAhead), of
// float32, which takes twice the shared memory, one; the copies of two more are on their way. A prepared tile lies in shared
// memory as in forward.cuh.
#pragma once

#include "common/kernel_launch.cuh"
#include "selective_scan/cuda/pipeline_elements.cuh"
#include "selective_scan/cuda/pipeline_scan.cuh"

namespace mamba {

template <typename T, class Layout>
__global__ void __launch_bounds__(Layout::kThreads, 1) selective_scan_pipeline_kernel(const MambaSelectiveScan p) {
    MAMBA_DYNAMIC_SHARED(16, unsigned char, pipeline_memory);
    auto& shared = *reinterpret_cast<PipelineShared<T, Layout>*>(pipeline_memory);
    const ScanBlock block = scan_block(p, Layout::kChannels, 0);
    const int tiles = static_cast<int>(ceil_div(p.seqlen, Layout::kTile));
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int idle_before = warp < Layout::kFirstIdle ? 0 : Layout::kIdleWarps;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (warp < Layout::kScanWarps) {
        scan_tiles(p, block, shared, tiles, warp, lane);
    } else if (idle_before == 0 || warp >= Layout::kFirstIdle + Layout::kIdleWarps) {
        const int element = (warp - idle_before - Layout::kScanWarps) * 32 + lane;
        PipelineElements<T, Layout>(p, block, shared, tiles, element).run(Layout::prepares_first(warp));
    }
}

template <typename T, class Layout, int kMostShared>
cudaError_t launch_pipeline(const MambaSelectiveScan& p) {
    constexpr int kShared = sizeof(PipelineShared<T, Layout>);
    static_assert(kShared == pipeline_shared(Layout::kChannels, sizeof(T), Layout::kSlice) && kShared <= kMostShared,
                  "what the table says");
    const auto kernel = selective_scan_pipeline_kernel<T, Layout>;
    const cudaError_t error = allow_shared(kernel, kShared);
    if (error != cudaSuccess) {
        return error;
    }
    return launch_programmatic_dependent(kernel, scan_grid(p, Layout::kChannels, 1), Layout::kThreads, kShared, p.run.stream,
                                         p);
}

}  // namespace mamba
