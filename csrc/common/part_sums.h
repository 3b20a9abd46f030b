// Gradients of parameters are sums over a whole batch: kernels leave float32 parts of them in the workspace, whose sum is the
// last step of an op's backward (cuda_sums.cu, cpu_sums.h).
#pragma once

#include <stdint.h>

namespace mamba {

// One gradient of `rows` (outer, middle, inner) rows, which lie at these strides; the elements of a row are neighbours.
struct PartSum {
    const float* parts;  // (count, rows, row), contiguous
    int64_t count;
    void* sum;
    int32_t dtype;
    int64_t row;  // elements
    int64_t middle, inner, rows;
    int64_t outer_stride, middle_stride, inner_stride;
};

// A contiguous gradient of `size` elements.
static inline PartSum part_sum(const float* parts, int64_t count, void* sum, int32_t dtype, int64_t size) {
    return {parts, count, sum, dtype, size, 1, 1, 1, 0, 0, 0};
}

constexpr int kMostSums = 7;
struct PartSums {
    PartSum of[kMostSums];
    unsigned end[kMostSums];  // of each one's blocks
    int count;

    // A gradient without memory is absent.
    void add(const PartSum& sum) {
        if (sum.sum != nullptr) {
            of[count++] = sum;
        }
    }
};

}  // namespace mamba
