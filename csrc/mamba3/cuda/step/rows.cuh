// What a decoding step's block makes of its head's rows of q and k: norm, bias and turn; and where it keeps what it reads
// beside the state.
#pragma once

#include "mamba3/cuda/chunks.cuh"
#include "mamba3/kernels.h"
#include "state_update/cuda/ring.cuh"

namespace mamba {

constexpr int kMamba3StepThreads = 128;
constexpr int kMamba3StepWarps = kMamba3StepThreads / 32;

struct Mamba3StepLayout {
    int32_t lanes_log2;  // that share a row of the state
    int32_t held;        // ranks whose rows are in shared memory at a time
    int32_t pitch;       // of such a row
    bool ahead;          // few blocks: they start long before the kernel ahead has ended
};

// Of a call's tensors. Where the usual ones are compiled in, half of the instructions beside the state's are gone.
struct Mamba3StepDtypes {
    int32_t x, adt, dt, trap, angle, parameter, weight, k, v;

    // dtype: of the projection, and of what has followed it.
    static __host__ __device__ __forceinline__ constexpr Mamba3StepDtypes usual(int32_t dtype) {
        return {dtype, dtype, dtype, dtype, dtype, MAMBA_FLOAT32, dtype, dtype, dtype};
    }
    static __host__ __device__ __forceinline__ Mamba3StepDtypes of(const MambaMamba3Step& q) {
        const MambaMamba3& p = q.scan;
        return {p.dtype,           p.adt_dtype,    p.dt_dtype, p.trap_dtype, p.angle_dtype,
                q.parameter_dtype, q.weight_dtype, q.k_dtype,  q.v_dtype};
    }
};

// Shared memory behind the states.
struct Mamba3StepShared {
    float *q, *k, *before;  // (held, pitch): q and k as the state meets them, and the k before
    float2* x;              // (held, P): what k and the k before are multiplied by
    float *y, *rstd;        // (R, P); (R)

    __device__ __forceinline__ Mamba3StepShared(unsigned char* first, const Mamba3StepLayout& layout, int rank, int headdim)
        : q(reinterpret_cast<float*>(first)),
          k(q + layout.held * layout.pitch),
          before(k + layout.held * layout.pitch),
          x(reinterpret_cast<float2*>(before + layout.held * layout.pitch)),
          y(reinterpret_cast<float*>(x + layout.held * headdim)),
          rstd(y + rank * headdim) {}
};

// q or k, of one head.
struct Mamba3StepMatrix {
    const void *from, *bias, *weight;
    void* state;  // of k
    int64_t offset, rank_stride, bias_offset, state_offset, state_stride;
    int32_t dtype, bias_dtype, weight_dtype, state_dtype;
    float eps;

    __device__ __forceinline__ Mamba3StepMatrix(const MambaMamba3Step& q, const Mamba3StepDtypes& dtypes, bool is_k,
                                                int64_t batch, int64_t head, int64_t group) {
        const MambaMamba3& p = q.scan;
        from = is_k ? p.k : p.q;
        bias = is_k ? p.k_bias : p.q_bias;
        weight = is_k ? q.k_weight : q.q_weight;
        eps = is_k ? q.k_eps : q.q_eps;
        state = is_k ? q.state_k : nullptr;
        offset =
            is_k ? batch * p.k_batch_stride + group * p.k_group_stride : batch * p.q_batch_stride + group * p.q_group_stride;
        rank_stride = is_k ? p.k_rank_stride : p.q_rank_stride;
        bias_offset = head * p.rank * p.dstate;
        state_offset = (batch * p.rank * p.nheads + head) * p.dstate;
        state_stride = p.nheads * p.dstate;
        dtype = dtypes.x;
        bias_dtype = dtypes.parameter;
        weight_dtype = dtypes.weight;
        state_dtype = dtypes.k;
    }
};

// A lane's part of a row: the pairs `lane`, lane + 32, ... that an angle may turn, (2i, 2i + 1) or (i, i + N / 2). An odd N
// leaves a pair of one. As bits first, so that all loads of all rows are on their way before the first is used.
template <int kPairs>
struct Mamba3StepRow {
    uint32_t from[kPairs][2], bias[kPairs][2], weight[kPairs][2], before[kPairs][2];

    // Calls visit(slot, which one, entry of the row) for what there is.
    template <class Visit>
    static __device__ __forceinline__ void each(const MambaMamba3& p, int lane, const Visit& visit) {
        const int dstate = static_cast<int>(p.dstate), half = dstate / 2;
#pragma unroll
        for (int slot = 0; slot < kPairs; ++slot) {
            const int pair = slot * 32 + lane;
            if (2 * pair < dstate) {
                const bool whole = pair < half;
                visit(slot, 0, !whole ? dstate - 1 : p.pairwise != 0 ? 2 * pair : pair);
                if (whole) {
                    visit(slot, 1, p.pairwise != 0 ? 2 * pair + 1 : pair + half);
                }
            }
        }
    }

