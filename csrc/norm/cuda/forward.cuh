// The norm on the GPU, forward: each tensor is read once and written once, a row lies in registers between.
#pragma once

#include "common/kernel_launch.cuh"
#include "norm/cuda/common.cuh"
#include "norm/kernels.h"

namespace mamba {

// s of this thread's part of a tile: x, x + residual rounded to Other, or x silu(z); and z's bits for a gate after the norm.
template <typename T, typename Other, int kVector>
__device__ __forceinline__ void load_sum(const T* x, const Other* residual, const Other* z, bool gate_first, int tile, int size,
                                         float* s, Packed<Other, kVector>* z_bits) {
    constexpr int kVectors = NormTile<kVector>::kVectors;
    const bool two = residual != nullptr || z != nullptr;
    Packed<T, kVector> x_bits[kVectors];
    load_bits<T, kVector>(x, tile, size, x_bits);
    if (two) {
        load_bits<Other, kVector>(residual != nullptr ? residual : z, tile, size, z_bits);
    }
    unpack_bits<T, kVector>(x_bits, s);
    if (residual != nullptr) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            float other[kVector];
            unpack<Other, kVector>(z_bits[v], other);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                s[v * kVector + i] = to_float(from_float<Other>(s[v * kVector + i] + other[i]));
            }
        }
    } else if (gate_first) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            float other[kVector];
            unpack<Other, kVector>(z_bits[v], other);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                s[v * kVector + i] *= silu(other[i]);
            }
        }
    }
}

// Adds up s, or its squared distances from `mean`, over this thread's part of a tile.
template <int kVector, bool kSquares>
__device__ __forceinline__ float sum_tile(const float* s, int tile, int size, float mean) {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < NormTile<kVector>::kVectors; ++v) {
        if (vector_index<kVector>(tile, v) < size) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                const float d = s[v * kVector + i] - mean;
                sum = kSquares ? fmaf(d, d, sum) : sum + d;
            }
        }
    }
    return sum;
}

// Threads of a block at most, and blocks of so many that a multiprocessor should hold: ptxas takes no more registers than that
// leaves. More threads would fit newer GPUs, but then registers go to memory, which costs 4 % of the bandwidth.
template <bool kGatedRms>
constexpr int kNormMost = kGatedRms ? kNormGatedThreads : kNormMaxThreads;
template <bool kGatedRms>
constexpr int kNormResident = kGatedRms ? 3 : 1;

