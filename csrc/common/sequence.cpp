// Several calls by one. Compiled into both libraries.
#include "common/check.h"

int32_t mamba_run_sequence(const MambaSequence* params) {
    mamba::Check check("run_sequence");
    check.pointer("params", params);
    if (check.ok()) {
        check.at_least(0, "count", params->count);
    }
    if (check.ok()) {
        check.pointer("calls", params->calls, params->count > 0);
    }
    for (int64_t i = 0; check.ok() && i < params->count; ++i) {
        check.pointer("function", params->calls[i].function);
    }
    if (!check.ok()) {
        return check.status();
    }
    for (int64_t i = 0; i < params->count; ++i) {
        const MambaCall& call = params->calls[i];
        // The struct's type is the function's affair: every ABI passes pointers to structs alike.
        const auto function = reinterpret_cast<int32_t (*)(const void*)>(call.function);
        const int32_t status = function(call.params);
        if (status != MAMBA_OK) {
            return status;
        }
    }
    return MAMBA_OK;
}
