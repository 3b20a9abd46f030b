// Which kernels Mamba-2's scan has on CUDA, and when they run. A row is a path of several: README.md says which.
#pragma once

#include "common/alignment.h"
#include "common/cuda_device.h"
#include "common/kernel_table.h"
#include "mamba_kernels.h"

namespace mamba {

struct SsdKernel : KernelRow {
    bool (*takes)(const MambaSsd& p, const DeviceLimits& device);
    int states;        // dstate is at most that
    int steps;         // of a chunk
    int rows;          // of headdim that a block takes
    int shared_ahead;  // backward: as many bytes of shared memory let the next item's tiles be on their way; 0: never

    constexpr bool on_warpgroups() const { return architecture == 90; }
    constexpr int slices() const { return on_warpgroups() && states > 128 ? 2 : 1; }
    // Elements of a head's state at a segment's end: (P, N), on warpgroups whole tiles as their threads hold them, which
    // store_accumulators writes.
    constexpr int64_t end_size(const MambaSsd& p) const {
        return on_warpgroups() ? round_up(p.headdim, rows) * states : p.headdim * p.dstate;
    }
};

// Shared memory that every GPU lets a block have, and those from 8.0 on.
constexpr int kEveryShared = 64 * 1024;
constexpr int kAmpereShared = 96 * 1024;

// Rows of x and out start at multiples of 16 bytes. out NULL is no matter.
inline bool has_aligned_rows(const MambaSsd& p) {
    const int64_t size = dtype_size(p.dtype);
    return rows_aligned(p.x, size, 16, p.headdim, p.x_batch_stride, p.x_len_stride, p.x_head_stride) &&
           rows_aligned(p.out, size, 16, p.headdim, p.out_batch_stride, p.out_len_stride, p.out_head_stride);
}
inline bool is_aligned_with_64_states(const MambaSsd& p, const DeviceLimits&) {
    return p.dstate <= 64 && has_aligned_rows(p);
}
inline bool is_aligned_with_128_states(const MambaSsd& p, const DeviceLimits&) {
    return p.dstate <= 128 && has_aligned_rows(p);
}
inline bool is_aligned(const MambaSsd& p, const DeviceLimits&) {
    return has_aligned_rows(p);
}
inline bool has_64_states(const MambaSsd& p, const DeviceLimits&) {
    return p.dstate <= 64;
}
inline bool has_128_states(const MambaSsd& p, const DeviceLimits&) {
    return p.dstate <= 128;
}
inline bool has_any_states(const MambaSsd&, const DeviceLimits&) {
    return true;
}

// clang-format off: rows
// name, needs, shape, dtypes, threads, shared bytes, architecture; takes, states, steps, rows, shared memory ahead
inline constexpr SsdKernel kSsdForwardKernels[] = {
    {{"warpgroup_dstate64", "dstate <= 64; rows of x and out at multiples of 16 bytes",
      "64 of headdim, chunks of 64 steps", k16Bit, 128, 69632, 90}, is_aligned_with_64_states, 64, 64, 64, 0},
    {{"warpgroup_dstate128", "dstate <= 128; rows of x and out at multiples of 16 bytes",
      "64 of headdim, chunks of 64 steps", k16Bit, 128, 102400, 90}, is_aligned_with_128_states, 128, 64, 64, 0},
    {{"warpgroup_dstate256", "rows of x and out at multiples of 16 bytes",
      "64 of headdim, chunks of 64 steps", k16Bit, 384, 201728, 90}, is_aligned, 256, 64, 64, 0},
    {{"dstate128", "dstate <= 128",
      "64 of headdim, chunks of 64 steps", k16Bit, 128, kEveryShared, 75}, has_128_states, 128, 64, 64, 0},
    {{"dstate256", "",
      "64 of headdim, chunks of 32 steps", k16Bit, 128, kEveryShared, 75}, has_any_states, 256, 32, 64, 0},
    {{"float32_dstate128", "dstate <= 128",
      "64 of headdim, chunks of 16 steps", kF32, 128, kEveryShared, 75}, has_128_states, 128, 16, 64, 0},
    {{"float32_dstate256", "",
      "64 of headdim, chunks of 16 steps", kF32, 128, kEveryShared, 75}, has_any_states, 256, 16, 64, 0},
};

inline constexpr SsdKernel kSsdBackwardKernels[] = {
    {{"warpgroup_dstate64", "dstate <= 64",
      "a chunk of 64 steps, heads of a group", k16Bit, 512, 232448, 90}, has_64_states, 64, 64, 64, 0},
    {{"warpgroup_dstate128", "dstate <= 128",
      "a chunk of 64 steps, heads of a group", k16Bit, 512, 232448, 90}, has_128_states, 128, 64, 64, 0},
    {{"warpgroup_dstate256", "dstate <= 256",
      "a chunk of 64 steps, heads of a group, half of the states", k16Bit, 512, 232448, 90}, has_any_states, 256, 64, 64, 0},
    {{"dstate128", "dstate <= 128",
      "a chunk of 64 steps, heads of a group", k16Bit, 256, 166000, 80}, has_128_states, 128, 64, 64, 166000},
    {{"dstate256", "",
      "a chunk of 32 steps, heads of a group", k16Bit, 128, kEveryShared, 75}, has_any_states, 256, 32, 32, 0},
    {{"float32_dstate128", "dstate <= 128",
      "a chunk of 16 steps, heads of a group", kF32, 128, kEveryShared, 75}, has_128_states, 128, 16, 32, 0},
    {{"float32_dstate256", "",
      "a chunk of 16 steps, heads of a group", kF32, 128, kEveryShared, 75}, has_any_states, 256, 16, 16, 0},
};
// clang-format on

extern KernelTable ssd_forward_table;
extern KernelTable ssd_backward_table;

}  // namespace mamba
