// The C ABI of a Mamba-2 layer's decode step in mamba_cuda.
#include "common/cuda_device.h"
#include "mamba2_step/check.h"
#include "mamba2_step/cuda/finish.cuh"
#include "mamba2_step/kernels.h"
#include "mamba2_step/launch.h"

namespace mamba {
KernelTable mamba2_step_table("mamba2_step", kMamba2StepKernels);
}  // namespace mamba

using namespace mamba;

int32_t mamba_mamba2_step(const MambaMamba2Step* params) {
    const char* const function = "mamba2_step";
    const int32_t status = check_mamba2_step(function, params);
    if (status != MAMBA_OK || mamba2_step_is_empty(*params)) {
        return status;
    }
    const CallDevice limits(params->run.device);
    bool together = false;
    cudaError_t error = limits.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(mamba2_step_table, kMamba2StepKernels, limits.major, params->state_dtype, *params);
        error = launchers_of<Mamba2StepLaunchers>(params->state_dtype).step(*params, kernel, limits.processors, &together);
    }
    if (error == cudaSuccess && !together) {
        error = launch_mamba2_finish(*params);
    }
    return cuda_status(error, function, params->batch, params->nheads * params->headdim, 1, params->dstate);
}
