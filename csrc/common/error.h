// Error reporting of both libraries: a code goes back through the C ABI, the words wait in a thread-local buffer.
#pragma once

#include "mamba_kernels.h"

namespace mamba {

// Stores the printf-style message for mamba_last_error() and returns code, so that callers write `return fail(...)`.
int32_t fail(int32_t code, const char* format, ...);

}  // namespace mamba
