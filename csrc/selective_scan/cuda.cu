// The scan's C ABI in mamba_cuda: checks, then the launcher for the dtype.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/cuda_utils.cuh"
#include "selective_scan/check.h"
#include "selective_scan/scan_launch.cuh"

namespace mamba {

// Whether every row of a tensor starts at a multiple of 16 bytes. An absent tensor does not object.
static bool rows_aligned(const void* data, int64_t stride_a, int64_t stride_b, int64_t element_size) {
    return data == nullptr || (reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_a * element_size % 16 == 0 &&
                               stride_b * element_size % 16 == 0);
}

static int64_t element_size(int32_t dtype) {
    return dtype == MAMBA_FLOAT32 ? 4 : 2;
}

static bool forward_rows_aligned(const MambaSelectiveScan& p) {
    const int64_t size = element_size(p.dtype);
    return rows_aligned(p.u, p.u_batch_stride, p.u_dim_stride, size) &&
           rows_aligned(p.delta, p.delta_batch_stride, p.delta_dim_stride, size) &&
           rows_aligned(p.z, p.z_batch_stride, p.z_dim_stride, size) &&
           rows_aligned(p.out, p.out_batch_stride, p.out_dim_stride, size);
}

static bool backward_rows_aligned(const MambaSelectiveScanBackward& q) {
    const int64_t size = element_size(q.forward.dtype);
    return forward_rows_aligned(q.forward) && rows_aligned(q.dout, q.dout_batch_stride, q.dout_dim_stride, size) &&
           rows_aligned(q.du, q.forward.seqlen, 0, size) && rows_aligned(q.ddelta, q.forward.seqlen, 0, size) &&
           rows_aligned(q.dz, q.forward.seqlen, 0, size);
}

static bool BC_aligned(const MambaSelectiveScan& p) {
    const int64_t size = element_size(p.dtype);
    const bool B =
        !p.variable_B || (rows_aligned(p.B, p.B_batch_stride, p.B_group_stride, size) && p.B_dstate_stride * size % 16 == 0);
    const bool C =
        !p.variable_C || (rows_aligned(p.C, p.C_batch_stride, p.C_group_stride, size) && p.C_dstate_stride * size % 16 == 0);
    return B && C;
}

}  // namespace mamba

int32_t mamba_selective_scan_forward(const MambaSelectiveScan* params) {
    const int32_t status = mamba::check_selective_scan(params);
    if (status != MAMBA_OK) {
        return status;
    }
    const MambaSelectiveScan& p = *params;
    if (p.batch == 0 || p.dim == 0) {
        return MAMBA_OK;
    }
    const mamba::DeviceGuard guard(p.run.device);
    cudaError_t error = guard.error;
    if (error == cudaSuccess) {
        const bool rows = mamba::forward_rows_aligned(p);
        const bool BC = mamba::BC_aligned(p);
        if (p.dtype == MAMBA_FLOAT32) {
            error = mamba::launch_selective_scan_forward<float>(p, rows, BC);
        }
#ifndef MAMBA_DISABLE_HALF
        if (p.dtype == MAMBA_FLOAT16) {
            error = mamba::launch_selective_scan_forward<__half>(p, rows, BC);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (p.dtype == MAMBA_BFLOAT16) {
            error = mamba::launch_selective_scan_forward<__nv_bfloat16>(p, rows, BC);
        }
#endif
    }
    return mamba::cuda_status(error, "selective_scan_forward", p.batch, p.dim, p.seqlen, p.dstate);
}

int64_t mamba_selective_scan_backward_slots(const MambaSelectiveScan* params, int32_t deterministic) {
    if (params == nullptr || !deterministic || params->ngroups <= 0) {
        return 1;
    }
    const int64_t channels = mamba::backward_channels(params->dstate);
    const int64_t blocks = (params->dim / params->ngroups + channels - 1) / channels;
    return blocks > 1 ? blocks : 1;
}

int32_t mamba_selective_scan_backward(const MambaSelectiveScanBackward* params) {
    const int32_t status = mamba::check_selective_scan_backward(params);
    if (status != MAMBA_OK) {
        return status;
    }
    const MambaSelectiveScanBackward& q = *params;
    const MambaSelectiveScan& p = q.forward;
    if (p.batch == 0 || p.dim == 0) {
        return MAMBA_OK;
    }
    if (q.slots != 1 && q.slots != mamba_selective_scan_backward_slots(&p, 1)) {
        return mamba::fail(MAMBA_ERROR_INVALID,
                           "mamba_selective_scan_backward: slots is %lld, but this problem takes 1 or %lld",
                           static_cast<long long>(q.slots), static_cast<long long>(mamba_selective_scan_backward_slots(&p, 1)));
    }
    const mamba::DeviceGuard guard(p.run.device);
    cudaError_t error = guard.error;
    if (error == cudaSuccess) {
        const bool rows = mamba::backward_rows_aligned(q);
        const bool BC = mamba::BC_aligned(p);
        if (p.dtype == MAMBA_FLOAT32) {
            error = mamba::launch_selective_scan_backward<float>(q, rows, BC);
        }
#ifndef MAMBA_DISABLE_HALF
        if (p.dtype == MAMBA_FLOAT16) {
            error = mamba::launch_selective_scan_backward<__half>(q, rows, BC);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (p.dtype == MAMBA_BFLOAT16) {
            error = mamba::launch_selective_scan_backward<__nv_bfloat16>(q, rows, BC);
        }
#endif
    }
    return mamba::cuda_status(error, "selective_scan_backward", p.batch, p.dim, p.seqlen, p.dstate);
}
