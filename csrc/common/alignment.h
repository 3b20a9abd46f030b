// How a tensor lies in memory: the size of its elements, and whether it can be read in vectors.
#pragma once

#include <stdint.h>

#include "mamba_kernels.h"

namespace mamba {

inline int64_t dtype_size(int32_t dtype) {
    return dtype == MAMBA_FLOAT32 ? 4 : 2;
}

inline bool pointer_is_aligned(const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// The stride of a dimension of `count` elements as rows_aligned sees it: one that no access takes counts as 0.
inline int64_t used_stride(int64_t count, int64_t stride) {
    return count > 1 ? stride : 0;
}

// Whether a tensor's address and each of these distances (in elements) is a multiple of `bytes`. An absent tensor counts as
// aligned.
template <typename... Strides>
bool rows_aligned(const void* data, [[maybe_unused]] int64_t element_size, int64_t bytes, Strides... strides) {
    return data == nullptr || (pointer_is_aligned(data, bytes) && (... && (strides * element_size % bytes == 0)));
}

}  // namespace mamba
