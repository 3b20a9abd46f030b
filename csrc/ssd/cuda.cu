// The C ABI of Mamba-2's scan in mamba_cuda: checks, the choice of layout and segments, the workspace, dtype dispatch.
#include "common/cuda_utils.cuh"
#include "ssd/check.h"
#include "ssd/cuda/chunk_tile.cuh"
#include "ssd/launch.h"

namespace mamba {

namespace {

// Bytes of both states of all chunks that one launch of the backward kernels may take; more heads take another launch.
constexpr int64_t kStatesBudget = int64_t{256} << 20;

struct Sizes {
    int states, steps, rows;
};

template <class Layout>
Sizes sizes_of() {
    return {Layout::kStates, Layout::kSteps, Layout::kRows};
}

template <typename T>
Sizes layout_sizes(SsdLayoutIndex layout) {
    using Layouts = SsdLayouts<T>;
    switch (layout) {
        case kSsdSmall:
            return sizes_of<typename Layouts::Small>();
        case kSsdMiddle:
        case kSsdMiddleAhead:
            return sizes_of<typename Layouts::Middle>();
        case kSsdLarge:
            return sizes_of<typename Layouts::Large>();
        default:
            return sizes_of<typename Layouts::Little>();
    }
}

int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Room for `bytes` more, at a multiple of 256.
int64_t reserve(int64_t& total, int64_t bytes) {
    const int64_t at = total;
    total += divide_up(bytes, 256) * 256;
    return at;
}

struct Problem {
    SsdPlan plan;
    SsdWorkspace workspace;
    cudaError_t error;

    Problem(const MambaSsd& p, bool backward, bool out) : plan(), workspace(), error(cudaSuccess) {
        int processors = 0;
        int shared = 0;
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, p.run.device);
        if (error == cudaSuccess) {
            error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, p.run.device);
        }
        if (error != cudaSuccess) {
            return;
        }
        const bool wide = p.dtype == MAMBA_FLOAT32;
        const int64_t element = wide ? 4 : 2;
        plan.layout = p.dstate <= 64 ? kSsdSmall : p.dstate <= 128 ? kSsdMiddle : kSsdLarge;
        if (backward && !wide && p.dstate <= 128) {
            if (shared < kMiddleShared) {
                plan.layout = kSsdLittle;
            } else if (shared >= kAheadShared && plan.layout == kSsdMiddle) {
                plan.layout = kSsdMiddleAhead;
            }
        }
#ifdef MAMBA_WARPGROUPS
        int major = 0;
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, p.run.device);
        if (error != cudaSuccess) {
            return;
        }
        const bool aligned =
            ssd_rows_aligned(p.x, p.headdim, p.x_batch_stride, p.x_len_stride, p.x_head_stride, element, 16) &&
            ssd_rows_aligned(p.out, p.headdim, p.out_batch_stride, p.out_len_stride, p.out_head_stride, element, 16);
        plan.warpgroups = !backward && out && !wide && p.dstate <= 128 && aligned && major == 9;  // 9.0 is the only one
#endif
        const Sizes sizes = wide ? layout_sizes<float>(plan.layout) : layout_sizes<__half>(plan.layout);
        plan.steps = sizes.steps;
        plan.chunks = divide_up(p.seqlen, plan.steps);
        plan.segments = 1;
        const int64_t forward_tiles = divide_up(p.headdim, kForwardRows);
        const int64_t blocks = p.batch * p.nheads * forward_tiles;
        const int64_t resident = backward || !out || plan.warpgroups || shared < kRoomyShared ? 2 : 4;  // blocks a processor
        const int64_t wanted = resident * processors;
        if (p.cu_seqlens == nullptr && blocks > 0 && 2 * blocks <= wanted) {
            const int64_t most = plan.chunks / 8;
            const int64_t segments = wanted / blocks < most ? wanted / blocks : most;
            plan.segments = segments > 1 ? segments : 1;
        }
        plan.chunks_a_segment = divide_up(plan.chunks, plan.segments);
        const int64_t ends_a_segment = plan.warpgroups ? kEndsASegment : 1;
        plan.chunks_a_segment = divide_up(plan.chunks_a_segment, ends_a_segment) * ends_a_segment;
        if (plan.chunks_a_segment > 0) {
            plan.segments = divide_up(plan.chunks, plan.chunks_a_segment);  // none is empty
        }

