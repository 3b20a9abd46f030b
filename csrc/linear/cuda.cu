// The linear layer's C ABI in mamba_cuda, and the kernels that are compiled once for all dtypes.
#include "common/cuda_device.h"
#include "linear/check.h"
#include "linear/cuda/dequantize.cuh"
#include "linear/cuda/greedy.cuh"
#include "linear/kernels.h"
#include "linear/launch.h"

namespace mamba {
KernelTable linear_table("linear", kLinearKernels);
KernelTable dequantize_table("dequantize", kDequantizeKernels);
KernelTable greedy_token_table("greedy_token", kGreedyTokenKernels);
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
        dequantize_table.count_launch(kernel, params->dtype);
        error = launch_dequantize(*params);
    }
    return cuda_status(error, function, params->rows, params->features, 1, 1);
}

int32_t mamba_greedy_token(const MambaGreedyToken* params) {
    const char* const function = "greedy_token";
    const int32_t status = check_greedy_token(function, params);
    if (status != MAMBA_OK || params->rows == 0) {
        return status;
    }
    const CallDevice device(params->run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(greedy_token_table, kGreedyTokenKernels, device.major, params->dtype, *params);
        greedy_token_table.count_launch(kernel, params->dtype);
        error = launch_greedy_token(*params);
    }
    return cuda_status(error, function, params->rows, params->vocabulary, 1, 1);
}
