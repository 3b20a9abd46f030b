// What the CPU entry points share: which instruction set to run, and threads.
#pragma once

#include <stdint.h>

#include "common/check.h"
#include "common/integers.h"

namespace mamba {

enum class Isa { generic, avx2, avx512 };

// The best instruction set of this CPU, or the one that MAMBA_SSM_CPU_ISA names; decided once per process.
// Fails when that variable holds something else, or more than the CPU has.
int32_t choose_isa(Isa* isa);

// Whether kernels of this instruction set may use AVX-512 VNNI beside it.
bool has_vnni(Isa isa);

// What a call that passed its op's checks still needs: a thread to run on, and an instruction set.
int32_t begin_call(const char* function, const MambaRun& run, Isa* isa);

// Of an op's kernels, which are compiled once per instruction set.
template <class Kernels>
const Kernels& kernels_of(Isa isa, const Kernels& generic, const Kernels& avx2, const Kernels& avx512) {
    return isa == Isa::avx512 ? avx512 : isa == Isa::avx2 ? avx2 : generic;
}

// Threads worth starting for `work` (in inner steps of the op, `work_per_thread` of which outweigh starting a thread).
int64_t worthwhile_threads(const MambaRun& run, int64_t work, int64_t work_per_thread);

// Runs task(context, share) for share = 0 .. shares - 1, on the calling thread and those of a pool, and returns when all are
// done. Denormals count as zero meanwhile: states that decay would otherwise end in arithmetic many times slower.
void run_shares(int64_t shares, void (*task)(void* context, int64_t share), void* context);

// Cut `total` into `shares` parts that differ by at most one; the first element of part `share`.
int64_t share_begin(int64_t total, int64_t shares, int64_t share);

template <class Params>
struct RowsJob {
    const Params* params;
    void (*kernel)(const Params& params, int64_t begin, int64_t end);
    int64_t rows, shares;
};

template <class Params>
void run_rows_share(void* context, int64_t share) {
    const RowsJob<Params>& job = *static_cast<const RowsJob<Params>*>(context);
    job.kernel(*job.params, share_begin(job.rows, job.shares, share), share_begin(job.rows, job.shares, share + 1));
}

// Runs kernel(params, begin, end) on shares of the rows [0, rows), which are independent, on several threads where that is
// worth it. work, work_per_thread: see worthwhile_threads.
template <class Params>
void run_rows(void (*kernel)(const Params& params, int64_t begin, int64_t end), const Params& params, int64_t rows,
              int64_t work, int64_t work_per_thread) {
    const int64_t threads = worthwhile_threads(params.run, work, work_per_thread);
    RowsJob<Params> job = {&params, kernel, rows, threads < rows ? threads : rows};
    run_shares(job.shares, run_rows_share<Params>, &job);
}

// Uninitialised floats aligned to a cache line, or null.
class Scratch {
 public:
    explicit Scratch(int64_t floats);
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    float* get() const { return data_; }

 private:
    float* data_;
};

}  // namespace mamba
