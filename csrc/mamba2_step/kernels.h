// The kernels of a Mamba-2 layer's decode step. Where the GPU has no clusters, or a group has more than kStepMostRows rows a
// block, cuda/finish.cuh follows.
#pragma once

#include "causal_conv1d/step.h"
#include "common/kernel_table.h"
#include "mamba_kernels.h"
#include "state_update/rows.h"

namespace mamba {

struct Mamba2StepKernel : KernelRow {
    bool (*takes)(const MambaMamba2Step& p);
    int rows, vectors;  // of the state in a lane: so many rows, and of each so many vectors of 16 bytes
    bool whole_tiles;
};

// Whether states can be read in vectors of 16 bytes.
inline bool has_state_vectors(const MambaMamba2Step& p) {
    const int64_t size = dtype_size(p.state_dtype);
    return p.dstate % (16 / size) == 0 && p.state_dstate_stride == 1 &&
           rows_aligned(p.state, size, 16, used_stride(p.batch, p.state_batch_stride),
                        used_stride(p.nheads, p.state_head_stride), used_stride(p.headdim, p.state_dim_stride));
}

inline bool has_one_dtype(const MambaMamba2Step& p) {
    return p.dtype == p.state_dtype && has_conv_of_one_dtype(p) &&
           (p.norm_weight == nullptr || p.norm_weight_dtype == p.dtype) && has_state_vectors(p) &&
           has_whole_tiles(p.headdim, p.dstate, p.state_dim_stride, p.state_dtype, 4);
}
inline bool takes_any_step(const MambaMamba2Step&) {
    return true;
}

inline constexpr char kMamba2StepNeeds[] =
    "one dtype but for dt_bias, A_log, D; 4 taps; whole tiles of contiguous states; dstate a power of 2 >= 32";
constexpr int32_t kMamba2StepShared = 71744;  // of 1024 rows and 256 states, the ring included

inline constexpr Mamba2StepKernel kMamba2StepKernels[] = {
    // name, needs, shape, dtypes (of the state), threads, shared bytes, architecture; takes, rows, vectors, whole tiles
    {{"one_dtype", kMamba2StepNeeds, "<= 1024 rows of a group", k16Bit, 256, kMamba2StepShared, 75}, has_one_dtype, 4, 1, true},
    {{"any_16_bit_state", "", "<= 1024 rows of a group", k16Bit, 256, kMamba2StepShared, 75}, takes_any_step, 4, 1, false},
    {{"any_float32_state", "", "<= 1024 rows of a group", kF32, 256, kMamba2StepShared, 75}, takes_any_step, 2, 2, false},
};
extern KernelTable mamba2_step_table;

}  // namespace mamba
