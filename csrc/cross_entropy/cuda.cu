// The cross entropy's C ABI in mamba_cuda.
#include "common/cuda_device.h"
#include "cross_entropy/check.h"
#include "cross_entropy/kernels.h"
#include "cross_entropy/launch.h"

namespace mamba {
KernelTable cross_entropy_table("cross_entropy", kCrossEntropyKernels);
}  // namespace mamba

using namespace mamba;

int32_t mamba_cross_entropy(const MambaCrossEntropy* params) {
    const char* const function = "cross_entropy";
    const int32_t status = check_cross_entropy(function, params);
    if (status != MAMBA_OK || params->rows == 0) {
        return status;
    }
    const CallDevice device(params->run.device);
    cudaError_t error = device.error;
    if (error == cudaSuccess) {
        const int kernel = choose_kernel(cross_entropy_table, kCrossEntropyKernels, device.major, params->dtype, *params);
        error = launchers_of<CrossEntropyLaunchers>(params->dtype).cross_entropy(*params, kernel);
    }
    return cuda_status(error, function, params->rows, params->vocabulary, 1, 1);
}
