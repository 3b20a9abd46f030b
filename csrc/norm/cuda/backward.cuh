// The norm on the GPU, backward: a block walks rows of one group, so that it can add dweight and dbias up for all of them.
#pragma once

#include "norm/cuda/backward_rows.cuh"

namespace mamba {

enum class NormGate { kNone, kBefore, kAfter };  // where silu(z) is multiplied: before or after the norm

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

// From a tile of a row: wdy, the gradient of x_hat = (s - mean) rstd; adds the row's sums of wdy x_hat and of wdy to totals.
// `kept` gets s; with the gate before the norm sigmoid(z), which costs more than to find s = x silu(z) again. The first time it
// also adds to the sums of dweight (and, bias_sums further, dbias) and, with the gate after the norm, writes dz.
// weights: of the tile's elements; loaded here only where tiles change.
template <typename T, typename Other, int kVector, NormGate kGate, bool kLooped>
__device__ __forceinline__ void load_gradient(const MambaNormBackward& q, const NormRow& at, Other* dz, int64_t column,
                                              float mean, float rstd, int tile, int size, bool first_time, float* weights,
                                              float* sums, int64_t bias_sums, float* kept, float* wdy, float* totals) {
    constexpr int kVectors = NormTile<kVector>::kVectors;
    constexpr bool kGated = kGate != NormGate::kNone;
    const MambaNorm& p = q.forward;
    // A row that is not copied comes from global memory, which is far away: all loads at once.
    [[maybe_unused]] Packed<T, kVector> dout_bits[kVectors];
    [[maybe_unused]] Packed<Other, kVector> z_bits[kVectors];
    if constexpr (kLooped) {
        load_bits<T, kVector>(static_cast<const T*>(at.dout), tile, size, dout_bits);
        if constexpr (kGated) {
            load_bits<Other, kVector>(static_cast<const Other*>(at.beside), tile, size, z_bits);
        }
        if (x_is_sum<kGated>(q)) {
            Packed<Other, kVector> s_bits[kVectors];
            load_bits<Other, kVector>(static_cast<const Other*>(at.x), tile, size, s_bits);
            unpack_bits<Other, kVector>(s_bits, kept);
        } else {
            Packed<T, kVector> x_bits[kVectors];
            load_bits<T, kVector>(static_cast<const T*>(at.x), tile, size, x_bits);
            unpack_bits<T, kVector>(x_bits, kept);
        }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int i = vector_index<kVector>(tile, v);
        if (i < size) {
            float dy[kVector];
            float x_hat[kVector];
            [[maybe_unused]] float z[kVector];
            [[maybe_unused]] float gate[kVector];
            float* s = kept + v * kVector;
            float* weight = weights + v * kVector;
            if constexpr (kLooped) {
                load_parameter<kVector>(p.weight, column + i, p.weight_dtype, weight);
                unpack<T, kVector>(dout_bits[v], dy);
                if constexpr (kGated) {
                    unpack<Other, kVector>(z_bits[v], z);
                }
            } else {
                load_vector<T, kVector>(at.dout, i, dy);
                if constexpr (kGated) {
                    load_vector<Other, kVector>(at.beside, i, z);
                }
                if (x_is_sum<kGated>(q)) {
                    load_vector<Other, kVector>(at.x, i, s);
                } else {
                    load_vector<T, kVector>(at.x, i, s);
                }
            }
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                float sum = s[k];
                if constexpr (kGated) {
                    gate[k] = sigmoid(z[k]);
                }
                if constexpr (kGate == NormGate::kBefore) {
                    sum *= z[k] * gate[k];
                    s[k] = gate[k];
                }
                x_hat[k] = (sum - mean) * rstd;
            }
            if constexpr (kGate == NormGate::kAfter) {
                if (first_time) {
                    float dgate[kVector];
#pragma unroll
                    for (int k = 0; k < kVector; ++k) {
                        dgate[k] = 0.0f;
                    }
                    if (p.bias != nullptr) {
                        load_parameter<kVector>(p.bias, column + i, p.bias_dtype, dgate);
                    }
#pragma unroll
                    for (int k = 0; k < kVector; ++k) {
                        dgate[k] = dy[k] * fmaf(x_hat[k], weight[k], dgate[k]) * silu_slope(z[k] * gate[k], gate[k]);
                    }
                    packed_store<Other, kVector>(dz + i, pack<Other, kVector>(dgate));
                }
#pragma unroll
                for (int k = 0; k < kVector; ++k) {
                    dy[k] *= z[k] * gate[k];
                }
            }
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                wdy[v * kVector + k] = weight[k] * dy[k];
                totals[0] = fmaf(wdy[v * kVector + k], x_hat[k], totals[0]);
                totals[1] += wdy[v * kVector + k];
            }
            if (first_time) {
                if (p.bias != nullptr) {
                    add_to_sums<kVector>(sums + bias_sums + i, dy);
                }
#pragma unroll
                for (int k = 0; k < kVector; ++k) {
                    dy[k] *= x_hat[k];
                }
                add_to_sums<kVector>(sums + i, dy);
            }
        }
    }
}

