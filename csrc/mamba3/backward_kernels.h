// The kernels of Mamba-3's backward scan. A row is a path of several kernels, see cuda/backward/launch_heads.cuh.
#pragma once

#include "common/kernel_table.h"
#include "mamba3/check.h"
#include "mamba3/plan.h"

namespace mamba {

struct Mamba3BackwardKernel : KernelRow {
    bool (*takes)(const MambaMamba3Backward& q, const DeviceLimits& device);
    int warpgroup_ranks;  // 0: the general kernels
    int states;           // dstate is at most that
    int rows, inner;      // of a chunk, steps times rank; of headdim that a block takes
};

// Bytes of shared memory that a block needs at most; backward/launch_heads.cuh asserts them.
constexpr int kMamba3BackwardShared16Rows = 64 * 1024;  // what every GPU has
constexpr int kMamba3BackwardShared16Bit = 66 * 1024;
constexpr int kMamba3BackwardSharedFloat = 108 * 1024;
constexpr int kMamba3BackwardShared256 = 88 * 1024;
constexpr int kMamba3BackwardShared256Rows32 = 97 * 1024;
constexpr int kMamba3BackwardSharedWarpgroups = 227 * 1024;

// What both rows on warpgroups need: the gate without norm, angles that heads share, and rows at multiples of 16 bytes.
inline bool mamba3_backward_on_warpgroups(const MambaMamba3Backward& q, const DeviceLimits& device) {
    const MambaMamba3& p = q.forward;
    const int64_t size = dtype_size(p.dtype);
    return device.shared >= kMamba3BackwardSharedWarpgroups && p.angles_of_heads == 0 && p.z != nullptr &&
           p.norm_weight == nullptr && rows_aligned(p.z, size, 16, p.z_batch_stride, p.z_len_stride, p.z_head_stride) &&
           rows_aligned(q.dout, size, 16, q.dout_batch_stride, q.dout_len_stride, q.dout_head_stride) &&
           rows_aligned(q.dz, size, 16, p.headdim, q.dz_step_stride);
}
// SISO: one rank without projections, rotated neighbours.
inline bool takes_mamba3_backward_siso(const MambaMamba3Backward& q, const DeviceLimits& device) {
    const MambaMamba3& p = q.forward;
    return mamba3_siso_fits(p) && mamba3_backward_on_warpgroups(q, device);
}
// MIMO of rank 4 with all projections, rotated halves of 128 states, up to 32 angles.
inline bool takes_mamba3_backward_mimo4(const MambaMamba3Backward& q, const DeviceLimits& device) {
    const MambaMamba3& p = q.forward;
    return p.mimo_v != nullptr && p.mimo_z != nullptr && p.mimo_out != nullptr && mamba3_mimo_fits(p) &&
           mamba3_stride_fits(p.z_len_stride) && mamba3_stride_fits(q.dout_len_stride) &&
           mamba3_backward_on_warpgroups(q, device);
}
inline bool takes_mamba3_backward_128(const MambaMamba3Backward& q, const DeviceLimits& device) {
    const bool is_float = q.forward.dtype == MAMBA_FLOAT32;
    return q.forward.dstate <= 128 && device.shared >= (is_float ? kMamba3BackwardSharedFloat : kMamba3BackwardShared16Bit);
}
inline bool takes_mamba3_backward_16_rows(const MambaMamba3Backward& q, const DeviceLimits&) {
    return q.forward.dstate <= 128;
}
inline bool takes_mamba3_backward_32_rows(const MambaMamba3Backward&, const DeviceLimits& device) {
    return device.shared >= kMamba3BackwardShared256Rows32;
}
inline bool takes_any_mamba3_backward(const MambaMamba3Backward&, const DeviceLimits&) {
    return true;
}

inline constexpr Mamba3BackwardKernel kMamba3BackwardKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes, warpgroup_ranks, states, rows, inner
    {{"siso_warpgroups", "SISO (pairwise, no projections), z, no norm, no seq_idx, shared angles; N % 4 == 0, rows aligned",
      "64 steps, 128 states, 64 columns of headdim, all heads of a group", k16Bit, 512, kMamba3BackwardSharedWarpgroups, 90},
     takes_mamba3_backward_siso,
     1,
     128,
     64,
     64},
    {{"mimo4_warpgroups",
      "MIMO of rank 4 with all projections, z, no norm, no seq_idx, shared angles; N == 128, at most 32 angles, rows aligned",
      "16 steps of 4 ranks, 128 states, 64 columns of headdim, all heads of a group", k16Bit, 512,
      kMamba3BackwardSharedWarpgroups, 90},
     takes_mamba3_backward_mimo4,
     4,
     128,
     64,
     64},
    {{"states128", "N <= 128, 66 KB of shared memory, float32 108", "32 steps times rank, 128 states, 32 columns of headdim",
      kAllDtypes, 256, kMamba3BackwardSharedFloat, 75},
     takes_mamba3_backward_128,
     0,
     128,
     32,
     32},
    {{"states128_16_rows", "N <= 128", "16 steps times rank, 128 states, 16 columns of headdim", kF32, 256,
      kMamba3BackwardShared16Rows, 75},
     takes_mamba3_backward_16_rows,
     0,
     128,
     16,
     16},
    {{"states256_32_rows", "97 KB of shared memory", "32 steps times rank, 256 states, 32 columns of headdim", k16Bit, 256,
      kMamba3BackwardShared256Rows32, 75},
     takes_mamba3_backward_32_rows,
     0,
     256,
     32,
     32},
    {{"states256", "", "16 steps times rank, 256 states, 16 columns of headdim", kAllDtypes, 256, kMamba3BackwardShared256, 75},
     takes_any_mamba3_backward,
     0,
     256,
     16,
     16},
};
extern KernelTable mamba3_backward_table;

// The number of the row that runs a call.
inline int32_t choose_mamba3_backward(const MambaMamba3Backward& q, const DeviceLimits& device) {
    return choose_kernel(mamba3_backward_table, kMamba3BackwardKernels, device.major, q.forward.dtype, q, device);
}

}  // namespace mamba
