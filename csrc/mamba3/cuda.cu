// The C ABI of Mamba-3's scan in mamba_cuda, which has no kernel for it yet: Python runs it on torch's operators there.
#include "mamba3/check.h"

namespace mamba {
namespace {

int32_t no_kernel(const char* function) {
    return fail(MAMBA_ERROR_UNSUPPORTED, "%s: this library has no CUDA kernel for Mamba-3's scan", function);
}

}  // namespace
}  // namespace mamba

using namespace mamba;

int32_t mamba_mamba3_forward(const MambaMamba3* params) {
    const int32_t status = check_mamba3_forward("mamba3_forward", params);
    return status != MAMBA_OK || mamba3_is_empty(*params) ? status : no_kernel("mamba3_forward");
}

int32_t mamba_mamba3_backward(const MambaMamba3Backward* params) {
    const int32_t status = check_mamba3_backward("mamba3_backward", params);
    return status != MAMBA_OK || mamba3_is_empty(params->forward) ? status : no_kernel("mamba3_backward");
}

int32_t mamba_mamba3_step(const MambaMamba3Step* params) {
    const int32_t status = check_mamba3_step("mamba3_step", params);
    return status != MAMBA_OK || mamba3_is_empty(params->scan) ? status : no_kernel("mamba3_step");
}

int64_t mamba_mamba3_backward_workspace(const MambaMamba3* params) {
    check_mamba3_problem("mamba3_backward_workspace", params);
    return 0;
}
