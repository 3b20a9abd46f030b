// SwiGLU on the GPU, both directions: silu(x) y of the halves of a row.
#pragma once

#include "common/kernel_launch.cuh"
#include "norm/cuda/common.cuh"
#include "norm/kernels.h"

namespace mamba {

// Every kVector-th vector of a row is a thread's.
template <typename T, int kVector, bool kBackward>
__device__ __forceinline__ void swiglu_row(const MambaSwiglu& p, int64_t row) {
    const int64_t x_begin = p.gate_last ? p.width : 0;
    const int64_t y_begin = p.gate_last ? 0 : p.width;
    const T* xy_row = static_cast<const T*>(p.xy) + row * p.xy_row_stride;
    for (int64_t i = static_cast<int64_t>(threadIdx.x) * kVector; i < p.width;
         i += static_cast<int64_t>(blockDim.x) * kVector) {
        float x[kVector];
        float y[kVector];
        float out[kVector];
        const Packed<T, kVector> x_bits = packed_load<T, kVector>(xy_row + x_begin + i);
        const Packed<T, kVector> y_bits = packed_load<T, kVector>(xy_row + y_begin + i);
        if constexpr (kBackward) {
            const T* dout_row = static_cast<const T*>(p.dout) + row * p.dout_row_stride;
            T* dxy_row = static_cast<T*>(p.dxy) + row * p.dxy_row_stride;
            float dout[kVector];
            unpack<T, kVector>(packed_load<T, kVector>(dout_row + i), dout);
            unpack<T, kVector>(x_bits, x);
            unpack<T, kVector>(y_bits, y);
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                const float gate = silu(x[k]);
                out[k] = gate * y[k];
                x[k] = dout[k] * y[k] * silu_slope(x[k]);
                y[k] = dout[k] * gate;
            }
            packed_store<T, kVector>(dxy_row + x_begin + i, pack<T, kVector>(x));
            packed_store<T, kVector>(dxy_row + y_begin + i, pack<T, kVector>(y));
        } else {
            unpack<T, kVector>(x_bits, x);
            unpack<T, kVector>(y_bits, y);
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                out[k] = silu(x[k]) * y[k];
            }
        }
        if (!kBackward || p.out != nullptr) {
            packed_store<T, kVector>(static_cast<T*>(p.out) + row * p.out_row_stride + i, pack<T, kVector>(out));
        }
    }
}

// blockDim.x threads walk a row, blockDim.y rows a block. aligned: in vectors of 16 bytes.
template <typename T, bool kBackward>
__global__ void __launch_bounds__(kNormBlock) swiglu_kernel(const MambaSwiglu p, const bool aligned) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= p.rows) {
        return;
    }
    if (aligned) {
        swiglu_row<T, 16 / static_cast<int>(sizeof(T)), kBackward>(p, row);
    } else {
        swiglu_row<T, 1, kBackward>(p, row);
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <typename T, bool kBackward>
cudaError_t launch_swiglu_as(const MambaSwiglu& p) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(T));
    const int64_t size = static_cast<int64_t>(sizeof(T));
    const bool aligned = p.width % kVector == 0 && norm_rows_aligned(p.xy, p.rows, p.xy_row_stride, size, kVector) &&
                         norm_rows_aligned(p.dout, p.rows, p.dout_row_stride, size, kVector) &&
                         norm_rows_aligned(p.out, p.rows, p.out_row_stride, size, kVector) &&
                         norm_rows_aligned(p.dxy, p.rows, p.dxy_row_stride, size, kVector);
    const int lanes_log2 = ceil_log2(ceil_div(p.width, aligned ? kVector : 1), 0, 8);
    static_assert(kNormBlock == 1 << 8, "a block holds at most 2^8 lanes");
    const dim3 threads(1u << lanes_log2, static_cast<unsigned>(kNormBlock >> lanes_log2));
    const int64_t blocks = ceil_div(p.rows, threads.y);
    return launch_kernel(swiglu_kernel<T, kBackward>, blocks, threads, 0, p.run.stream, p, aligned);
}

template <typename T>
cudaError_t launch_swiglu(const MambaSwiglu& p, bool backward, int kernel) {
    KernelTable& table = backward ? swiglu_backward_table : swiglu_forward_table;
    return launch_row<T, kSwigluKernels>(
        table, kernel, [&](auto) { return backward ? launch_swiglu_as<T, true>(p) : launch_swiglu_as<T, false>(p); });
}

}  // namespace mamba
