// What follows the state in a decoding step: D, norm, gate and output projection of a head's rows.
#pragma once

#include "mamba3/cuda/step/rows.cuh"

namespace mamba {

// An entry of mimo_v, mimo_z or mimo_out, (H, R, P); 1 where there is none.
__device__ __forceinline__ float step_projection(const MambaMamba3& p, int32_t dtype, const void* weight, int64_t head,
                                                 int rank, int i) {
    if (weight == nullptr) {
        return 1.0f;
    }
    return float_from_bits(load_bits(weight, (head * p.rank + rank) * p.headdim + i, dtype), dtype);
}

// z_bits: of the thread's own channels.
template <int kOwn>
__device__ __forceinline__ void finish_step(const MambaMamba3& p, const Mamba3StepDtypes& dtypes, int rank,
                                            const Mamba3StepShared& shared, int64_t batch, int64_t head, const float* v_of,
                                            const uint32_t (&z_bits)[kOwn]) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread & 31;
    const int headdim = static_cast<int>(p.headdim);
    const float D = p.D != nullptr ? float_from_bits(load_bits(p.D, head, dtypes.parameter), dtypes.parameter) : 0.0f;
    const auto row_of_y = [&](int r, int i) {
        const float y = shared.y[r * headdim + i];
        return p.D != nullptr ? fmaf(D, step_projection(p, dtypes.parameter, p.mimo_v, head, r, i) * v_of[i], y) : y;
    };
    if (p.norm_weight != nullptr) {
        for (int r = thread / 32; r < rank; r += kMamba3StepWarps) {
            float squares = 0.0f;
            for (int i = lane; i < headdim; i += 32) {
                const float y = row_of_y(r, i);
                squares = fmaf(y, y, squares);
            }
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2) {
                squares += __shfl_xor_sync(0xffffffffu, squares, distance);
            }
            if (lane == 0) {
                shared.rstd[r] = rsqrtf(squares / static_cast<float>(headdim) + p.norm_eps);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int slot = 0; slot < kOwn; ++slot) {
        const int i = slot * kMamba3StepThreads + thread;
        if (i >= headdim) {
            break;
        }
        const float z = float_from_bits(z_bits[slot], dtypes.x);
        const float weight =
            p.norm_weight == nullptr
                ? 1.0f
                : float_from_bits(load_bits(p.norm_weight, head * p.headdim + i, dtypes.weight), dtypes.weight);
        const int64_t to = batch * p.out_batch_stride + head * p.out_head_stride + i;
        float out = 0.0f;
#pragma unroll 4
        for (int r = 0; r < rank; ++r) {
            float y = row_of_y(r, i);
            if (p.norm_weight != nullptr) {
                y *= shared.rstd[r] * weight;
            }
            if (p.z != nullptr) {
                y *= silu(z * step_projection(p, dtypes.parameter, p.mimo_z, head, r, i));
            }
            if (p.mimo_out == nullptr) {
                store_from_float(p.out, to + r * p.out_rank_stride, dtypes.x, y);
            } else {
                out = fmaf(y, step_projection(p, dtypes.parameter, p.mimo_out, head, r, i), out);
            }
        }
        if (p.mimo_out != nullptr) {
            store_from_float(p.out, to, dtypes.x, out);
        }
    }
}

}  // namespace mamba
