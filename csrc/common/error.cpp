// The parts of the C ABI that hold no kernel: messages and struct sizes. Compiled into both libraries.
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
        {"MambaCall", sizeof(MambaCall)},
        {"MambaSequence", sizeof(MambaSequence)},
        {"MambaSelectiveScan", sizeof(MambaSelectiveScan)},
        {"MambaSelectiveScanPlan", sizeof(MambaSelectiveScanPlan)},
        {"MambaSelectiveScanBackward", sizeof(MambaSelectiveScanBackward)},
        {"MambaSelectiveScanDoubleBackward", sizeof(MambaSelectiveScanDoubleBackward)},
        {"MambaCausalConv1d", sizeof(MambaCausalConv1d)},
        {"MambaCausalConv1dBackward", sizeof(MambaCausalConv1dBackward)},
        {"MambaCausalConv1dUpdate", sizeof(MambaCausalConv1dUpdate)},
        {"MambaSelectiveStateUpdate", sizeof(MambaSelectiveStateUpdate)},
        {"MambaMamba2Step", sizeof(MambaMamba2Step)},
        {"MambaMambaStep", sizeof(MambaMambaStep)},
        {"MambaLinear", sizeof(MambaLinear)},
        {"MambaDequantize", sizeof(MambaDequantize)},
        {"MambaGreedyToken", sizeof(MambaGreedyToken)},
        {"MambaSsd", sizeof(MambaSsd)},
        {"MambaSsdBackward", sizeof(MambaSsdBackward)},
        {"MambaSsdCarry", sizeof(MambaSsdCarry)},
        {"MambaMamba3", sizeof(MambaMamba3)},
        {"MambaMamba3Backward", sizeof(MambaMamba3Backward)},
        {"MambaMamba3Step", sizeof(MambaMamba3Step)},
        {"MambaMamba3Inputs", sizeof(MambaMamba3Inputs)},
        {"MambaMamba3InputsBackward", sizeof(MambaMamba3InputsBackward)},
        {"MambaNorm", sizeof(MambaNorm)},
        {"MambaNormBackward", sizeof(MambaNormBackward)},
        {"MambaSwiglu", sizeof(MambaSwiglu)},
        {"MambaCrossEntropy", sizeof(MambaCrossEntropy)},
        {"MambaLibraryInfo", sizeof(MambaLibraryInfo)},
        {"MambaKernel", sizeof(MambaKernel)},
    };
    for (const Entry& entry : entries) {
        if (name != nullptr && strcmp(entry.name, name) == 0) {
            return entry.size;
        }
    }
    return 0;
}
