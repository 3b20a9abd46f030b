// The cross entropy's kernel.
#pragma once

#include "common/alignment.h"
#include "common/integers.h"
#include "common/kernel_table.h"

namespace mamba {

constexpr int kCrossEntropyThreads = 1024;

struct CrossEntropyKernel : KernelRow {
    bool (*takes)(const MambaCrossEntropy& p);
};

// Threads of a block: one for 256 bytes of a row. A multiprocessor holds 1024, so that long rows are few at a time: their
// second read finds them in the L2 cache. Short rows are many, and hide each other's barriers.
inline int cross_entropy_threads(const MambaCrossEntropy& p) {
    static_assert(kCrossEntropyThreads == 1 << 10, "the most");
    return 1 << ceil_log2(ceil_div(p.vocabulary * dtype_size(p.dtype), 256), 6, 10);
}

inline bool takes_any_cross_entropy(const MambaCrossEntropy&) {
    return true;
}

inline constexpr CrossEntropyKernel kCrossEntropyKernels[] = {
    // name, needs, shape, dtypes, threads, shared bytes, architecture; takes
    {{"row", "", "a row", kAllDtypes, kCrossEntropyThreads, 0, 75}, takes_any_cross_entropy},
};
extern KernelTable cross_entropy_table;

}  // namespace mamba
