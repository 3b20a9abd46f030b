// The norm's backward, what a thread does with its part of a tile: the gradient of what is normalised, and what is stored of
// it.
#pragma once

#include "norm/cuda/backward_rows.cuh"

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

// From a tile of a row: wdy, the gradient of x_hat = (s - mean) rstd; adds the row's sums of wdy x_hat and of wdy to totals.
// `kept` gets s; with the gate before the norm sigmoid(z), which costs more than to find s = x silu(z) again. The first time it
// also adds to the sums of dweight (and, bias_sums further, dbias) and, with the gate after the norm, writes dz.
// weights: of the tile's elements; loaded here only where tiles change.
template <typename T, typename Other, int kVector, bool kLooped>
__device__ __forceinline__ void load_gradient(const MambaNormBackward& q, NormGate gate, const NormRow& at, Other* dz,
                                              int64_t column, float mean, float rstd, int tile, int size, bool first_time,
                                              float* weights, float* sums, int64_t bias_sums, float* kept, float* wdy,
                                              float* totals) {
    constexpr int kVectors = NormTile<kVector>::kVectors;
    const bool gated = gate != NormGate::kNone;
    const MambaNorm& p = q.forward;
    // A row that is not copied comes from global memory, which is far away: all loads at once.
    [[maybe_unused]] Packed<T, kVector> dout_bits[kVectors];
    [[maybe_unused]] Packed<Other, kVector> z_bits[kVectors];
    if constexpr (kLooped) {
        load_bits<T, kVector>(static_cast<const T*>(at.dout), tile, size, dout_bits);
        if (gated) {
            load_bits<Other, kVector>(static_cast<const Other*>(at.beside), tile, size, z_bits);
        }
        if (x_is_sum(q, gated)) {
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
            [[maybe_unused]] float sigmoid_z[kVector];
            float* s = kept + v * kVector;
            float* weight = weights + v * kVector;
            if constexpr (kLooped) {
                load_parameter<kVector>(p.weight, column + i, p.weight_dtype, weight);
                unpack<T, kVector>(dout_bits[v], dy);
                if (gated) {
                    unpack<Other, kVector>(z_bits[v], z);
                }
            } else {
                load_vector<T, kVector>(at.dout, i, dy);
                if (gated) {
                    load_vector<Other, kVector>(at.beside, i, z);
                }
                if (x_is_sum(q, gated)) {
                    load_vector<Other, kVector>(at.x, i, s);
                } else {
                    load_vector<T, kVector>(at.x, i, s);
                }
            }
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                float sum = s[k];
                if (gated) {
                    sigmoid_z[k] = sigmoid(z[k]);
                }
                if (gate == NormGate::kBefore) {
                    sum *= z[k] * sigmoid_z[k];
                    s[k] = sigmoid_z[k];
                }
                x_hat[k] = (sum - mean) * rstd;
            }
            if (gate == NormGate::kAfter) {
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
                        dgate[k] = dy[k] * fmaf(x_hat[k], weight[k], dgate[k]) * silu_slope(z[k] * sigmoid_z[k], sigmoid_z[k]);
                    }
                    packed_store<Other, kVector>(dz + i, pack<Other, kVector>(dgate));
                }
#pragma unroll
                for (int k = 0; k < kVector; ++k) {
                    dy[k] *= z[k] * sigmoid_z[k];
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

// From wdy of a tile: writes dx, and dz or dresidual. kept: as load_gradient leaves it. ds = (wdy - (s slope + offset)) rstd is
// the gradient of s.
template <typename T, typename Other, int kVector>
__device__ __forceinline__ void store_gradient(const MambaNormBackward& q, NormGate gate, const NormRow& at, T* dx,
                                               Other* dbeside, float rstd, float slope, float offset, int tile, int size,
                                               const float* kept, float* wdy) {
#pragma unroll
    for (int v = 0; v < NormTile<kVector>::kVectors; ++v) {
        const int i = vector_index<kVector>(tile, v);
        if (i < size) {
            float* ds = wdy + v * kVector;
            if (gate == NormGate::kBefore) {
                float x[kVector];
                float z[kVector];
                float dz[kVector];
                load_vector<T, kVector>(at.x, i, x);
                load_vector<Other, kVector>(at.beside, i, z);
#pragma unroll
                for (int k = 0; k < kVector; ++k) {
                    const float sigmoid_z = kept[v * kVector + k];
                    const float silu_z = z[k] * sigmoid_z;
                    ds[k] = (ds[k] - fmaf(x[k] * silu_z, slope, offset)) * rstd;
                    dz[k] = ds[k] * x[k] * silu_slope(silu_z, sigmoid_z);
                    ds[k] *= silu_z;
                }
                packed_store<Other, kVector>(dbeside + i, pack<Other, kVector>(dz));
            } else {
#pragma unroll
                for (int k = 0; k < kVector; ++k) {
                    ds[k] = (ds[k] - fmaf(kept[v * kVector + k], slope, offset)) * rstd;
                }
            }
            if (gate == NormGate::kNone) {
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

}  // namespace mamba
