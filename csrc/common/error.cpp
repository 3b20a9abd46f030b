// The parts of the C ABI that hold no kernel: messages, dtype names and struct sizes. Compiled into both libraries.
#include "common/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

namespace mamba {

static thread_local char last_error[1024] = "";

int32_t fail(int32_t code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof(last_error), format, arguments);
    va_end(arguments);
    return code;
}

const char* dtype_name(int32_t dtype) {
    switch (dtype) {
        case MAMBA_FLOAT32:
            return "float32";
        case MAMBA_FLOAT16:
            return "float16";
        case MAMBA_BFLOAT16:
            return "bfloat16";
        default:
            return "an unknown dtype";
    }
}

int32_t check_dtype(const char* argument, int32_t dtype) {
    if (dtype < MAMBA_FLOAT32 || dtype > MAMBA_BFLOAT16) {
        return fail(MAMBA_ERROR_INVALID, "%s: dtype code %d is none of float32 (0), float16 (1), bfloat16 (2)", argument,
                    static_cast<int>(dtype));
    }
#ifdef MAMBA_DISABLE_HALF
    if (dtype == MAMBA_FLOAT16) {
        return fail(MAMBA_ERROR_DTYPE_DISABLED,
                    "%s is float16, which was switched off when this wheel was built (MM_DISABLE_HALF=1); use another dtype or "
                    "a wheel built without that switch",
                    argument);
    }
#endif
#ifdef MAMBA_DISABLE_BF16
    if (dtype == MAMBA_BFLOAT16) {
        return fail(MAMBA_ERROR_DTYPE_DISABLED,
                    "%s is bfloat16, which was switched off when this wheel was built (MM_DISABLE_BF16=1); use another dtype "
                    "or a wheel built without that switch",
                    argument);
    }
#endif
    return MAMBA_OK;
}

}  // namespace mamba

const char* mamba_last_error(void) {
    return mamba::last_error;
}

int64_t mamba_struct_size(const char* name) {
    struct Entry {
        const char* name;
        int64_t size;
    };
    static const Entry entries[] = {
        {"MambaRun", sizeof(MambaRun)},
        {"MambaSelectiveScan", sizeof(MambaSelectiveScan)},
        {"MambaSelectiveScanPlan", sizeof(MambaSelectiveScanPlan)},
        {"MambaSelectiveScanBackward", sizeof(MambaSelectiveScanBackward)},
        {"MambaCausalConv1d", sizeof(MambaCausalConv1d)},
        {"MambaCausalConv1dBackward", sizeof(MambaCausalConv1dBackward)},
        {"MambaCausalConv1dUpdate", sizeof(MambaCausalConv1dUpdate)},
        {"MambaSelectiveStateUpdate", sizeof(MambaSelectiveStateUpdate)},
        {"MambaSsd", sizeof(MambaSsd)},
        {"MambaSsdBackward", sizeof(MambaSsdBackward)},
        {"MambaNorm", sizeof(MambaNorm)},
        {"MambaNormBackward", sizeof(MambaNormBackward)},
        {"MambaSwiglu", sizeof(MambaSwiglu)},
        {"MambaLibraryInfo", sizeof(MambaLibraryInfo)},
    };
    for (const Entry& entry : entries) {
        if (name != nullptr && strcmp(entry.name, name) == 0) {
            return entry.size;
        }
    }
    return 0;
}
