// A decoding step's state on tensor cores, for four ranks: what the ranks add, and what the outputs take of it, are products of
// matrices. float32 operands go in as three bfloat16 parts (ssd/cuda/tensor_core.cuh), so nothing is lost but infinities, whose
// parts make NaN.
#pragma once

#include "mamba3/cuda/step/rows.cuh"
#include "ssd/cuda/tensor_core.cuh"

namespace mamba {

constexpr int kMamba3ProductRanks = 4;

// A tile is 16 rows of the state, four lanes a row. In the comments g = lane / 4 and t = lane % 4: accumulators hold rows g and
// g + 8. A lane's vectors lie together in memory; since the order of states does not matter to the products, two of its states
// are the columns 2t and 2t + 1 of eight.
template <typename State>
using Mamba3ProductRows =
    StateRows<State, 16 / static_cast<int>(sizeof(State)), 2, kMamba3ProductStates / 4 * static_cast<int>(sizeof(State)) / 16>;
template <class Rows>
constexpr bool kMamba3Products = Rows::kStates == kMamba3ProductStates / 4;

// q, k and the k before as parts of float32, in shared memory.
struct Mamba3StepParts {
    static constexpr int kParts = OperandParts<float>::kCount;
    static constexpr int kPitch = kMamba3ProductStates + 16;  // neighbouring rows lie in different banks
    static constexpr int kSize = kMamba3ProductRanks * kPitch;
    static constexpr int kBytes = kParts * kSize * 6;
    uint32_t* k;  // (part, rank, state): of k, and in the upper half of the k before
    uint16_t* q;

    __device__ __forceinline__ explicit Mamba3StepParts(unsigned char* memory)
        : k(reinterpret_cast<uint32_t*>(memory)), q(reinterpret_cast<uint16_t*>(k + kParts * kSize)) {}
    __device__ __forceinline__ void put(bool of_k, int rank, int n, float value, float before) const {
        Operand<float> both;
        set_pair<float>(both, 0, value, before);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int at = part * kSize + rank * kPitch + n;
            if (of_k) {
                k[at] = both.r[part][0];
            } else {
                q[at] = static_cast<uint16_t>(both.r[part][0]);
            }
        }
    }
};

// What the ranks add to eight columns, x k^T: a column of A is what k or the k before is multiplied by, of rank t both. There
// are eight, so that a product adds two of the six that matter of the parts; the smallest first.
__device__ __forceinline__ void add_ranks(float (&sum)[4], const Operand<float>& x, const Operand<float>& k) {
    constexpr int kOrder[3][2][2] = {{{0, 2}, {2, 0}}, {{1, 1}, {1, 0}}, {{0, 1}, {0, 0}}};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const int a = kOrder[i][0][0], b = kOrder[i][1][0];
        const uint32_t both[4] = {x.r[a][0], x.r[a][1], x.r[b][0], x.r[b][1]};
        multiply_add_16<__nv_bfloat16>(sum, both, k.r[kOrder[i][0][1]][0], k.r[kOrder[i][1][1]][0]);
    }
}

// A tile's states from the ring to memory, one step on, and its rows of y. first_row: of the head's.
template <class Rows, class Ring>
__device__ __forceinline__ void advance_by_products(const Rows& rows, const StatePlace<typename Rows::State>& place,
                                                    const Ring& ring, int slot, const Mamba3StepShared& shared,
                                                    const Mamba3StepParts& parts, int headdim, int first_row, float decay) {
    constexpr int kVector = Rows::kVector;
    const int g = rows.lane / 4, t = rows.part, row = first_row + g;
    Operand<float> x;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float2 value = row + 8 * i < headdim ? shared.x[t * headdim + row + 8 * i] : make_float2(0.0f, 0.0f);
        set_pair<float>(x, i, value.x, value.y);
    }
    float y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int v = 0; v < Rows::kVectors; ++v) {
        float h[2][kVector];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                h[r][i] = 0.0f;
            }
            if (place.holds(rows, r, v)) {
                ring.read(slot, r, v, h[r]);
            }
        }
        const int own = rows.state_of(v), of_column = (4 * v + g / 2) * kVector + g % 2;
#pragma unroll
        for (int first = 0; first < kVector; first += 4) {
            Operand<float> a, q;
#pragma unroll
            for (int part = 0; part < 2; ++part) {  // eight columns
                const int n = of_column + first + 2 * part;
                Operand<float> k;
#pragma unroll
                for (int i = 0; i < Mamba3StepParts::kParts; ++i) {
                    k.r[i][0] = n < place.dstate ? parts.k[i * Mamba3StepParts::kSize + t * Mamba3StepParts::kPitch + n] : 0u;
                }
                float added[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                add_ranks(added, x, k);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float* const pair = h[r] + first + 2 * part;
                    pair[0] = fmaf(decay, pair[0], added[2 * r]);
                    pair[1] = fmaf(decay, pair[1], added[2 * r + 1]);
                    set_pair<float>(a, 2 * part + r, pair[0], pair[1]);
                }
            }
#pragma unroll
            for (int i = 0; i < Mamba3StepParts::kParts; ++i) {
                uint2 words = make_uint2(0u, 0u);
                if (g < kMamba3ProductRanks && own < place.dstate) {
                    words = *reinterpret_cast<const uint2*>(parts.q + i * Mamba3StepParts::kSize + g * Mamba3StepParts::kPitch +
                                                            own + first);
                }
                q.r[i][0] = words.x;
                q.r[i][1] = words.y;
            }
            multiply_add<float>(y, a, q, 0);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            place.store(rows, r, v, h[r]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int rank = 2 * t + i % 2, of = row + i / 2 * 8;
        if (rank < kMamba3ProductRanks && of < headdim) {
            shared.y[rank * headdim + of] = y[i];
        }
    }
}

}  // namespace mamba
