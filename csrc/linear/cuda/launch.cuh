// The host side of the linear layer's kernels: a row of the table to its kernel.
#pragma once

#include "common/alignment.h"
#include "common/kernel_launch.cuh"
#include "linear/cuda/int8.cuh"
#include "linear/cuda/int8_row.cuh"
#include "linear/cuda/kernel.cuh"
#include "linear/kernels.h"
#include "linear/launch.h"

namespace mamba {

// Blocks that a multiprocessor holds walk over all rows of the weight.
template <typename T>
cudaError_t launch_linear_int8_row(const MambaLinear& p, int processors) {
    const int lanes_log2 = int8_row_lanes_log2(p.in_features);
    const int64_t wanted = ceil_div(p.out_features, static_cast<int64_t>(kLinearWarps * (32 >> lanes_log2)));
    const int64_t resident = static_cast<int64_t>(processors) * kInt8RowResident;
    if (p.norm_weight == nullptr && wanted <= resident && p.in_features <= kInt8RowSteps * (kInt8Vector << lanes_log2)) {
        return launch_programmatic_dependent(linear_int8_short_row_kernel<T>, wanted, kLinearThreads, 0, p.run.stream, p,
                                             lanes_log2);
    }
    const int64_t lane_step = kInt8Vector << lanes_log2;
    const size_t shared = static_cast<size_t>(round_up(p.in_features, lane_step)) * sizeof(float);
    return launch_programmatic_dependent(linear_int8_row_kernel<T>, wanted < resident ? wanted : resident, kLinearThreads,
                                         shared, p.run.stream, p, lanes_log2);
}

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
cudaError_t launch_linear(const MambaLinear& p, int kernel, int processors) {
    return launch_row<T, kLinearKernels>(linear_table, kernel, [&](auto row) {
        constexpr LinearKernel k = kLinearKernels[decltype(row)::kRow];
        if constexpr (k.takes_int8 && k.rows == 1) {
            return launch_linear_int8_row<T>(p, processors);
        } else {
            return launch_linear_as<T, k.takes_int8, k.rows, k.outputs>(p);
        }
    });
}

template <typename T>
LinearLaunchers LinearLaunchers::of() {
    LinearLaunchers launchers;
    launchers.linear = launch_linear<T>;
    return launchers;
}

}  // namespace mamba