template <typename T, typename Other, int kVector, NormGate kGate, bool kLooped>
__global__ void __launch_bounds__(kNormBackwardThreads, 1)
    norm_backward_kernel(const MambaNormBackward q, const NormBackwardPlan plan) {
    constexpr int kVectors = NormTile<kVector>::kVectors;
    constexpr bool kGated = kGate != NormGate::kNone;
    MAMBA_DYNAMIC_SHARED(16, float4, norm_shared);
    __shared__ RowSums<2> shared;
    const MambaNorm& p = q.forward;
    const int threads = static_cast<int>(blockDim.x * blockDim.y);
    const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
    const int64_t slot = blockIdx.x / p.ngroups;
    const int64_t group = blockIdx.x - slot * p.ngroups;
    const int64_t column = group * p.group_size;
    const int size = static_cast<int>(p.group_size);
    const int step = kLooped ? static_cast<int>(blockDim.x) * NormTile<kVector>::kElements : size;  // one tile unless looped
    const int64_t stride = plan.slots * blockDim.y;                                                 // rows of a turn
    const float inverse_size = 1.0f / static_cast<float>(size);
    const bool shared_sums = !kLooped || plan.sum_bytes > 0;

    // Sums of dweight, then of dbias: a row each for every row of the block, in shared memory or in the workspace.
    const int64_t width = p.ngroups * p.group_size;
    float* block_sums =
        shared_sums ? reinterpret_cast<float*>(norm_shared) : static_cast<float*>(q.workspace) + slot * width + column;
    const int64_t bias_sums = shared_sums ? static_cast<int64_t>(blockDim.y) * size : plan.slots * width;
    float* sums = block_sums + static_cast<int64_t>(threadIdx.y) * size;

    // Behind the sums: of each row of the block as many copies as it reads ahead. Single elements are not copied.
    const int rows_ahead = kVector > 1 ? plan.rows_ahead : 0;
    const bool copied = !kLooped || rows_ahead > 0;
    unsigned char* const copies =
        reinterpret_cast<unsigned char*>(norm_shared) + plan.sum_bytes + threadIdx.y * rows_ahead * plan.row_bytes;
    const int64_t row = slot * blockDim.y + threadIdx.y;
    const int turns = static_cast<int>(ceil_div(p.rows - slot * blockDim.y, stride));
    const int rows = row < p.rows ? static_cast<int>(ceil_div(p.rows - row, stride)) : 0;  // of this thread: turns or one less
    NormRow next = {q.dout, x_is_sum<kGated>(q) ? p.residual_out : p.x, kGated ? p.z : q.dresidual_out};
    advance<T, Other, kGated>(q, row, column, next);
    T* dx = row_of<T>(q.dx, row, q.dx_row_stride, column);
    const int64_t dbeside_stride = kGated ? q.dz_row_stride : q.dresidual_row_stride;
    Other* dbeside = row_of<Other>(kGated ? q.dz : q.dresidual, row, dbeside_stride, column);
    if constexpr (kVector > 1) {
        for (int i = 0; i < rows_ahead; ++i) {
            if (i < rows) {
                copy_row<T, Other, kVector, kGated>(q, next, size, step, copies + i * plan.row_bytes);
            }
            cp_async_commit_group();
            advance<T, Other, kGated>(q, stride, 0, next);
        }
    }
    int statistic = static_cast<int>(row * p.ngroups + group);  // of the next row; the host refuses more than an int holds
    const int statistics = static_cast<int>(stride * p.ngroups);
    float next_rstd = rows > 0 ? p.rstd[statistic] : 0.0f;
    float next_mean = rows > 0 && !p.is_rms_norm ? p.mean[statistic] : 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) {
        sums[i] = 0.0f;
        if (p.bias != nullptr) {
            sums[bias_sums + i] = 0.0f;
        }
    }
    __syncthreads();

    float weights[NormTile<kVector>::kElements];
    if constexpr (!kLooped) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int i = vector_index<kVector>(0, v);
            if (i < size) {
                load_parameter<kVector>(p.weight, column + i, p.weight_dtype, weights + v * kVector);
            }
        }
    }

    int copy = 0;
    for (int turn = 0; turn < turns; ++turn) {
        const int row_size = turn < rows ? size : 0;  // idle threads stay for the sums
        const float rstd = next_rstd;
        const float mean = next_mean;
        if (turn + 1 < rows) {
            statistic += statistics;
            next_rstd = p.rstd[statistic];
            next_mean = p.is_rms_norm ? 0.0f : p.mean[statistic];
        }
        NormRow at = next;
        if (copied) {
            wait_for_row(rows_ahead - 1);
            at = row_in_shared<T, Other, kGated>(copies + copy * plan.row_bytes, size);
        }

        float kept[NormTile<kVector>::kElements];
        float wdy[NormTile<kVector>::kElements];
        float totals[2] = {0.0f, 0.0f};
        for (int tile = 0; tile < size; tile += step) {
            load_gradient<T, Other, kVector, kGate, kLooped>(q, at, dbeside, column, mean, rstd, tile, row_size, true, weights,
                                                             sums, bias_sums, kept, wdy, totals);
        }
        // ds = (wdy - x_hat mean(wdy x_hat) - mean(wdy)) rstd = (wdy - (s slope + offset)) rstd
        if (p.is_rms_norm) {
            sum_over_row<1>(totals, shared, turn);
            totals[1] = 0.0f;
        } else {
            sum_over_row<2>(totals, shared, turn);
        }
        const float slope = totals[0] * inverse_size * rstd;
        const float offset = fmaf(-slope, mean, totals[1] * inverse_size);
        for (int tile = 0; tile < size; tile += step) {
            if constexpr (kLooped) {
                load_gradient<T, Other, kVector, kGate, kLooped>(q, at, dbeside, column, mean, rstd, tile, row_size, false,
                                                                 weights, sums, bias_sums, kept, wdy, totals);
            }
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int i = vector_index<kVector>(tile, v);
                if (i < row_size) {
                    float* ds = wdy + v * kVector;
                    if constexpr (kGate == NormGate::kBefore) {
                        float x[kVector];
                        float z[kVector];
                        float dz[kVector];
                        load_vector<T, kVector>(at.x, i, x);
                        load_vector<Other, kVector>(at.beside, i, z);
#pragma unroll
                        for (int k = 0; k < kVector; ++k) {
                            const float gate = kept[v * kVector + k];
                            const float silu_z = z[k] * gate;
                            ds[k] = (ds[k] - fmaf(x[k] * silu_z, slope, offset)) * rstd;
                            dz[k] = ds[k] * x[k] * silu_slope(silu_z, gate);
                            ds[k] *= silu_z;
                        }
                        packed_store<Other, kVector>(dbeside + i, pack<Other, kVector>(dz));
                    } else {
#pragma unroll
                        for (int k = 0; k < kVector; ++k) {
                            ds[k] = (ds[k] - fmaf(kept[v * kVector + k], slope, offset)) * rstd;
                        }
                    }
                    if constexpr (!kGated) {
                        if (q.dresidual_out != nullptr) {
                            float dsum[kVector];
                            load_vector<Other, kVector>(at.beside, i, dsum);
#pragma unroll
                            for (int k = 0; k < kVector; ++k) {
                                ds[k] += dsum[k];
                            }
                        }
                        if (q.dresidual != nullptr) {
                            packed_store<Other, kVector>(dbeside + i, pack<Other, kVector>(ds));
                        }
                    }
                    packed_store<T, kVector>(dx + i, pack<T, kVector>(ds));
                }
            }
        }
        if constexpr (kVector > 1) {
            if (copied) {  // the copy has been read: the next row takes its place
                if (turn + rows_ahead < rows) {
                    copy_row<T, Other, kVector, kGated>(q, next, size, step, copies + copy * plan.row_bytes);
                }
                cp_async_commit_group();
                copy = copy + 1 < rows_ahead ? copy + 1 : 0;
            }
        }
        advance<T, Other, kGated>(q, stride, 0, next);
        dx += stride * q.dx_row_stride;
        dbeside += stride * dbeside_stride;
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
                static_cast<float*>(q.workspace)[(which * plan.slots + slot) * width + column + i] = sum;
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

