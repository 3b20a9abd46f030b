// The C ABI of Mamba-2's scan in mamba_cuda.
#include "ssd/check.h"
#include "ssd/cuda/carry.cuh"
#include "ssd/cuda/finish.cuh"
#include "ssd/cuda/pieces.cuh"
#include "ssd/cuda/prepare_backward.cuh"
#include "ssd/launch.h"

namespace mamba {

KernelTable ssd_forward_table("ssd_forward", kSsdForwardKernels);
KernelTable ssd_backward_table("ssd_backward", kSsdBackwardKernels);

namespace {

// The grids are one-dimensional.
int32_t check_grid(const char* function, const MambaSsd& p, const SsdPlan& plan, const SsdWorkspace& workspace) {
    const int64_t forward = p.batch * p.nheads * ceil_div(p.headdim, kForwardRows) * plan.segments * 2;
    const int64_t products = plan.slots * (p.ngroups + p.nheads);
    const int64_t backward = p.batch * plan.chunks * p.ngroups * workspace.splits;
    const int64_t finish = p.nheads + p.batch * p.seqlen * (p.ngroups * p.dstate + p.nheads) / 256;
    const bool fits = forward <= INT32_MAX && products <= INT32_MAX &&
                      (workspace.splits == 0 || (backward <= INT32_MAX && finish < INT32_MAX));
    Check check(function);
    check.that(fits, MAMBA_ERROR_UNSUPPORTED, "too large for one launch: batch=%lld seqlen=%lld nheads=%lld dstate=%lld",
               static_cast<long long>(p.batch), static_cast<long long>(p.seqlen), static_cast<long long>(p.nheads),
               static_cast<long long>(p.dstate));
    return check.status();
}

int64_t workspace_bytes(const char* function, const MambaSsd* params, bool backward) {
    if (check_ssd_problem(function, params) != MAMBA_OK || ssd_is_empty(*params)) {
        return 0;  // the call itself will say what is wrong
    }
    const SsdProblem problem(*params, backward, params->out != nullptr);
    return problem.error == cudaSuccess ? problem.workspace.bytes : 0;
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int64_t mamba_ssd_forward_workspace(const MambaSsd* params) {
    return workspace_bytes("ssd_forward_workspace", params, false);
}

int64_t mamba_ssd_backward_workspace(const MambaSsd* params) {
    return workspace_bytes("ssd_backward_workspace", params, true);
}

int32_t mamba_ssd_forward(const MambaSsd* params) {
    const char* const function = "ssd_forward";
    int32_t status = check_ssd_forward(function, params);
    if (status != MAMBA_OK || ssd_forward_is_empty(*params)) {
        return status;
    }
    const MambaSsd& p = *params;
    const DeviceGuard guard(p.run.device);
    const SsdProblem problem(p, false, p.out != nullptr);
    cudaError_t error = guard.error != cudaSuccess ? guard.error : problem.error;
    if (error == cudaSuccess) {
        status = check_ssd_workspace(function, p, problem.workspace.bytes);
        status = status != MAMBA_OK ? status : check_grid(function, p, problem.plan, problem.workspace);
        if (status != MAMBA_OK) {
            return status;
        }
        error = launchers_of<SsdLaunchers>(p.dtype).forward(p, problem.plan, problem.workspace);
    }
    return cuda_status(error, function, p.batch, p.nheads * p.headdim, p.seqlen, p.dstate);
}

int32_t mamba_ssd_backward(const MambaSsdBackward* params) {
    const char* const function = "ssd_backward";
    int32_t status = check_ssd_backward(function, params);
    if (status != MAMBA_OK || ssd_is_empty(params->forward)) {
        return status;
    }
    const MambaSsd& p = params->forward;
    const DeviceGuard guard(p.run.device);
    const SsdProblem problem(p, true, true);
    cudaError_t error = guard.error != cudaSuccess ? guard.error : problem.error;
    if (error == cudaSuccess) {
        status = check_ssd_workspace(function, p, problem.workspace.bytes);
        status = status != MAMBA_OK ? status : check_grid(function, p, problem.plan, problem.workspace);
        if (status != MAMBA_OK) {
            return status;
        }
        error = launchers_of<SsdLaunchers>(p.dtype).backward(*params, problem.plan, problem.workspace);
    }
    return cuda_status(error, function, p.batch, p.nheads * p.headdim, p.seqlen, p.dstate);
}

int32_t mamba_ssd_carry(const MambaSsdCarry* params) {
    const char* const function = "ssd_carry";
    const int32_t status = check_ssd_carry(function, params);
    if (status != MAMBA_OK || ssd_carry_is_empty(*params)) {
        return status;
    }
    const DeviceGuard guard(params->run.device);
    const cudaError_t error = guard.error != cudaSuccess ? guard.error : launch_pieces(*params);
    return cuda_status(error, function, params->batch, params->nheads, params->pieces, params->state_size);
}