        const int64_t heads = p.batch * p.nheads;
        const int64_t ends = (plan.segments - 1) * ends_a_segment * heads * (backward ? 2 : 1);
        int64_t& total = workspace.bytes;
        workspace.ends = reserve(total, ends * p.headdim * p.dstate * 4);
        workspace.decays = reserve(total, ends * 4);
        if (!backward) {
            if (out) {
                plan.slots = p.cu_seqlens == nullptr ? p.batch * plan.chunks : p.seqlen / plan.steps + p.batch;
                const int64_t tiles = plan.steps / 16 * (plan.steps / 16 + 1) / 2;
                workspace.products = reserve(total, plan.slots * p.ngroups * tiles * 256 * 4);
            }
            if (plan.warpgroups) {
                const int64_t states = plan.layout == kSsdSmall ? 64 : 128;
                workspace.tiles = reserve(total, plan.slots * p.ngroups * 2 * plan.steps * states * element);
                workspace.chunk_decays = reserve(total, plan.slots * p.nheads * static_cast<int64_t>(sizeof(ChunkDecays<64>)));
            }
            return;
        }
        const int64_t head_states = p.batch * p.ngroups * plan.chunks * p.headdim * p.dstate * element;
        const int64_t heads_of_group = p.nheads / p.ngroups;
        workspace.group_heads = heads_of_group;
        if (2 * head_states * heads_of_group > kStatesBudget) {
            const int64_t fit = kStatesBudget / (2 * head_states);
            const int64_t launches = divide_up(heads_of_group, fit > 1 ? fit : 1);
            workspace.group_heads = divide_up(heads_of_group, launches);
        }
        workspace.row_tiles = divide_up(p.headdim, sizes.rows);
        const int64_t chunk_groups = p.batch * plan.chunks * p.ngroups;
        const int64_t fill = chunk_groups > 0 ? divide_up(4 * processors, chunk_groups) : 1;
        // No launch may have fewer items than blocks share; the last launch may have fewer heads than the others.
        const int64_t last_heads =
            heads_of_group - (divide_up(heads_of_group, workspace.group_heads) - 1) * workspace.group_heads;
        const int64_t items = last_heads * workspace.row_tiles;
        workspace.splits = fill < items ? fill : items;
        workspace.states = reserve(total, head_states * workspace.group_heads);
        workspace.dstates = reserve(total, head_states * workspace.group_heads);
        const int64_t matrix = workspace.splits * p.batch * p.seqlen * p.ngroups * p.dstate * 4;
        workspace.dB = reserve(total, matrix);
        workspace.dC = reserve(total, matrix);
        workspace.ddt = reserve(total, workspace.row_tiles * heads * p.seqlen * 4);
        workspace.dA = reserve(total, workspace.row_tiles * heads * plan.chunks * 4);
        workspace.ddt_bias = reserve(total, workspace.row_tiles * heads * plan.chunks * 4);
        workspace.dD = reserve(total, heads * plan.chunks * p.headdim * 4);
    }
};

// The grids are one-dimensional.
int32_t check_grid(const char* function, const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace) {
    const int64_t forward = p.batch * p.nheads * divide_up(p.headdim, kForwardRows) * plan.segments * 2;
    const int64_t backward = p.batch * plan.chunks * p.ngroups * workspace.splits;
    const int64_t finish = p.nheads + p.batch * p.seqlen * (p.ngroups * p.dstate + p.nheads) / 256;
    if (forward > 2147483647 || plan.slots * (p.ngroups + p.nheads) > 2147483647 ||
        (workspace.splits > 0 && (backward > 2147483647 || finish > 2147483646))) {
        return fail(MAMBA_ERROR_UNSUPPORTED, "%s: too large for one launch: batch=%lld seqlen=%lld nheads=%lld dstate=%lld",
                    function, static_cast<long long>(p.batch), static_cast<long long>(p.seqlen),
                    static_cast<long long>(p.nheads), static_cast<long long>(p.dstate));
    }
    return MAMBA_OK;
}