template <typename T, typename Other, int kVector, NormGate kGate, bool kLooped>
cudaError_t launch_norm_backward_as(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    const auto kernel = norm_backward_kernel<T, Other, kVector, kGate, kLooped>;
    const int64_t copied_bytes = kVector == 1 ? 0 : plan.layout.block_rows * plan.rows_ahead * plan.row_bytes;
    const size_t shared_bytes = static_cast<size_t>(plan.sum_bytes + copied_bytes);
    if (shared_bytes + sizeof(RowSums<2>) > 48 * 1024) {
        const cudaError_t error = allow_shared(kernel, static_cast<int64_t>(shared_bytes));
        if (error != cudaSuccess) {
            return error;
        }
    }
    const dim3 threads(static_cast<unsigned>(plan.layout.lanes), static_cast<unsigned>(plan.layout.block_rows));
    return launch_kernel(kernel, plan.slots * q.forward.ngroups, threads, shared_bytes, q.forward.run.stream, q, plan);
}

template <typename T, typename Other, int kVector, NormGate kGate>
cudaError_t launch_norm_backward_vector(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    return plan.layout.looped ? launch_norm_backward_as<T, Other, kVector, kGate, true>(q, plan)
                              : launch_norm_backward_as<T, Other, kVector, kGate, false>(q, plan);
}

