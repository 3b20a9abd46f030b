// The table of the kernels of Mamba-3's backward scan: which there are, and what each needs.
//
// A row is a path of several kernels, see cuda/backward/launch_heads.cuh. The first row that takes a call runs it.
#pragma once

#include "mamba3/check.h"
#include "mamba3/plan.h"

namespace mamba {

struct Mamba3BackwardKernel {
    const char* name;
    bool (*takes)(const MambaMamba3Backward& q, const DeviceLimits& device);
    int dtypes;      // sizes of the dtypes' elements, ored
    int states;      // dstate is at most that
    int rows, inner;  // of a chunk, steps times rank; of headdim that a block takes
    bool warpgroups;
    int ranks;  // of warpgroups
};

// Bytes of shared memory that the general kernels need at most; backward/launch_heads.cuh asserts them.
constexpr int kMamba3BackwardShared16Bit = 64 * 1024;
constexpr int kMamba3BackwardSharedFloat = 108 * 1024;
constexpr int kMamba3BackwardShared256 = 88 * 1024;
constexpr int kMamba3BackwardSharedWarpgroups = 227 * 1024;

// What both rows on warpgroups need: the gate without norm, angles that heads share, and rows at multiples of 16 bytes.
inline bool mamba3_backward_on_warpgroups(const MambaMamba3Backward& q, const DeviceLimits& device) {
    const MambaMamba3& p = q.forward;
    const int64_t size = dtype_size(p.dtype);
    bool warpgroups = false;
    return mamba3_has_warpgroups(p, &warpgroups) == cudaSuccess && warpgroups &&
           device.shared >= kMamba3BackwardSharedWarpgroups && p.angles_of_heads == 0 &&
           p.z != nullptr && p.norm_weight == nullptr &&
           rows_aligned(p.z, size, 16, p.z_batch_stride, p.z_len_stride, p.z_head_stride) &&
           rows_aligned(q.dz, size, 16, p.headdim, q.dz_step_stride);
}
// SISO: one rank without projections, rotated neighbours.
inline bool takes_mamba3_backward_siso(const MambaMamba3Backward& q, const DeviceLimits& device) {
    const MambaMamba3& p = q.forward;
    return mamba3_siso_fits(p) &&
           rows_aligned(q.dout, dtype_size(p.dtype), 4, q.dout_batch_stride, q.dout_len_stride, q.dout_head_stride) &&
           mamba3_backward_on_warpgroups(q, device);
}
// MIMO of rank 4 with all projections, rotated halves of 128 states, up to 32 angles.
inline bool takes_mamba3_backward_mimo4(const MambaMamba3Backward& q, const DeviceLimits& device) {
    const MambaMamba3& p = q.forward;
    return p.mimo_v != nullptr && p.mimo_z != nullptr && p.mimo_out != nullptr && mamba3_mimo_fits(p) &&
           mamba3_stride_fits(p.z_len_stride) && mamba3_stride_fits(q.dout_len_stride) &&
           rows_aligned(q.dout, dtype_size(p.dtype), 16, q.dout_batch_stride, q.dout_len_stride, q.dout_head_stride) &&
           mamba3_backward_on_warpgroups(q, device);
}
inline bool takes_mamba3_backward_128(const MambaMamba3Backward& q, const DeviceLimits& device) {
    const bool is_float = q.forward.dtype == MAMBA_FLOAT32;
    return q.forward.dstate <= 128 && device.shared >= (is_float ? kMamba3BackwardSharedFloat : kMamba3BackwardShared16Bit);
}
inline bool takes_mamba3_backward_16_rows(const MambaMamba3Backward& q, const DeviceLimits&) {
    return q.forward.dstate <= 128;
}
inline bool takes_any_mamba3_backward(const MambaMamba3Backward&, const DeviceLimits&) {
    return true;
}

inline constexpr Mamba3BackwardKernel kMamba3BackwardKernels[] = {
    {"siso_warpgroups", takes_mamba3_backward_siso, 2, 128, 64, 64, true, 1},
    {"mimo4_warpgroups", takes_mamba3_backward_mimo4, 2, 128, 64, 64, true, 4},
    {"states128", takes_mamba3_backward_128, 2 | 4, 128, 32, 32, false, 0},
    {"states128_16_rows", takes_mamba3_backward_16_rows, 4, 128, 16, 16, false, 0},
    {"states256", takes_any_mamba3_backward, 2 | 4, 256, 16, 16, false, 0},
};

// The number of the row that runs a call.
inline int32_t choose_mamba3_backward(const MambaMamba3Backward& q, const DeviceLimits& device) {
    int32_t kernel = 0;
    for (const Mamba3BackwardKernel& row : kMamba3BackwardKernels) {
        if ((row.dtypes & dtype_size(q.forward.dtype)) != 0 && row.takes(q, device)) {
            return kernel;
        }
        ++kernel;
    }
    return -1;
}

}  // namespace mamba
