// The decode step's C ABI in mamba_cuda.
#include "common/cuda_device.h"
#include "state_update/check.h"
#include "state_update/kernels.h"
#include "state_update/launch.h"

namespace mamba {
KernelTable state_update_table("selective_state_update", kStateUpdateKernels);
}  // namespace mamba

using namespace mamba;

int32_t mamba_selective_state_update(const MambaSelectiveStateUpdate* params) {
    const char* const function = "selective_state_update";
    const int32_t status = check_state_update(function, params);
    if (status != MAMBA_OK || state_update_is_empty(*params)) {
        return status;
    }
    const CallDevice device(params->run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(state_update_table, kStateUpdateKernels, device.major, params->state_dtype, *params);
        error = launchers_of<StateUpdateLaunchers>(params->state_dtype).update(*params, kernel, device.processors);
    }
    return cuda_status(error, function, params->batch, params->nheads * params->headdim, 1, params->dstate);
}
