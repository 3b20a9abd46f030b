// The host side of the linear layer's kernels: a row of the table to its kernel.
#pragma once

#include "common/alignment.h"
#include "common/kernel_launch.cuh"
#include "linear/cuda/int8.cuh"
#include "linear/cuda/kernel.cuh"
#include "linear/kernels.h"
#include "linear/launch.h"

namespace mamba {

template <typename T, bool kInt8, int kRows, int kOutputs>
cudaError_t launch_linear_as(const MambaLinear& p) {
    const int64_t size = static_cast<int64_t>(sizeof(T)), weight_size = kInt8 ? 1 : size;
    const bool vectors = rows_aligned(p.weight, weight_size, 16, used_stride(p.out_features, p.in_features)) &&
                         rows_aligned(p.x, size, 16, used_stride(p.rows, p.x_row_stride));
    const int64_t block_outputs = kLinearWarps * kOutputs, block_rows = kRows;
    const Grid grid = batch_grid(ceil_div(p.out_features, block_outputs), ceil_div(p.rows, block_rows));
    const auto launch = [&](auto kernel) {
        return launch_programmatic_dependent(kernel, grid, kLinearThreads, 0, p.run.stream, p, vectors);
    };
    if constexpr (kInt8) {
        return launch(linear_int8_kernel<T, kRows, kOutputs>);
    } else {
        return launch(linear_kernel<T, kRows, kOutputs>);
    }
}

template <typename T>
cudaError_t launch_linear(const MambaLinear& p, int kernel) {
    return launch_row<T, kLinearKernels>(linear_table, kernel, [&](auto row) {
        constexpr LinearKernel k = kLinearKernels[decltype(row)::kRow];
        return launch_linear_as<T, k.takes_int8, k.rows, k.outputs>(p);
    });
}

template <typename T>
LinearLaunchers LinearLaunchers::of() {
    LinearLaunchers launchers;
    launchers.linear = launch_linear<T>;
    return launchers;
}

}  // namespace mamba