// kGatedRms: RMSNorm of a gated x, without groups and bias. Half of the instructions would ask what there is, and silu alone
// has as many as the memory leaves time for.
template <typename T, typename Other, int kVector, bool kLooped, bool kGatedRms>
__global__ void __launch_bounds__(kNormMost<kGatedRms>, kNormResident<kGatedRms>) norm_forward_kernel(const MambaNorm p) {
    constexpr int kVectors = NormTile<kVector>::kVectors;
    __shared__ RowSums<1> shared;
    const bool is_rms_norm = kGatedRms || p.is_rms_norm;
    const bool has_bias = !kGatedRms && p.bias != nullptr;
    const int64_t ngroups = kGatedRms ? 1 : p.ngroups;
    const int64_t parts = p.rows * ngroups;
    int64_t part = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const bool active = part < parts;  // idle threads stay for the sums
    part = active ? part : parts - 1;
    const int64_t row = ngroups == 1 ? part : part / ngroups;
    const int64_t column = (part - row * ngroups) * p.group_size;
    const int size = static_cast<int>(p.group_size);
    const int step = kLooped ? static_cast<int>(blockDim.x) * NormTile<kVector>::kElements : size;  // one tile unless looped
    const T* x = static_cast<const T*>(p.x) + row * p.x_row_stride + column;
    const Other* residual = kGatedRms ? nullptr : static_cast<const Other*>(p.residual);
    residual = residual == nullptr ? nullptr : residual + row * p.residual_row_stride + column;
    const Other* z = static_cast<const Other*>(p.z);
    z = !kGatedRms && z == nullptr ? nullptr : z + row * p.z_row_stride + column;
    T* out = static_cast<T*>(p.out) + row * p.out_row_stride + column;
    Other* residual_out = kGatedRms ? nullptr : static_cast<Other*>(p.residual_out);
    residual_out = residual_out == nullptr || !active ? nullptr : residual_out + row * p.residual_out_row_stride + column;
    const bool gate_first = kGatedRms || (z != nullptr && !p.norm_before_gate);
    const bool gate_last = !kGatedRms && z != nullptr && p.norm_before_gate;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const float inverse_size = 1.0f / static_cast<float>(size);

    float s[NormTile<kVector>::kElements];
    Packed<Other, kVector> z_bits[kVectors];
    float total = 0.0f;
    for (int tile = 0; tile < size; tile += step) {
        load_sum<T, Other, kVector>(x, residual, z, gate_first, tile, size, s, z_bits);
        if (residual_out != nullptr) {
            store_row<Other, kVector>(residual_out, tile, size, s);
        }
        total += is_rms_norm ? sum_tile<kVector, true>(s, tile, size, 0.0f) : sum_tile<kVector, false>(s, tile, size, 0.0f);
    }
    sum_over_row<1>(&total, shared, 0);
    float mean = 0.0f;
    if (!is_rms_norm) {
        mean = total * inverse_size;
        total = 0.0f;
        for (int tile = 0; tile < size; tile += step) {
            if constexpr (kLooped) {
                load_sum<T, Other, kVector>(x, residual, z, gate_first, tile, size, s, z_bits);
            }
            total += sum_tile<kVector, true>(s, tile, size, mean);
        }
        sum_over_row<1>(&total, shared, 1);
    }
    const float rstd = rsqrtf(fmaf(total, inverse_size, p.eps));
    if (!active) {
        return;
    }
    if (threadIdx.x == 0) {
        if (p.mean != nullptr) {
            p.mean[part] = mean;
        }
        if (p.rstd != nullptr) {
            p.rstd[part] = rstd;
        }
    }
    for (int tile = 0; tile < size; tile += step) {
        if constexpr (kLooped) {
            load_sum<T, Other, kVector>(x, residual, z, gate_first, tile, size, s, z_bits);
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int i = vector_index<kVector>(tile, v);
            if (i < size) {
                float* y = s + v * kVector;
                float parameter[kVector];
                load_parameter<kVector>(p.weight, column + i, p.weight_dtype, parameter);
#pragma unroll
                for (int k = 0; k < kVector; ++k) {
                    y[k] = (y[k] - mean) * rstd * parameter[k];
                }
                if (has_bias) {
                    load_parameter<kVector>(p.bias, column + i, p.bias_dtype, parameter);
#pragma unroll
                    for (int k = 0; k < kVector; ++k) {
                        y[k] += parameter[k];
                    }
                }
                if (gate_last) {
                    unpack<Other, kVector>(z_bits[v], parameter);
#pragma unroll
                    for (int k = 0; k < kVector; ++k) {
                        y[k] *= silu(parameter[k]);
                    }
                }
                packed_store<T, kVector>(out + i, pack<T, kVector>(y));
            }
        }
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <typename T, typename Other, int kVector, bool kLooped, bool kGatedRms>
cudaError_t launch_norm_forward_as(const MambaNorm& p, const NormLayout& layout) {
    const dim3 threads(static_cast<unsigned>(layout.lanes), static_cast<unsigned>(layout.block_rows));
    return launch_programmatic_dependent(norm_forward_kernel<T, Other, kVector, kLooped, kGatedRms>,
                                         ceil_div(p.rows * p.ngroups, layout.block_rows), threads, 0, p.run.stream, p);
}

template <typename T, bool kFloat32Beside, int kRow>
cudaError_t launch_norm_forward_row(const MambaNorm& p, const NormLayout& layout) {
    constexpr NormForwardKernel k = kNormForwardKernels[kRow];
    constexpr int kVector = k.vectors ? 16 / static_cast<int>(sizeof(T)) : 1;
    return launch_norm_forward_as<T, typename OtherOf<T, kFloat32Beside>::Type, kVector, !k.vectors, k.gated_rms_norm>(p,
                                                                                                                       layout);
}

template <typename T>
cudaError_t launch_norm_forward(const MambaNorm& p, const NormLayout& layout, int kernel) {
    return launch_row<T, kNormForwardKernels>(norm_forward_table, kernel, [&](auto row) {
        constexpr int kRow = decltype(row)::kRow;
        constexpr NormBeside kBeside = kNormForwardKernels[kRow].beside;
        if constexpr (kBeside == NormBeside::kEither) {
            return has_float32_beside(p) ? launch_norm_forward_row<T, true, kRow>(p, layout)
                                         : launch_norm_forward_row<T, false, kRow>(p, layout);
        } else {
            return launch_norm_forward_row < T, kBeside == NormBeside::kFloat32, kRow > (p, layout);
        }
    });
}

}  // namespace mamba
