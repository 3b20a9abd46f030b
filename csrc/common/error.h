// Error reporting of both libraries: a code goes back through the C ABI, the words wait in a thread-local buffer.
#pragma once

#include "mamba_kernels.h"

namespace mamba {

// Stores the printf-style message for mamba_last_error() and returns code, so that callers write `return fail(...)`.
int32_t fail(int32_t code, const char* format, ...);

// "float32", "float16", "bfloat16", or "dtype N" for a number that is none.
const char* dtype_name(int32_t dtype);

// MAMBA_OK, or fails because dtype is unknown or was switched off when the library was built.
int32_t check_dtype(const char* argument, int32_t dtype);

}  // namespace mamba
