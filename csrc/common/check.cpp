// The checks of check.h. Compiled into both libraries.
#include "common/check.h"

#include <stdarg.h>
#include <stdio.h>

namespace mamba {
namespace {

struct Dtype {
    const char* name;
    const char* off_switch;  // of the wheel's build
    bool enabled;
};

#ifdef MAMBA_DISABLE_HALF
constexpr bool kHalf = false;
#else
constexpr bool kHalf = true;
#endif
#ifdef MAMBA_DISABLE_BF16
constexpr bool kBfloat16 = false;
#else
constexpr bool kBfloat16 = true;
#endif

// By code.
constexpr Dtype kDtypes[] = {
    {"float32", "", true}, {"float16", "MM_DISABLE_HALF", kHalf}, {"bfloat16", "MM_DISABLE_BF16", kBfloat16}};

bool is_dtype(int32_t dtype) {
    return dtype >= MAMBA_FLOAT32 && dtype <= MAMBA_BFLOAT16;
}

}  // namespace

bool dtype_enabled(int32_t dtype) {
    return is_dtype(dtype) && kDtypes[dtype].enabled;
}

const char* dtype_name(int32_t dtype) {
    return is_dtype(dtype) ? kDtypes[dtype].name : "an unknown dtype";
}

void Check::that(bool holds, int32_t code, const char* format, ...) {
    if (!ok() || holds) {
        return;
    }
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    status_ = fail(code, "%s: %s", function_, message);
}

void Check::pointer(const char* name, const void* pointer, bool needed) {
    that(!needed || pointer != nullptr, MAMBA_ERROR_INVALID, "%s is NULL", name);
}

void Check::at_least(int64_t low, const char* name, int64_t value) {
    that(value >= low, MAMBA_ERROR_INVALID, "%s must be at least %lld, got %lld", name, static_cast<long long>(low),
         static_cast<long long>(value));
}

void Check::range(int64_t low, int64_t high, const char* name, int64_t value) {
    that(value >= low && value <= high, value < low ? MAMBA_ERROR_INVALID : MAMBA_ERROR_UNSUPPORTED,
         "%s must be in [%lld, %lld], got %lld", name, static_cast<long long>(low), static_cast<long long>(high),
         static_cast<long long>(value));
}

void Check::divides(const char* part_name, int64_t part, const char* whole_name, int64_t whole) {
    that(part >= 1 && whole % (part >= 1 ? part : 1) == 0, MAMBA_ERROR_INVALID, "%s must divide %s, got %s=%lld %s=%lld",
         part_name, whole_name, part_name, static_cast<long long>(part), whole_name, static_cast<long long>(whole));
}

void Check::dtype(const char* name, int32_t dtype, bool needed) {
    that(!needed || is_dtype(dtype), MAMBA_ERROR_INVALID, "%s: dtype code %d is none of float32 (0), float16 (1), bfloat16 (2)",
         name, static_cast<int>(dtype));
    if (ok() && needed) {
        that(dtype_enabled(dtype), MAMBA_ERROR_DTYPE_DISABLED,
             "%s is %s, which was switched off when this wheel was built (%s=1); use another dtype or a wheel built without "
             "that switch",
             name, dtype_name(dtype), kDtypes[dtype].off_switch);
    }
}

}  // namespace mamba