template <typename T, typename Other, NormGate kGate>
cudaError_t launch_norm_backward_gate(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    if constexpr (sizeof(T) == 2 && sizeof(Other) == 2) {
        if (norm_backward_is_aligned(q, 8)) {
            return launch_norm_backward_vector<T, Other, 8, kGate>(q, plan);
        }
    }
    if (norm_backward_is_aligned(q, 4)) {
        return launch_norm_backward_vector<T, Other, 4, kGate>(q, plan);
    }
    return launch_norm_backward_as<T, Other, 1, kGate, true>(q, plan);
}

template <typename T, typename Other>
cudaError_t launch_norm_backward_beside(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    if (q.forward.z == nullptr) {
        return launch_norm_backward_gate<T, Other, NormGate::kNone>(q, plan);
    }
    return q.forward.norm_before_gate ? launch_norm_backward_gate<T, Other, NormGate::kAfter>(q, plan)
                                      : launch_norm_backward_gate<T, Other, NormGate::kBefore>(q, plan);
}

template <typename T>
cudaError_t launch_norm_backward(const MambaNormBackward& q, const NormBackwardPlan& plan) {
    if constexpr (sizeof(T) == 2) {
        const MambaNorm& p = q.forward;
        const bool alone = p.residual_out == nullptr && p.z == nullptr && q.dresidual_out == nullptr && q.dresidual == nullptr;
        if (alone || p.other_dtype != MAMBA_FLOAT32) {
            return launch_norm_backward_beside<T, T>(q, plan);
        }
    }
    return launch_norm_backward_beside<T, float>(q, plan);
}

}  // namespace mamba
