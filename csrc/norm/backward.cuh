// The norm on the GPU, backward: a block walks rows of one group, so that it can add dweight and dbias up for all of them.
#pragma once

#include "norm/cuda_common.cuh"

namespace mamba {

// Adds a vector's values to the sums of dweight or dbias; no other thread touches these.
template <int kVector>
__device__ __forceinline__ void add_to_sums(float* sums, const float* values) {
    if constexpr (kVector == 1) {
        sums[0] += values[0];
    } else {
#pragma unroll
        for (int k = 0; k < kVector; k += 4) {
            float4 sum = *reinterpret_cast<float4*>(sums + k);
            sum.x += values[k];
            sum.y += values[k + 1];
            sum.z += values[k + 2];
            sum.w += values[k + 3];
            *reinterpret_cast<float4*>(sums + k) = sum;
        }
    }
}

// A row of a tensor from its first column on. Pointers are found anew where they are used: kept, they would cost registers.
template <typename T>
__device__ __forceinline__ const T* row_of(const void* data, int64_t row, int64_t stride, int64_t column) {
    return static_cast<const T*>(data) + row * stride + column;
}
template <typename T>
__device__ __forceinline__ T* row_of(void* data, int64_t row, int64_t stride, int64_t column) {
    return static_cast<T*>(data) + row * stride + column;
}

// From a tile of a row: x_hat = (s - mean) rstd, and wdy, the gradient of x_hat; adds the row's sums of wdy x_hat and of wdy
// to totals. The first time it also adds to the sums of dweight (and, bias_sums further, dbias) and, with the gate after the
// norm, writes dz.
template <typename T, typename Other, int kVector, bool kGated>
__device__ __forceinline__ void load_gradient(const MambaNormBackward& q, int64_t row, int64_t column, float mean, float rstd,
                                              int tile, int size, bool first_time, float* sums, int64_t bias_sums, float* x_hat,
                                              float* wdy, float* totals) {
    constexpr int kVectors = NormTile<kVector>::kVectors;
    const MambaNorm& p = q.forward;
    [[maybe_unused]] const bool gate_last = p.norm_before_gate;
    Packed<T, kVector> dout_bits[kVectors];
    [[maybe_unused]] Packed<Other, kVector> z_bits[kVectors];
    load_bits<T, kVector>(row_of<T>(q.dout, row, q.dout_row_stride, column), tile, size, dout_bits);
    if constexpr (kGated) {
        load_bits<Other, kVector>(row_of<Other>(p.z, row, p.z_row_stride, column), tile, size, z_bits);
    }
    if (!kGated && p.residual_out != nullptr) {
        Packed<Other, kVector> s_bits[kVectors];
        const Other* s_row = row_of<Other>(static_cast<const void*>(p.residual_out), row, p.residual_out_row_stride, column);
        load_bits<Other, kVector>(s_row, tile, size, s_bits);
        unpack_bits<Other, kVector>(s_bits, x_hat);
    } else {
        Packed<T, kVector> x_bits[kVectors];
        load_bits<T, kVector>(row_of<T>(p.x, row, p.x_row_stride, column), tile, size, x_bits);
        unpack_bits<T, kVector>(x_bits, x_hat);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int i = vector_index<kVector>(tile, v);
        if (i < size) {
            float dy[kVector];
            float weight[kVector];
            [[maybe_unused]] float z[kVector];
            float* x_hat_v = x_hat + v * kVector;
            unpack<T, kVector>(dout_bits[v], dy);
            load_parameter<kVector>(p.weight, column + i, p.weight_dtype, weight);
            if constexpr (kGated) {
                unpack<Other, kVector>(z_bits[v], z);
                if (!gate_last) {
#pragma unroll
                    for (int k = 0; k < kVector; ++k) {
                        x_hat_v[k] *= silu(z[k]);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                x_hat_v[k] = (x_hat_v[k] - mean) * rstd;
            }
            if constexpr (kGated) {
                if (gate_last) {
                    if (first_time) {
                        float dz[kVector];
#pragma unroll
                        for (int k = 0; k < kVector; ++k) {
                            dz[k] = 0.0f;
                        }
                        if (p.bias != nullptr) {
                            load_parameter<kVector>(p.bias, column + i, p.bias_dtype, dz);
                        }
#pragma unroll
                        for (int k = 0; k < kVector; ++k) {
                            dz[k] = dy[k] * fmaf(x_hat_v[k], weight[k], dz[k]) * silu_slope(z[k]);
                        }
                        Other* dz_row = row_of<Other>(q.dz, row, q.dz_row_stride, column);
                        packed_store<Other, kVector>(dz_row + i, pack<Other, kVector>(dz));
                    }
#pragma unroll
                    for (int k = 0; k < kVector; ++k) {
                        dy[k] *= silu(z[k]);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                wdy[v * kVector + k] = weight[k] * dy[k];
                totals[0] = fmaf(wdy[v * kVector + k], x_hat_v[k], totals[0]);
                totals[1] += wdy[v * kVector + k];
            }
            if (first_time) {
                float dweight[kVector];
#pragma unroll
                for (int k = 0; k < kVector; ++k) {
                    dweight[k] = dy[k] * x_hat_v[k];
                }
                add_to_sums<kVector>(sums + i, dweight);
                if (p.bias != nullptr) {
                    add_to_sums<kVector>(sums + bias_sums + i, dy);
                }
            }
        }
    }
}

template <typename T, typename Other, int kVector, bool kGated, bool kLooped, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads <= kNormBlock ? 3 : 1)
    norm_backward_kernel(const MambaNormBackward q, const int64_t slots, const bool shared_sums) {
    constexpr int kVectors = NormTile<kVector>::kVectors;
    extern __shared__ float4 norm_shared[];
    __shared__ RowSums<2> shared;
    const MambaNorm& p = q.forward;
    const int threads = static_cast<int>(blockDim.x * blockDim.y);
    const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
    const int64_t slot = blockIdx.x / p.ngroups;
    const int64_t group = blockIdx.x - slot * p.ngroups;
    const int64_t column = group * p.group_size;
    const int size = static_cast<int>(p.group_size);
    const int step = kLooped ? static_cast<int>(blockDim.x) * NormTile<kVector>::kElements : size;  // one tile unless looped
    const float inverse_size = 1.0f / static_cast<float>(size);

    // Sums of dweight, then of dbias: a row each for every row of the block, in shared memory or in the workspace.
    const int64_t width = p.ngroups * p.group_size;
    float* block_sums =
        shared_sums ? reinterpret_cast<float*>(norm_shared) : static_cast<float*>(q.workspace) + slot * width + column;
    const int64_t bias_sums = shared_sums ? static_cast<int64_t>(blockDim.y) * size : slots * width;
    float* sums = block_sums + static_cast<int64_t>(threadIdx.y) * size;
    for (int i = static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) {
        sums[i] = 0.0f;
        if (p.bias != nullptr) {
            sums[bias_sums + i] = 0.0f;
        }
    }
    __syncthreads();

    int turn = 0;
    for (int64_t first = slot * blockDim.y; first < p.rows; first += slots * blockDim.y) {
        int64_t row = first + threadIdx.y;
        const int row_size = row < p.rows ? size : 0;  // idle threads stay for the sums
        row = row < p.rows ? row : p.rows - 1;
        const float mean = p.is_rms_norm ? 0.0f : p.mean[row * p.ngroups + group];
        const float rstd = p.rstd[row * p.ngroups + group];

        float x_hat[NormTile<kVector>::kElements];
        float wdy[NormTile<kVector>::kElements];
        float totals[2] = {0.0f, 0.0f};
        for (int tile = 0; tile < size; tile += step) {
            load_gradient<T, Other, kVector, kGated>(q, row, column, mean, rstd, tile, row_size, true, sums, bias_sums, x_hat,
                                                     wdy, totals);
        }
        sum_over_row<2>(totals, shared, turn++);
        const float along_x_hat = totals[0] * inverse_size;
        const float along_one = p.is_rms_norm ? 0.0f : totals[1] * inverse_size;
        for (int tile = 0; tile < size; tile += step) {
            if constexpr (kLooped) {
                load_gradient<T, Other, kVector, kGated>(q, row, column, mean, rstd, tile, row_size, false, sums, bias_sums,
                                                         x_hat, wdy, totals);
            }
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int i = vector_index<kVector>(tile, v);
                if (i < row_size) {
                    float* dx = wdy + v * kVector;
#pragma unroll
                    for (int k = 0; k < kVector; ++k) {
                        dx[k] = (dx[k] - fmaf(x_hat[v * kVector + k], along_x_hat, along_one)) * rstd;
                    }
                    if constexpr (kGated) {
                        if (!p.norm_before_gate) {  // so far the gradient of x silu(z)
                            float x[kVector];
                            float z[kVector];
                            unpack<T, kVector>(packed_load<T, kVector>(row_of<T>(p.x, row, p.x_row_stride, column) + i), x);
                            unpack<Other, kVector>(
                                packed_load<Other, kVector>(row_of<Other>(p.z, row, p.z_row_stride, column) + i), z);
#pragma unroll
                            for (int k = 0; k < kVector; ++k) {
                                x[k] *= dx[k] * silu_slope(z[k]);
                                dx[k] *= silu(z[k]);
                            }
                            Other* dz_row = row_of<Other>(q.dz, row, q.dz_row_stride, column);
                            packed_store<Other, kVector>(dz_row + i, pack<Other, kVector>(x));
                        }
                    } else {
                        if (q.dresidual_out != nullptr) {
                            const Other* more_row = row_of<Other>(q.dresidual_out, row, q.dresidual_out_row_stride, column);
                            float more[kVector];
                            unpack<Other, kVector>(packed_load<Other, kVector>(more_row + i), more);
#pragma unroll
                            for (int k = 0; k < kVector; ++k) {
                                dx[k] += more[k];
                            }
                        }
                        if (q.dresidual != nullptr) {
                            Other* dresidual_row = row_of<Other>(q.dresidual, row, q.dresidual_row_stride, column);
                            packed_store<Other, kVector>(dresidual_row + i, pack<Other, kVector>(dx));
                        }
                    }
                    packed_store<T, kVector>(row_of<T>(q.dx, row, q.dx_row_stride, column) + i, pack<T, kVector>(dx));
                }
            }
        }
    }
    if (!shared_sums) {
        return;
    }
    __syncthreads();
    for (int i = thread; i < size; i += threads) {
        for (int64_t which = 0; which < (p.bias != nullptr ? 2 : 1); ++which) {
            float sum = 0.0f;
            for (int y = 0; y < static_cast<int>(blockDim.y); ++y) {
                sum += block_sums[which * bias_sums + y * size + i];
            }
            if (q.workspace != nullptr) {
                static_cast<float*>(q.workspace)[(which * slots + slot) * width + column + i] = sum;
            } else if (which == 0) {
                store_from_float(q.dweight, column + i, p.weight_dtype, sum);
            } else {
                store_from_float(q.dbias, column + i, p.bias_dtype, sum);
            }
        }
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

inline bool norm_backward_is_aligned(const MambaNormBackward& q, int64_t vector) {
    const MambaNorm& p = q.forward;
    const int64_t size = dtype_size(p.dtype), other = dtype_size(p.other_dtype);
    return norm_is_aligned(p, vector) && norm_rows_aligned(q.dout, p.rows, q.dout_row_stride, size, vector) &&
           norm_rows_aligned(q.dx, p.rows, q.dx_row_stride, size, vector) &&
           norm_rows_aligned(q.dresidual_out, p.rows, q.dresidual_out_row_stride, other, vector) &&
           norm_rows_aligned(q.dresidual, p.rows, q.dresidual_row_stride, other, vector) &&
           norm_rows_aligned(q.dz, p.rows, q.dz_row_stride, other, vector);
}

template <typename T, typename Other, int kVector, bool kGated, bool kLooped, int kThreads>
cudaError_t launch_norm_backward_as(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    const auto kernel = norm_backward_kernel<T, Other, kVector, kGated, kLooped, kThreads>;
    if (plan.shared_bytes + sizeof(RowSums<2>) > 48 * 1024) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(plan.shared_bytes));
        if (error != cudaSuccess) {
            return error;
        }
    }
    const dim3 threads(static_cast<unsigned>(plan.layout.lanes), static_cast<unsigned>(plan.layout.block_rows));
    const unsigned blocks = static_cast<unsigned>(plan.slots * q.forward.ngroups);
    kernel<<<blocks, threads, plan.shared_bytes, static_cast<cudaStream_t>(q.forward.run.stream)>>>(q, plan.slots,
                                                                                                    plan.shared_bytes > 0);
    return cudaGetLastError();
}

template <typename T, typename Other, int kVector, bool kGated>
cudaError_t launch_norm_backward_vector(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    if (plan.layout.looped) {
        return launch_norm_backward_as<T, Other, kVector, kGated, true, kNormMaxThreads>(q, plan);
    }
    if (plan.layout.lanes * plan.layout.block_rows <= kNormBlock) {
        return launch_norm_backward_as<T, Other, kVector, kGated, false, kNormBlock>(q, plan);
    }
    return launch_norm_backward_as<T, Other, kVector, kGated, false, kNormMaxThreads>(q, plan);
}

template <typename T, typename Other, bool kGated>
cudaError_t launch_norm_backward_beside(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    if constexpr (sizeof(T) == 2 && sizeof(Other) == 2) {
        if (norm_backward_is_aligned(q, 8)) {
            return launch_norm_backward_vector<T, Other, 8, kGated>(q, plan);
        }
    }
    if (norm_backward_is_aligned(q, 4)) {
        return launch_norm_backward_vector<T, Other, 4, kGated>(q, plan);
    }
    return launch_norm_backward_as<T, Other, 1, kGated, true, kNormMaxThreads>(q, plan);
}

template <typename T>
cudaError_t launch_norm_backward(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    const MambaNorm& p = q.forward;
    if constexpr (sizeof(T) == 2) {
        const bool alone = p.residual_out == nullptr && p.z == nullptr && q.dresidual_out == nullptr && q.dresidual == nullptr;
        if (alone || p.other_dtype != MAMBA_FLOAT32) {
            return p.z != nullptr ? launch_norm_backward_beside<T, T, true>(q, plan)
                                  : launch_norm_backward_beside<T, T, false>(q, plan);
        }
    }
    return p.z != nullptr ? launch_norm_backward_beside<T, float, true>(q, plan)
                          : launch_norm_backward_beside<T, float, false>(q, plan);
}

}  // namespace mamba
