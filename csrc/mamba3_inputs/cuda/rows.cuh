// What both directions share: rows of q and k in a warp's registers, and the rates of a step.
#pragma once

#include "common/cuda_vector.cuh"
#include "mamba3_inputs/plan.h"

namespace mamba {

constexpr int kMamba3InputsThreads = 256;
constexpr int kMamba3InputsWarps = kMamba3InputsThreads / 32;
constexpr int kMamba3InputsEach = MAMBA_MAX_DSTATE / 32;  // columns of a lane
constexpr int kMamba3InputsWide = 4;                      // of them neighbours

// Calls each(column, place) for the lane's columns below dstate, kMamba3InputsWide neighbours at a time.
template <typename Each>
__device__ __forceinline__ void of_columns(int dstate, int lane, const Each& each) {
#pragma unroll
    for (int place = 0; place < kMamba3InputsEach; place += kMamba3InputsWide) {
        const int column = 32 * place + kMamba3InputsWide * lane;
        if (column < dstate) {
            each(column, place);
        }
    }
}

// vectors: neighbours are read and written at once. Zeros beyond dstate.
template <typename T>
__device__ __forceinline__ void load_columns(const T* row, int dstate, int lane, bool vectors,
                                             float (&values)[kMamba3InputsEach]) {
#pragma unroll
    for (int i = 0; i < kMamba3InputsEach; ++i) {
        values[i] = 0.0f;
    }
    of_columns(dstate, lane, [&](int column, int place) {
        unpack<T, kMamba3InputsWide>(packed_load_padded<T, kMamba3InputsWide>(row + column, dstate - column, vectors),
                                     values + place);
    });
}

template <typename T>
__device__ __forceinline__ void store_columns(T* row, int dstate, int lane, bool vectors,
                                              const float (&values)[kMamba3InputsEach]) {
    of_columns(dstate, lane, [&](int column, int place) {
        if (vectors) {
            packed_store<T, kMamba3InputsWide>(row + column, pack<T, kMamba3InputsWide>(values + place));
        } else {
            scatter<T, kMamba3InputsWide>(row + column, 1, dstate - column, values + place);
        }
    });
}

// A weight, zero beyond dstate.
__device__ __forceinline__ void load_weight(const void* weight, int32_t dtype, int dstate, int lane,
                                            float (&values)[kMamba3InputsEach]) {
#pragma unroll
    for (int i = 0; i < kMamba3InputsEach; ++i) {
        const int column = 32 * (i / kMamba3InputsWide * kMamba3InputsWide) + kMamba3InputsWide * lane + i % kMamba3InputsWide;
        values[i] = column < dstate ? load_as_float(weight, column, dtype) : 0.0f;
    }
}

// 1 / rms of a row.
__device__ __forceinline__ float rstd_of_row(const float (&values)[kMamba3InputsEach], int dstate, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kMamba3InputsEach; ++i) {
        squares = fmaf(values[i], values[i], squares);
    }
    return rsqrtf(sum_over_warp(squares) / static_cast<float>(dstate) + eps);
}

// Of q or of k.
struct Mamba3InputsMatrix {
    const void* from;
    const void* weight;
    int32_t weight_dtype;
    float eps;

    __device__ __forceinline__ Mamba3InputsMatrix(const MambaMamba3Inputs& p, bool of_k)
        : from(of_k ? p.k : p.q),
          weight(of_k ? p.k_weight : p.q_weight),
          weight_dtype(of_k ? p.k_weight_dtype : p.q_weight_dtype),
          eps(of_k ? p.k_eps : p.q_eps) {}
};

// -A of a step and its slope, before the floor.
struct Mamba3Rate {
    float value, slope;

    __device__ __forceinline__ Mamba3Rate(const MambaMamba3Inputs& p, float a) {
        if (p.A_softplus != 0) {
            value = softplus(a);
            slope = sigmoid(a);
        } else {
            const float tail = 1.0f / (1.0f - fminf(a, 0.0f));
            value = a < 0.0f ? tail : 1.0f + a;  // a NaN stays
            slope = tail * tail;
        }
        if (value < p.A_floor) {
            value = p.A_floor;
            slope = 0.0f;
        }
    }
};

}  // namespace mamba
