// The C ABI of Mamba-3's scan in mamba_cuda.
#include "mamba3/check.h"
#include "mamba3/cuda/prepare.cuh"
#include "mamba3/launch.h"

namespace mamba {
namespace {

int32_t no_kernel(const char* function) {
    return fail(MAMBA_ERROR_UNSUPPORTED, "%s: this library has no CUDA kernel for it", function);
}

// The grids are one-dimensional.
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

}  // namespace
}  // namespace mamba

using namespace mamba;

int64_t mamba_mamba3_forward_workspace(const MambaMamba3* params) {
    if (check_mamba3_problem("mamba3_forward_workspace", params) != MAMBA_OK || mamba3_is_empty(*params)) {
        return 0;  // the call itself will say what is wrong
    }
    const Mamba3Forward plan(*params);
    return plan.error == cudaSuccess ? plan.bytes : 0;
}

int32_t mamba_mamba3_forward(const MambaMamba3* params) {
    const char* const function = "mamba3_forward";
    int32_t status = check_mamba3_forward(function, params);
    if (status != MAMBA_OK || mamba3_is_empty(*params)) {
        return status;
    }
    const MambaMamba3& p = *params;
    const DeviceGuard guard(p.run.device);
    const Mamba3Forward plan(p);
    cudaError_t error = guard.error != cudaSuccess ? guard.error : plan.error;
    if (error == cudaSuccess) {
        status = check_forward_call(function, p, plan);
        if (status != MAMBA_OK) {
            return status;
        }
        error = launch_mamba3_prepare(p, plan.chunks.place(p.workspace));
    }
    if (error == cudaSuccess) {
        error = launchers_of<Mamba3Launchers>(p.dtype).forward(p, plan);
    }
    return cuda_status(error, function, p.batch, p.nheads * p.headdim, p.seqlen, p.dstate);
}

int32_t mamba_mamba3_backward(const MambaMamba3Backward* params) {
    const int32_t status = check_mamba3_backward("mamba3_backward", params);
    return status != MAMBA_OK || mamba3_is_empty(params->forward) ? status : no_kernel("mamba3_backward");
}

int32_t mamba_mamba3_step(const MambaMamba3Step* params) {
    const char* const function = "mamba3_step";
    const int32_t status = check_mamba3_step(function, params);
    if (status != MAMBA_OK || mamba3_is_empty(params->scan)) {
        return status;
    }
    const MambaMamba3& p = params->scan;
    const DeviceGuard guard(p.run.device);
    cudaError_t error = guard.error;
    if (error == cudaSuccess) {
        const bool fits = p.batch * p.nheads <= INT32_MAX;
        error = fits ? launchers_of<Mamba3Launchers>(params->ssm_dtype).step(*params) : cudaErrorInvalidConfiguration;
    }
    return cuda_status(error, function, p.batch, p.nheads * p.headdim, 1, p.dstate);
}

int64_t mamba_mamba3_backward_workspace(const MambaMamba3* params) {
    check_mamba3_problem("mamba3_backward_workspace", params);
    return 0;
}