int64_t workspace_bytes(const MambaSsd* params, bool backward) {
    if (check_ssd_sizes("ssd_workspace", params) != MAMBA_OK || ssd_is_empty(*params)) {
        return 0;  // the call itself will say what is wrong
    }
    const Problem problem(*params, backward, params->out != nullptr);
    return problem.error == cudaSuccess ? problem.workspace.bytes : 0;
}

}  // namespace

}  // namespace mamba

int64_t mamba_ssd_forward_workspace(const MambaSsd* params) {
    return mamba::workspace_bytes(params, false);
}

int64_t mamba_ssd_backward_workspace(const MambaSsd* params) {
    return mamba::workspace_bytes(params, true);
}

int32_t mamba_ssd_forward(const MambaSsd* params) {
    using namespace mamba;
    const char* const function = "ssd_forward";
    int32_t status = check_ssd_sizes(function, params);
    if (status != MAMBA_OK || ssd_is_empty(*params) || (params->out == nullptr && params->final_state == nullptr)) {
        return status;
    }
    const MambaSsd& p = *params;
    const DeviceGuard guard(p.run.device);
    const Problem problem(p, false, p.out != nullptr);
    cudaError_t error = guard.error != cudaSuccess ? guard.error : problem.error;
    if (error == cudaSuccess) {
        status = check_ssd_inputs(function, p, problem.workspace.bytes);
        status = status != MAMBA_OK ? status : check_grid(function, p, problem.plan, problem.workspace);
        if (status != MAMBA_OK) {
            return status;
        }
        if (p.dtype == MAMBA_FLOAT32) {
            error = launch_ssd_forward<float>(p, problem.plan, problem.workspace);
        }
#ifndef MAMBA_DISABLE_HALF
        if (p.dtype == MAMBA_FLOAT16) {
            error = launch_ssd_forward<__half>(p, problem.plan, problem.workspace);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (p.dtype == MAMBA_BFLOAT16) {
            error = launch_ssd_forward<__nv_bfloat16>(p, problem.plan, problem.workspace);
        }
#endif
    }
    return cuda_status(error, function, p.batch, p.nheads * p.headdim, p.seqlen, p.dstate);
}

int32_t mamba_ssd_backward(const MambaSsdBackward* params) {
    using namespace mamba;
    const char* const function = "ssd_backward";
    int32_t status = check_ssd_sizes(function, params == nullptr ? nullptr : &params->forward);
    if (status != MAMBA_OK || ssd_is_empty(params->forward)) {
        return status;
    }
    const MambaSsdBackward& q = *params;
    const MambaSsd& p = q.forward;
    const DeviceGuard guard(p.run.device);
    const Problem problem(p, true, true);
    cudaError_t error = guard.error != cudaSuccess ? guard.error : problem.error;
    if (error == cudaSuccess) {
        status = check_ssd_inputs(function, p, problem.workspace.bytes);
        status = status != MAMBA_OK ? status : check_ssd_backward_arguments(function, q);
        status = status != MAMBA_OK ? status : check_grid(function, p, problem.plan, problem.workspace);
        if (status != MAMBA_OK) {
            return status;
        }
        if (p.dtype == MAMBA_FLOAT32) {
            error = launch_ssd_backward<float>(q, problem.plan, problem.workspace);
        }
#ifndef MAMBA_DISABLE_HALF
        if (p.dtype == MAMBA_FLOAT16) {
            error = launch_ssd_backward<__half>(q, problem.plan, problem.workspace);
        }
#endif
#ifndef MAMBA_DISABLE_BF16
        if (p.dtype == MAMBA_BFLOAT16) {
            error = launch_ssd_backward<__nv_bfloat16>(q, problem.plan, problem.workspace);
        }
#endif
    }
    return cuda_status(error, function, p.batch, p.nheads * p.headdim, p.seqlen, p.dstate);
}
