// The C ABI of Mamba-3's scan in mamba_cuda.
#include "common/cuda_sums.h"
#include "mamba3/check.h"
#include "mamba3/cuda/backward/launch.cuh"
#include "mamba3/cuda/forward/between_walks.cuh"
#include "mamba3/cuda/prepare.cuh"
#include "mamba3/launch.h"

namespace mamba {

KernelTable mamba3_forward_table("mamba3_forward", kMamba3ForwardKernels);
KernelTable mamba3_step_table("mamba3_step", kMamba3StepKernels);
KernelTable mamba3_backward_table("mamba3_backward", kMamba3BackwardKernels);

namespace {

// The grids are one-dimensional, or have the heads behind them (prepare).
int32_t check_forward_call(const char* function, const MambaMamba3& p, const Mamba3Forward& plan) {
    const int64_t walk = p.sequences * p.nheads * ceil_div(p.headdim, kMamba3StateRows) * plan.segments;
    const int64_t prepare = plan.chunks.chunks.slots * ceil_div(p.nheads, kMamba3PrepareHeads);
    const int64_t states = plan.segments > 2 ? p.sequences * p.nheads * p.headdim * p.dstate / 256 : 0;
    const int64_t finish = plan.rows_apart ? p.batch * p.seqlen * p.nheads / 4 : 0;
    Check check(function);
    check.that(walk <= INT32_MAX && prepare <= INT32_MAX && states < INT32_MAX && finish < INT32_MAX, MAMBA_ERROR_UNSUPPORTED,
               "too large for one launch: sequences=%lld seqlen=%lld nheads=%lld headdim=%lld",
               static_cast<long long>(p.sequences), static_cast<long long>(p.seqlen), static_cast<long long>(p.nheads),
               static_cast<long long>(p.headdim));
    check.that(plan.bytes == 0 || (p.workspace != nullptr && pointer_is_aligned(p.workspace, 16)), MAMBA_ERROR_INVALID,
               "workspace must be %lld bytes at a multiple of 16, got %p", static_cast<long long>(plan.bytes), p.workspace);
    return check.status();
}

// Gradients of parameters, from what chunks, ranges of them and sequences have left.
cudaError_t add_up_parameters(const MambaMamba3Backward& q, const Mamba3BackwardPlan& plan) {
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = plan.workspace;
    const int64_t slots = plan.chunks.chunks.slots, biases = plan.row_tiles * slots;
    const int64_t bias = p.nheads * p.rank * p.dstate, projection = p.nheads * p.rank * p.headdim;
    const auto at = [&](int64_t offset) { return reinterpret_cast<const float*>(static_cast<char*>(p.workspace) + offset); };
    PartSums sums = {};
    sums.add(part_sum(at(w.bias), biases, q.dq_bias, MAMBA_FLOAT32, bias));
    sums.add(part_sum(at(w.bias) + biases * bias, biases, q.dk_bias, MAMBA_FLOAT32, bias));
    const int64_t befores = p.ssm_state != nullptr ? p.sequences : 0;
    sums.add(part_sum(at(w.mimo_v), slots + befores, p.mimo_v != nullptr ? q.dmimo_v : nullptr, MAMBA_FLOAT32, projection));
    const int64_t parts = mamba3_projection_parts(p, plan);
    sums.add(part_sum(at(w.mimo_z), parts, p.mimo_z != nullptr ? q.dmimo_z : nullptr, MAMBA_FLOAT32, projection));
    sums.add(part_sum(at(w.mimo_out), parts, p.mimo_out != nullptr ? q.dmimo_out : nullptr, MAMBA_FLOAT32, projection));
    sums.add(part_sum(at(w.norm), plan.ranges * p.rank, p.norm_weight != nullptr ? q.dnorm_weight : nullptr, MAMBA_FLOAT32,
                      p.nheads * p.headdim));
    sums.add(part_sum(at(w.D), mamba3_D_parts(p, plan), p.D != nullptr ? q.dD : nullptr, MAMBA_FLOAT32, p.nheads));
    return launch_part_sums(sums, p.run.stream);
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int64_t mamba_mamba3_forward_workspace(const MambaMamba3* params) {
    if (check_mamba3_problem("mamba3_forward_workspace", params) != MAMBA_OK || mamba3_is_empty(*params)) {
        return 0;  // the call itself will say what is wrong
    }
    const DeviceLimits device(params->run.device);
    return device.error == cudaSuccess ? Mamba3Forward(*params, device).bytes : 0;
}

int32_t mamba_mamba3_forward(const MambaMamba3* params) {
    const char* const function = "mamba3_forward";
    int32_t status = check_mamba3_forward(function, params);
    if (status != MAMBA_OK || mamba3_is_empty(*params)) {
        return status;
    }
    const MambaMamba3& p = *params;
    const CallDevice device(p.run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const Mamba3Forward plan(p, device);
        status = check_forward_call(function, p, plan);
        if (status != MAMBA_OK) {
            return status;
        }
        error = launch_mamba3_prepare(p, plan.chunks.place(p.workspace));
        if (error == cudaSuccess) {
            error = launchers_of<Mamba3Launchers>(p.dtype).forward(p, plan);
        }
    }
    return cuda_status(error, function, p.batch, p.nheads * p.headdim, p.seqlen, p.dstate);
}

int32_t mamba_mamba3_backward(const MambaMamba3Backward* params) {
    const char* const function = "mamba3_backward";
    const int32_t status = check_mamba3_backward(function, params);
    if (status != MAMBA_OK || mamba3_is_empty(params->forward)) {
        return status;
    }
    const MambaMamba3& p = params->forward;
    Check check(function);
    check.that(p.rank <= kMamba3MostCudaRank, MAMBA_ERROR_UNSUPPORTED, "on CUDA the rank must lie in 1..%d, got %lld",
               kMamba3MostCudaRank, static_cast<long long>(p.rank));
    if (!check.ok()) {
        return check.status();
    }
    const CallDevice device(p.run.device);
    cudaError_t error = device.error;
    Mamba3BackwardPlan plan = {};
    if (error == cudaSuccess) {
        plan = plan_mamba3_backward(p, choose_mamba3_backward(*params, device), device);
        check.that(p.workspace != nullptr && pointer_is_aligned(p.workspace, 16), MAMBA_ERROR_INVALID,
                   "workspace must be %lld bytes at a multiple of 16, got %p", static_cast<long long>(plan.workspace.bytes),
                   p.workspace);
        if (!check.ok()) {
            return check.status();
        }
        MambaMamba3 prepared = p;
        prepared.final_angle = prepared.final_ssm = prepared.final_k = prepared.final_v = nullptr;
        error = launch_mamba3_prepare(prepared, plan.chunks.place(p.workspace));
    }
    if (error == cudaSuccess) {
        error = launch_mamba3_backward(*params, plan);
    }
    if (error == cudaSuccess) {
        error = add_up_parameters(*params, plan);
    }
    return cuda_status(error, function, p.batch, p.nheads * p.headdim, p.seqlen, p.dstate);
}

int32_t mamba_mamba3_step(const MambaMamba3Step* params) {
    const char* const function = "mamba3_step";
    const int32_t status = check_mamba3_step(function, params);
    if (status != MAMBA_OK || mamba3_is_empty(params->scan)) {
        return status;
    }
    const MambaMamba3& p = params->scan;
    const CallDevice device(p.run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(mamba3_step_table, kMamba3StepKernels, device.major, params->ssm_dtype, *params);
        error = launchers_of<Mamba3Launchers>(params->ssm_dtype).step(*params, kernel, device);
    }
    return cuda_status(error, function, p.batch, p.nheads * p.headdim, 1, p.dstate);
}

int64_t mamba_mamba3_backward_workspace(const MambaMamba3* params) {
    if (check_mamba3_problem("mamba3_backward_workspace", params) != MAMBA_OK || mamba3_is_empty(*params) ||
        params->rank > kMamba3MostCudaRank) {
        return 0;  // the call itself will say what is wrong
    }
    const DeviceLimits device(params->run.device);
    return device.error == cudaSuccess ? mamba3_backward_workspace_bytes(*params, device) : 0;
}