    __device__ __forceinline__ void load(const MambaMamba3& p, const Mamba3StepMatrix& matrix, int rank, int lane) {
#pragma unroll
        for (int slot = 0; slot < kPairs; ++slot) {
            from[slot][0] = from[slot][1] = 0;
        }
        each(p, lane, [&](int slot, int i, int n) {
            from[slot][i] = load_bits(matrix.from, matrix.offset + rank * matrix.rank_stride + n, matrix.dtype);
            bias[slot][i] = load_bits(matrix.bias, matrix.bias_offset + rank * p.dstate + n, matrix.bias_dtype);
            if (matrix.weight != nullptr) {
                weight[slot][i] = load_bits(matrix.weight, n, matrix.weight_dtype);
            }
            if (matrix.state != nullptr) {
                before[slot][i] =
                    load_bits(matrix.state, matrix.state_offset + rank * matrix.state_stride + n, matrix.state_dtype);
            }
        });
    }

    // Calls put(entry, value, of k the one before). writes: the state of k becomes this one.
    template <class Put>
    __device__ __forceinline__ void finish(const MambaMamba3& p, const Mamba3StepMatrix& matrix, int rank, int lane,
                                           const float2* cos_sin, bool writes, const Put& put) const {
        float value[kPairs][2], rstd = 1.0f;
#pragma unroll
        for (int slot = 0; slot < kPairs; ++slot) {
            value[slot][0] = float_from_bits(from[slot][0], matrix.dtype);
            value[slot][1] = float_from_bits(from[slot][1], matrix.dtype);
        }
        if (matrix.weight != nullptr) {
            float squares = 0.0f;
#pragma unroll
            for (int slot = 0; slot < kPairs; ++slot) {
                squares = fmaf(value[slot][0], value[slot][0], fmaf(value[slot][1], value[slot][1], squares));
            }
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2) {
                squares += __shfl_xor_sync(0xffffffffu, squares, distance);
            }
            rstd = rsqrtf(squares / static_cast<float>(p.dstate) + matrix.eps);
        }
        each(p, lane, [&](int slot, int i, int) {
            const float scale = matrix.weight != nullptr ? rstd * float_from_bits(weight[slot][i], matrix.weight_dtype) : 1.0f;
            value[slot][i] = fmaf(value[slot][i], scale, float_from_bits(bias[slot][i], matrix.bias_dtype));
        });
#pragma unroll
        for (int slot = 0; slot < kPairs; ++slot) {
            if (slot * 32 + lane < p.nangles) {
                const float2 rotated = rotate_pair(make_float2(value[slot][0], value[slot][1]), cos_sin[slot * 32 + lane]);
                value[slot][0] = rotated.x;
                value[slot][1] = rotated.y;
            }
        }
        each(p, lane, [&](int slot, int i, int n) {
            put(n, value[slot][i], matrix.state != nullptr ? float_from_bits(before[slot][i], matrix.state_dtype) : 0.0f);
            if (matrix.state != nullptr && writes) {
                store_from_float(matrix.state, matrix.state_offset + rank * matrix.state_stride + n, matrix.state_dtype,
                                 value[slot][i]);
            }
        });
    }
};

// What all rows of a head's state share.
struct Mamba3StepRates {
    float decay, gamma, nu, dt;
};

// The same as bits.
struct Mamba3StepRateBits {
    uint32_t adt, dt, trap, dt_bias;

    __device__ __forceinline__ Mamba3StepRateBits(const MambaMamba3Step& q, const Mamba3StepDtypes& dtypes, int64_t batch,
                                                  int64_t head) {
        const MambaMamba3& p = q.scan;
        adt = load_bits(p.adt, batch * p.adt_batch_stride + head * p.adt_head_stride, dtypes.adt);
        dt = load_bits(p.dt, batch * p.dt_batch_stride + head * p.dt_head_stride, dtypes.dt);
        trap = load_bits(p.trap, batch * p.trap_batch_stride + head * p.trap_head_stride, dtypes.trap);
        dt_bias = q.dt_bias != nullptr ? load_bits(q.dt_bias, head, dtypes.parameter) : 0;
    }
    __device__ __forceinline__ Mamba3StepRates rates(const MambaMamba3Step& q, const Mamba3StepDtypes& dtypes) const {
        float exponent = float_from_bits(adt, dtypes.adt), step = float_from_bits(dt, dtypes.dt);
        if (q.dt_bias != nullptr) {
            const float a = exponent;
            step = softplus(step + float_from_bits(dt_bias, dtypes.parameter));
            const float rate = q.A_softplus != 0 ? softplus(a) : a < 0.0f ? 1.0f / (1.0f - a) : 1.0f + a;
            exponent = -(rate < q.A_floor ? q.A_floor : rate) * step;  // a NaN stays
        }
        const float gate = float_from_bits(trap, dtypes.trap);
        return {expf(exponent), sigmoid(gate) * step, sigmoid(-gate) * step, step};
    }
};

}  // namespace mamba
