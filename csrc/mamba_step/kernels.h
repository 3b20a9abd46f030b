// The kernels of a Mamba layer's decode step: a row is cuda/cluster.cuh, or cuda/project.cuh and then cuda/update.cuh.
#pragma once

#include "causal_conv1d/step.h"
#include "common/alignment.h"
#include "common/kernel_table.h"
#include "mamba_kernels.h"

namespace mamba {

struct MambaStepKernel : KernelRow {
    bool (*takes)(const MambaMambaStep& p);
    bool one_dtype, cluster;
};

constexpr int kStepRun = 4;  // neighbouring states, or of dt's rank, in a lane of cuda/update.cuh

// Whether rows of the state, of A_log and of dt_proj's weight are whole aligned runs.
inline bool has_aligned_runs(const MambaMambaStep& p) {
    const int64_t state_size = dtype_size(p.state_dtype);
    return p.dstate % kStepRun == 0 && p.dt_rank % kStepRun == 0 && p.state_dstate_stride == 1 &&
           rows_aligned(p.state, state_size, kStepRun * state_size, used_stride(p.batch, p.state_batch_stride),
                        used_stride(p.dim, p.state_dim_stride)) &&
           pointer_is_aligned(p.A_log, kStepRun * dtype_size(p.A_log_dtype)) &&
           pointer_is_aligned(p.dt_proj_weight, kStepRun * dtype_size(p.dtype));
}

inline bool has_one_dtype(const MambaMambaStep& p) {
    return p.state_dtype == p.dtype && has_conv_of_one_dtype(p) && has_aligned_runs(p);
}

constexpr int kClusterBlocks = 8;      // that share out a batch entry's channels
constexpr int kClusterThreads = 512;   // of each
constexpr int kClusterChannels = 256;  // of each at most
constexpr int kClusterOutputs = 128;   // of x_proj at most
constexpr int kClusterBatch = 8;       // entries at most: each reads the weights anew

inline bool takes_cluster(const MambaMambaStep& p) {
    return p.batch <= kClusterBatch && p.dim <= kClusterBlocks * kClusterChannels &&
           p.dt_rank + 2 * p.dstate <= kClusterOutputs && has_one_dtype(p);
}
inline bool takes_any_step(const MambaMambaStep&) {
    return true;
}

inline constexpr char kMambaStepNeeds[] = "one dtype but for dt_bias, A_log, D; 4 taps; dstate and dt_rank multiples of 4";
inline constexpr char kClusterNeeds[] = "as one_dtype; batch <= 8, dim <= 2048, dt_rank + 2 dstate <= 128";
inline constexpr char kMambaStepShape[] = "64 channels x 16 batch entries, then 64 x 4";

inline constexpr MambaStepKernel kMambaStepKernels[] = {
    // name, needs, shape, dtypes (of xz), threads, shared bytes, architecture; takes, one dtype, cluster
    {{"cluster", kClusterNeeds, "1/8 of the channels", k16Bit, kClusterThreads, 0, 75}, takes_cluster, true, true},
    {{"one_dtype", kMambaStepNeeds, kMambaStepShape, k16Bit, 256, 48 * 1024, 75}, has_one_dtype, true, false},
    {{"any_dtypes", "", kMambaStepShape, kAllDtypes, 256, 48 * 1024, 75}, takes_any_step, false, false},
};
extern KernelTable mamba_step_table;

}  // namespace mamba
