// An op's CUDA kernels as a table: what exists, when each runs, how often it did. One place chooses, the first row that takes a
// call; the launcher is given that row's number.
//
//     struct LinearKernel : KernelRow { bool (*takes)(const MambaLinear&); int rows; };             // csrc/linear/kernels.h
//     inline constexpr LinearKernel kLinearKernels[] = {{{"one_row", ...}, has_one_row, 1}, ...};   // the general row last
//     KernelTable linear_table("linear", kLinearKernels);                                           // csrc/linear/cuda.cu
//     const int kernel = choose_kernel(linear_table, kLinearKernels, device.major, p.dtype, p);
//     launch_row<T, kLinearKernels>(linear_table, kernel, [&](auto row) { ... });                   // common/kernel_launch.cuh
#pragma once

#include <stdint.h>

#include "mamba_types.h"

namespace mamba {

// Sets of dtypes.
constexpr uint32_t kF32 = 1u << MAMBA_FLOAT32;
constexpr uint32_t kF16 = 1u << MAMBA_FLOAT16;
constexpr uint32_t kBf16 = 1u << MAMBA_BFLOAT16;
constexpr uint32_t k16Bit = kF16 | kBf16;
constexpr uint32_t kAllDtypes = kF32 | k16Bit;
constexpr int kDtypes = 3;

// Whether this library has code for compute capability 9.0a, whose wgmma no other GPU has.
#ifdef MAMBA_WARPGROUPS
constexpr bool kHasWarpgroups = true;
#else
constexpr bool kHasWarpgroups = false;
#endif

// What every row begins with, for readers: `python -m mamba_ssm --kernels` prints it.
struct KernelRow {
    const char* name;      // in the field's words, unique in its table
    const char* needs;     // what a call must have, in words; "" for any call
    const char* shape;     // what a block works on, in words: "64 channels, tiles of 32 steps"
    uint32_t dtypes;       // there is one instance for each of them
    int32_t threads;       // of a block, at most
    int32_t shared_bytes;  // dynamic shared memory of a block, at most
    int32_t architecture;  // the oldest compute capability that runs it: 75, 80; 90 is 9.0a, and no other
};

// The rows of one op. All tables of a library are objects that live as long as it does; the constructor adds them to its list.
class KernelTable {
 public:
    static constexpr int kMostRows = 64;

    template <class Row, int kCount>
    KernelTable(const char* op, const Row (&rows)[kCount])
        : op(op), count(kCount), first_(rows), stride_(static_cast<int64_t>(sizeof(Row))), number_(add_to_list(this)) {
        static_assert(kCount <= kMostRows, "raise kMostRows");
    }
    KernelTable(const KernelTable&) = delete;
    KernelTable& operator=(const KernelTable&) = delete;

    const char* const op;
    const int count;

    const KernelRow& row(int kernel) const {
        return *reinterpret_cast<const KernelRow*>(reinterpret_cast<const char*>(first_) + kernel * stride_);
    }
    int64_t launches(int kernel, int32_t dtype) const;
    void count_launch(int kernel, int32_t dtype);
    // Calls pass over a row that is off, and take the next one that can run.
    bool is_on(int kernel) const;
    void turn(int kernel, bool on);

 private:
    static int add_to_list(KernelTable* table);

    const KernelRow* const first_;
    const int64_t stride_;
    const int number_;  // in the list
};

// Whether a row's code runs on GPUs of this major compute capability.
inline bool row_runs_on(const KernelRow& row, int major) {
    return row.architecture == 90 ? kHasWarpgroups && major == 9 : major >= row.architecture / 10;
}

// The first row that is on, has the dtype, runs on the GPU, and takes the call; -1: none. call: what the rows' `takes` are
// given.
template <class Row, int kCount, class... Call>
int choose_kernel(const KernelTable& table, const Row (&rows)[kCount], int major, int32_t dtype, const Call&... call) {
    for (int kernel = 0; kernel < kCount; ++kernel) {
        const Row& row = rows[kernel];
        if ((row.dtypes >> dtype & 1) != 0 && row_runs_on(row, major) && table.is_on(kernel) && row.takes(call...)) {
            return kernel;
        }
    }
    return -1;
}

}  // namespace mamba
