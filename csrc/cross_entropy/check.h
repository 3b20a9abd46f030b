// What both libraries refuse before a cross entropy.
#pragma once

#include "common/check.h"

namespace mamba {

inline int32_t check_cross_entropy(const char* function, const MambaCrossEntropy* params) {
    Check check(function);
    check.pointer("params", params);
    if (!check.ok()) {
        return check.status();
    }
    const MambaCrossEntropy& p = *params;
    check.at_least(0, "rows", p.rows);
    check.range(1, 1 << 30, "vocabulary", p.vocabulary);
    check.dtype("logits", p.dtype);
    check.range(0, 1, "gradient", p.gradient);
    if (check.ok() && p.rows > 0) {
        check.pointer("logits", p.logits);
        check.pointer("labels", p.labels);
        check.pointer("losses", p.losses);
    }
    return check.status();
}

}  // namespace mamba
