// The linear layer's C ABI in mamba_cuda.
#include "common/cuda_device.h"
#include "linear/check.h"
#include "linear/kernels.h"
#include "linear/launch.h"

namespace mamba {
KernelTable linear_table("linear", kLinearKernels);
KernelTable dequantize_table("dequantize", kDequantizeKernels);
}  // namespace mamba

using namespace mamba;

int32_t mamba_linear(const MambaLinear* params) {
    const char* const function = "linear";
    const int32_t status = check_linear(function, params, true);
    if (status != MAMBA_OK || linear_is_empty(*params)) {
        return status;
    }
    const CallDevice device(params->run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(linear_table, kLinearKernels, device.major, params->dtype, *params);
        if (kernel < 0 && params->norm_weight != nullptr) {
            return fail(MAMBA_ERROR_UNSUPPORTED, "%s: a norm needs the kernel int8_one_row, which is off", function);
        }
        error = launchers_of<LinearLaunchers>(params->dtype).linear(*params, kernel, device.processors);
    }
    return cuda_status(error, function, params->rows, params->out_features, params->in_features, 0);
}

int32_t mamba_dequantize(const MambaDequantize* params) {
    const char* const function = "dequantize";
    const int32_t status = check_dequantize(function, params);
    if (status != MAMBA_OK || dequantize_is_empty(*params)) {
        return status;
    }
    const DeviceGuard guard(params->run.device);
    const DeviceLimits device(params->run.device);
    cudaError_t error = guard.error != cudaSuccess ? guard.error : device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(dequantize_table, kDequantizeKernels, device.major, params->dtype, *params);
        error = launchers_of<LinearLaunchers>(params->dtype).dequantize(*params, kernel);
    }
    return cuda_status(error, function, params->rows, params->features, 1, 1);
}
