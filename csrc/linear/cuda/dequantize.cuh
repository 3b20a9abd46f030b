// Rows of an int8 weight as numbers: a block takes one of them.
#pragma once

#include "common/alignment.h"
#include "common/cuda_int8.cuh"
#include "linear/dequantize.h"
#include "linear/kernels.h"

namespace mamba {

__global__ void __launch_bounds__(kDequantizeThreads) dequantize_kernel(const MambaDequantize p, bool vectors) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    if (row >= p.rows) {
        return;
    }
    const int64_t source = dequantized_row(p, row);
    const int8_t* const weight = static_cast<const int8_t*>(p.weight) + source * p.features;
    const __half* const scales = static_cast<const __half*>(p.scales) + source * scales_of_row(p.features);
    const int64_t step = static_cast<int64_t>(blockDim.x) * kInt8Vector;
    for (int64_t feature = static_cast<int64_t>(threadIdx.x) * kInt8Vector; feature < p.features; feature += step) {
        const int64_t left = p.features - feature;
        Int8Bits bits = {};
        float scale = __int_as_float(0x7fffffff);
        if (has_weight_row(p, source)) {
            bits = load_int8(weight + feature, left, vectors);
            scale = __half2float(scales[feature / MAMBA_INT8_BLOCK]);
        }
        float values[kInt8Vector];
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            float four[4];
            unpack_int8(bits.word[quarter], four);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[4 * quarter + i] = four[i] * scale;
            }
        }
        with_dtype(p.dtype, [&](auto of) {
            using T = typename decltype(of)::Type;
            T* const out = static_cast<T*>(p.out) + row * p.features + feature;
            if (vectors) {
                packed_store<T, kInt8Vector>(out, pack<T, kInt8Vector>(values));
            } else {
                scatter<T, kInt8Vector>(out, 1, left, values);
            }
        });
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

inline cudaError_t launch_dequantize(const MambaDequantize& p) {
    const bool vectors = p.features % kInt8Vector == 0 && pointer_is_aligned(p.weight, 16) && pointer_is_aligned(p.out, 16);
    const int64_t chunks = ceil_div(p.features, static_cast<int64_t>(kInt8Vector)), threads = round_up(chunks, 32);
    const unsigned block = static_cast<unsigned>(threads < kDequantizeThreads ? threads : kDequantizeThreads);
    return launch_programmatic_dependent(dequantize_kernel, batch_grid(1, p.rows), block, 0, p.run.stream, p, vectors);
}

}  // namespace mamba
