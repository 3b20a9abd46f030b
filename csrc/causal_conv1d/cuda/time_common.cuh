// What the kernels with lanes along time share. A row is cut into vectors of 16 bytes at addresses that are multiples of 16,
// wherever the row itself begins; at its two ends a vector may hold only some steps. kReverse: a row's later steps lie at lower
// addresses. A vector is turned round in registers: in hand, its first element is always the first of its steps.
#pragma once

#include "causal_conv1d/cuda/common.cuh"

namespace mamba {

template <typename T>
constexpr int kTimeVector = 16 / static_cast<int>(sizeof(T));

// Steps between the vector boundary before a row and its first step.
template <typename T, bool kReverse>
__device__ __forceinline__ int row_phase(const T* row) {
    const int element = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T));
    return (kReverse ? ~element : element) & (kTimeVector<T> - 1);
}

// The address of a step that is so far behind that of `row`.
template <bool kReverse, typename T, typename Step>
__device__ __forceinline__ T* at_step(T* row, Step step) {
    return kReverse ? row - step : row + step;
}

template <typename T>
__device__ __forceinline__ Packed<T, kTimeVector<T>> turned_round(const Packed<T, kTimeVector<T>>& vector) {
    Packed<T, kTimeVector<T>> turned;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t word = vector.word[3 - i];
        turned.word[i] = sizeof(T) == 4 ? word : word << 16 | word >> 16;
    }
    return turned;
}

// The vector whose first step is so far behind that of `row`.
template <bool kReverse, typename T>
__device__ __forceinline__ Packed<T, kTimeVector<T>> load_vector(const T* row, int offset) {
    constexpr int V = kTimeVector<T>;
    if constexpr (kReverse) {
        return turned_round<T>(packed_load<T, V>(row - offset - (V - 1)));
    } else {
        return packed_load<T, V>(row + offset);
    }
}

template <bool kReverse, typename T>
__device__ __forceinline__ void store_vector(T* row, int offset, const Packed<T, kTimeVector<T>>& vector) {
    constexpr int V = kTimeVector<T>;
    if constexpr (kReverse) {
        packed_store<T, V>(row - offset - (V - 1), turned_round<T>(vector));
    } else {
        packed_store<T, V>(row + offset, vector);
    }
}

// The elements first <= offset + j < end of a vector; zero elsewhere.
template <bool kReverse, typename T>
__device__ __forceinline__ Packed<T, kTimeVector<T>> load_some(const T* row, int offset, int first, int end) {
    constexpr int V = kTimeVector<T>;
    T element[V];
    float values[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
        element[j] = from_float<T>(0.0f);
        if (offset + j >= first && offset + j < end) {
            element[j] = *at_step<kReverse>(row, offset + j);
        }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
        values[j] = to_float(element[j]);
    }
    return pack<T, V>(values);
}

template <bool kReverse, typename T>
__device__ __forceinline__ void store_some(T* row, int offset, int first, int end, const float* values) {
#pragma unroll
    for (int j = 0; j < kTimeVector<T>; ++j) {
        if (offset + j >= first && offset + j < end) {
            *at_step<kReverse>(row, offset + j) = from_float<T>(values[j]);
        }
    }
}

// Puts initial_states into the elements of a vector, whose first is step t, that lie before step 0.
template <typename T, int N>
__device__ __forceinline__ void add_initial_states(const MambaCausalConv1d& params, int64_t batch, int64_t channel, int64_t t,
                                                   Packed<T, N>& vector) {
    if (params.initial_states == nullptr || t >= 0) {
        return;
    }
    float values[N];
    unpack<T, N>(vector, values);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        if (t + j < 0) {
            values[j] = conv_input<T>(params, batch, channel, t + j);
        }
    }
    vector = pack<T, N>(values);
}

// inputs[0..kConvHalo): the end of a vector.
template <typename T>
__device__ __forceinline__ void inputs_from_end(const uint32_t* word, float* inputs) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < kConvHalo; ++i) {
            inputs[i] = __uint_as_float(word[1 + i]);
        }
    } else {
        inputs[0] = unpack2<T>(word[2]).y;
        const float2 pair = unpack2<T>(word[3]);
        inputs[1] = pair.x;
        inputs[2] = pair.y;
    }
}

// The same from the lane before: the end of its vector, or of what a group's last lane holds for the first.
template <typename T>
__device__ __forceinline__ void inputs_before(const Packed<T, kTimeVector<T>>& own, const Packed<T, kTimeVector<T>>& wrapped,
                                              bool last, int source, float* inputs) {
    constexpr int kWords = 4;
    constexpr int kFirst = sizeof(T) == 4 ? 1 : 2;  // the words that hold the last kConvHalo elements
    uint32_t word[kWords];
#pragma unroll
    for (int i = kFirst; i < kWords; ++i) {
        word[i] = __shfl_sync(kFullWarp, last ? wrapped.word[i] : own.word[i], source);
    }
    inputs_from_end<T>(word, inputs);
}

}  // namespace mamba
