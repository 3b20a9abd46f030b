// The scan's C ABI in mamba_cuda: checks, then the launcher for the dtype.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/cuda_utils.cuh"
#include "selective_scan/check.h"
#include "selective_scan/launch.h"

namespace mamba {

// What the choice of layouts depends on.
struct Device {
    int64_t processors;
    int shared;  // bytes of memory that a block may have
    bool small;  // little of it
    cudaError_t error;

    explicit Device(int32_t index) : processors(0), shared(0), small(false) {
        int count = 0;
        error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index);
        if (error == cudaSuccess) {
            error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
        }
        processors = count;
        small = shared < kBackwardShared;
    }
};

// Whether every row of a tensor starts at a multiple of 16 bytes. An absent tensor does not object.
static bool rows_aligned(const void* data, int64_t stride_a, int64_t stride_b, int64_t element_size) {
    return data == nullptr || (reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_a * element_size % 16 == 0 &&
                               stride_b * element_size % 16 == 0);
}

// Blocks that share one batch and group, at least 1.
static int64_t group_blocks(const MambaSelectiveScan& p, int channels) {
    const int64_t blocks = (p.dim / p.ngroups + channels - 1) / channels;
    return blocks > 1 ? blocks : 1;
}

// Lengths below this are not split into segments: the second launch has its price.
constexpr int64_t kShortestSplit = 8 * MAMBA_SCAN_CHECKPOINT;

// Segments of the length with which there are `wanted` blocks; 1 where there are half as many anyway, and none shorter than
// `shortest` checkpoints.
static int64_t segments_to_fill(const MambaSelectiveScan& p, int channels, int64_t wanted, int64_t shortest) {
    const int64_t blocks = p.batch * p.ngroups * group_blocks(p, channels);
    const int64_t tiles = (p.seqlen + MAMBA_SCAN_CHECKPOINT - 1) / MAMBA_SCAN_CHECKPOINT;
    if (blocks == 0 || 2 * blocks > wanted || p.seqlen < kShortestSplit) {
        return 1;
    }
    const int64_t most = tiles / shortest;
    const int64_t segments = wanted / blocks < most ? wanted / blocks : most;
    const int64_t tiles_each = (tiles + segments - 1) / segments;
    return (tiles + tiles_each - 1) / tiles_each;  // none is empty
}

// Whether the forward scan should spend more lanes on a channel: where the usual layout's blocks leave the GPU half empty, but
// those of half as many channels fill it, or the length is too short to be split.
static bool wide_is_better(const MambaSelectiveScan& p, int64_t processors) {
    const int wide_channels = forward_channels(p.dstate, true);
    if (wide_channels == forward_channels(p.dstate, false)) {
        return false;
    }
    const int64_t blocks = p.batch * p.ngroups * group_blocks(p, forward_channels(p.dstate, false));
    const int64_t wide_blocks = p.batch * p.ngroups * group_blocks(p, wide_channels);
    return 2 * blocks < 5 * processors && (2 * wide_blocks >= 3 * processors || p.seqlen < kShortestSplit);
}

static int64_t element_size(int32_t dtype) {
    return dtype == MAMBA_FLOAT32 ? 4 : 2;
}

// What the launchers call aligned.
static bool inputs_aligned(const MambaSelectiveScan& p) {
    const int64_t size = element_size(p.dtype);
    const bool B =
        !p.variable_B || (rows_aligned(p.B, p.B_batch_stride, p.B_group_stride, size) && p.B_dstate_stride * size % 16 == 0);
    const bool C =
        !p.variable_C || (rows_aligned(p.C, p.C_batch_stride, p.C_group_stride, size) && p.C_dstate_stride * size % 16 == 0);
    return B && C && p.seqlen % 8 == 0 && rows_aligned(p.u, p.u_batch_stride, p.u_dim_stride, size) &&
           rows_aligned(p.delta, p.delta_batch_stride, p.delta_dim_stride, size) &&
           rows_aligned(p.z, p.z_batch_stride, p.z_dim_stride, size) &&
           rows_aligned(p.out, p.out_batch_stride, p.out_dim_stride, size);
}

static bool gradients_aligned(const MambaSelectiveScanBackward& q) {
    const int64_t size = element_size(q.forward.dtype);
    return rows_aligned(q.dout, q.dout_batch_stride, q.dout_dim_stride, size) &&
           rows_aligned(q.du, q.du_batch_stride, q.du_dim_stride, size) &&
           rows_aligned(q.ddelta, q.ddelta_batch_stride, q.ddelta_dim_stride, size) &&
           rows_aligned(q.dz, q.dz_batch_stride, q.dz_dim_stride, size);
}

// Lengths up to this are worth the pipelined forward scan however few the channels are.
constexpr int64_t kLongestNarrow = 1024;

