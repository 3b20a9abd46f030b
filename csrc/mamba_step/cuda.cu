// The C ABI of a Mamba layer's decode step in mamba_cuda.
#include "common/cuda_device.h"
#include "mamba_step/check.h"
#include "mamba_step/kernels.h"
#include "mamba_step/launch.h"
#include "mamba_step/plan.h"

namespace mamba {
KernelTable mamba_step_table("mamba_step", kMambaStepKernels);
}  // namespace mamba

using namespace mamba;

int64_t mamba_mamba_step_workspace(const MambaMambaStep* params) {
    return params == nullptr || params->batch <= 0 || params->dim <= 0 ? 0 : step_workspace_bytes(*params);
}

int32_t mamba_mamba_step(const MambaMambaStep* params) {
    const char* const function = "mamba_step";
    const int32_t status = check_mamba_step(function, params);
    if (status != MAMBA_OK || mamba_step_is_empty(*params)) {
        return status;
    }
    const CallDevice device(params->run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(mamba_step_table, kMambaStepKernels, device.major, params->dtype, *params);
        error = launchers_of<MambaStepLaunchers>(params->dtype).step(*params, kernel);
    }
    return cuda_status(error, function, params->batch, params->dim, 1, params->dstate);
}
