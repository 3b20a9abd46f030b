// Mamba-2's scan on the CPU: being written.
#include "common/error.h"

int32_t mamba_ssd_forward(const MambaSsd*) {
    return mamba::fail(MAMBA_ERROR_UNSUPPORTED, "ssd_forward: not in this library yet");
}

int32_t mamba_ssd_backward(const MambaSsdBackward*) {
    return mamba::fail(MAMBA_ERROR_UNSUPPORTED, "ssd_backward: not in this library yet");
}

int64_t mamba_ssd_forward_workspace(const MambaSsd*) {
    return 0;
}

int64_t mamba_ssd_backward_workspace(const MambaSsd*) {
    return 0;
}