// Channels a block of the pipelined forward scan takes where that is to run, else 0. All of its blocks run at once, for as long
// as one takes: with fewer than two thirds of the multiprocessors, segments of a long length are faster.
static int pipeline_channels(const MambaSelectiveScan& p, const Device& device) {
    const bool can_run = p.dstate > 8 && p.dstate <= 16 && p.variable_B && p.variable_C && p.seq_idx == nullptr &&
                         p.seqlen > MAMBA_SCAN_CHECKPOINT && inputs_aligned(p);
    for (const int channels : kPipelineChannels) {
        const int64_t blocks = p.batch * p.ngroups * group_blocks(p, channels);
        const bool fits = pipeline_shared(channels, element_size(p.dtype)) <= device.shared;
        if (can_run && fits && blocks <= device.processors) {
            return p.seqlen <= kLongestNarrow || 3 * blocks >= 2 * device.processors ? channels : 0;
        }
    }
    return 0;
}

template <typename T>
static cudaError_t launch_forward(const MambaSelectiveScan& p, const Device& device) {
    const int channels = p.segments == 1 ? pipeline_channels(p, device) : 0;
    if (channels > 0) {
        return launch_selective_scan_pipeline<T>(p, channels);
    }
    const bool wide = p.segments == 1 && wide_is_better(p, device.processors);
    return launch_selective_scan_forward<T>(p, inputs_aligned(p), wide);
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
    const mamba::Device device(p.run.device);
    cudaError_t error = guard.error != cudaSuccess ? guard.error : device.error;
    if (error == cudaSuccess) {
        if (p.dtype == MAMBA_FLOAT32) {
            error = mamba::launch_forward<float>(p, device);
        }
#ifndef MAMBA_DISABLE_HALF
        if (p.dtype == MAMBA_FLOAT16) {
            error = mamba::launch_forward<__half>(p, device);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (p.dtype == MAMBA_BFLOAT16) {
            error = mamba::launch_forward<__nv_bfloat16>(p, device);
        }
#endif
    }
    return mamba::cuda_status(error, "selective_scan_forward", p.batch, p.dim, p.seqlen, p.dstate);
}

int32_t mamba_selective_scan_plan(const MambaSelectiveScan* params, int32_t deterministic, MambaSelectiveScanPlan* plan) {
    if (params == nullptr || plan == nullptr || params->ngroups < 1 || params->dstate < 1) {
        return mamba::fail(MAMBA_ERROR_INVALID, "mamba_selective_scan_plan: params, plan, ngroups and dstate must be given");
    }
    const MambaSelectiveScan& p = *params;
    const mamba::Device device(p.run.device);
    if (device.error != cudaSuccess) {
        return mamba::cuda_status(device.error, "selective_scan_plan", p.batch, p.dim, p.seqlen, p.dstate);
    }
    plan->forward_segments = 1;
    if (mamba::pipeline_channels(p, device) == 0 && !mamba::wide_is_better(p, device.processors)) {
        plan->forward_segments = mamba::segments_to_fill(p, mamba::forward_channels(p.dstate, false), 3 * device.processors, 2);
    }
    plan->backward_segments =
        mamba::segments_to_fill(p, mamba::backward_channels(p.dstate, device.small), 3 * device.processors, 4);
    const int64_t group_blocks = mamba::group_blocks(p, mamba::backward_channels(p.dstate, device.small));
    plan->slots = deterministic ? group_blocks : 1;
    plan->zeroed_sums = plan->slots < group_blocks;
    return MAMBA_OK;
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
    const mamba::Device device(p.run.device);
    const int64_t slots = mamba::group_blocks(p, mamba::backward_channels(p.dstate, device.small));
    if (device.error == cudaSuccess && q.slots != 1 && q.slots != slots) {
        return mamba::fail(MAMBA_ERROR_INVALID,
                           "mamba_selective_scan_backward: slots is %lld, but this problem takes 1 or %lld",
                           static_cast<long long>(q.slots), static_cast<long long>(slots));
    }
    const mamba::DeviceGuard guard(p.run.device);
    cudaError_t error = guard.error != cudaSuccess ? guard.error : device.error;
    if (error == cudaSuccess) {
        const bool aligned = mamba::inputs_aligned(p) && mamba::gradients_aligned(q);
        if (p.dtype == MAMBA_FLOAT32) {
            error = mamba::launch_selective_scan_backward<float>(q, aligned, device.small);
        }
#ifndef MAMBA_DISABLE_HALF
        if (p.dtype == MAMBA_FLOAT16) {
            error = mamba::launch_selective_scan_backward<__half>(q, aligned, device.small);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (p.dtype == MAMBA_BFLOAT16) {
            error = mamba::launch_selective_scan_backward<__nv_bfloat16>(q, aligned, device.small);
        }
#endif
    }
    return mamba::cuda_status(error, "selective_scan_backward", p.batch, p.dim, p.seqlen, p.dstate);
}
