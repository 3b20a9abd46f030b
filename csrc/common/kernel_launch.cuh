// From the number of a row to its kernel, which was compiled for that row.
#pragma once

#include "common/cuda_utils.cuh"
#include "common/kernel_table.h"

namespace mamba {

template <int kRow_>
struct RowNumber {
    static constexpr int kRow = kRow_;
};

template <typename T, const auto& kRows, int kRow, class Launch>
cudaError_t launch_row_from(int kernel, const Launch& launch) {
    constexpr int kCount = static_cast<int>(sizeof(kRows) / sizeof(kRows[0]));
    if constexpr (kRow < kCount) {
        constexpr bool kHasDtype = (kRows[kRow].dtypes >> kDtype<T> & 1) != 0;
        constexpr bool kHasCode = kRows[kRow].architecture != 90 || kHasWarpgroups;
        if constexpr (kHasDtype && kHasCode) {
            if (kernel == kRow) {
                return launch(RowNumber<kRow>());
            }
        }
        return launch_row_from<T, kRows, kRow + 1>(kernel, launch);
    } else {
        return cudaErrorInvalidDeviceFunction;  // no such row was compiled
    }
}

// Calls launch(RowNumber<kernel>()), a lambda that takes auto: it is compiled for every row that has the dtype T.
template <typename T, const auto& kRows, class Launch>
cudaError_t launch_row(KernelTable& table, int kernel, const Launch& launch) {
    if (kernel >= 0) {
        table.count_launch(kernel, kDtype<T>);
    }
    return launch_row_from<T, kRows, 0>(kernel, launch);
}

}  // namespace mamba
