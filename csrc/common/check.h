// What both libraries refuse, in one dialect. Python has checked shapes and dtypes already; this guards the C ABI.
#pragma once

#include "common/error.h"

namespace mamba {

// The checks of one call. The first that fails leaves its code and message, "<function>: ..."; those after it are passed over.
// A check that needs an earlier one to have held asks ok() first.
class Check {
 public:
    explicit Check(const char* function) : function_(function), status_(MAMBA_OK) {}

    bool ok() const { return status_ == MAMBA_OK; }
    int32_t status() const { return status_; }

    // "<name> is NULL". needed: this call reads or writes there.
    void pointer(const char* name, const void* pointer, bool needed = true);
    // "<name> must be at least <low>, got <value>"
    void at_least(int64_t low, const char* name, int64_t value);
    // "<name> must be in [<low>, <high>], got <value>". Above high it is right, but not in this library.
    void range(int64_t low, int64_t high, const char* name, int64_t value);
    // "<part_name> must divide <whole_name>, got ..."
    void divides(const char* part_name, int64_t part, const char* whole_name, int64_t whole);
    // "<name>: dtype code <dtype> is none of ...", or "<name> is float16, which was switched off ...". needed: there is a
    // <name>.
    void dtype(const char* name, int32_t dtype, bool needed = true);
    // Anything else: fails with this code and printf-style message unless it holds.
    void that(bool holds, int32_t code, const char* format, ...);

 private:
    const char* function_;
    int32_t status_;
};

// Whether kernels for this dtype were compiled.
bool dtype_enabled(int32_t dtype);
// "float32", "float16", "bfloat16", or "an unknown dtype".
const char* dtype_name(int32_t dtype);

}  // namespace mamba
