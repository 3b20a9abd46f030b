// What the kernels with lanes along time share. A row is cut into vectors of 16 bytes at addresses that are multiples of 16,
// wherever the row itself begins; at its two ends a vector may hold only some steps. reverse: a row's later steps lie at lower
// addresses. A vector is mirrored in registers, where its first element is always the first of its steps.
#pragma once

#include "causal_conv1d/cuda/common.cuh"

namespace mamba {

template <typename T>
constexpr int kTimeVector = 16 / static_cast<int>(sizeof(T));

// Steps between the vector boundary before a row and its first step.
template <typename T>
__device__ __forceinline__ int row_phase(const T* row, bool reverse) {
    const int element = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T));
    return (reverse ? ~element : element) & (kTimeVector<T> - 1);
}

// The address of a step that is so far behind that of `row`.
template <typename T, typename Step>
__device__ __forceinline__ T* at_step(T* row, Step step, bool reverse) {
    return row + (reverse ? -step : step);
}

// From the order of addresses to that of steps, and back.
template <typename T>
__device__ __forceinline__ Packed<T, kTimeVector<T>> mirrored_if(bool reverse, const Packed<T, kTimeVector<T>>& vector) {
    constexpr uint32_t kKeep = 0x3210, kMirror = sizeof(T) == 4 ? 0x7654 : 0x5476;
    Packed<T, kTimeVector<T>> ordered;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        ordered.word[i] = __byte_perm(vector.word[i], vector.word[3 - i], reverse ? kMirror : kKeep);
    }
    return ordered;
}

// The vector whose first step is so far behind that of `row`. kEither: reverse may be true (ptxas does not fold the
// permutation).
template <bool kEither, typename T>
__device__ __forceinline__ Packed<T, kTimeVector<T>> load_vector(const T* row, int offset, bool reverse) {
    constexpr int V = kTimeVector<T>;
    const Packed<T, V> vector = packed_load<T, V>(row + (reverse ? 1 - V - offset : offset));
    if constexpr (kEither) {
        return mirrored_if<T>(reverse, vector);
    } else {
        return vector;
    }
}

template <bool kEither, typename T>
__device__ __forceinline__ void store_vector(T* row, int offset, bool reverse, const Packed<T, kTimeVector<T>>& vector) {
    constexpr int V = kTimeVector<T>;
    T* const at = row + (reverse ? 1 - V - offset : offset);
    if constexpr (kEither) {
        packed_store<T, V>(at, mirrored_if<T>(reverse, vector));
    } else {
        packed_store<T, V>(at, vector);
    }
}

// The elements first <= offset + j < end of a vector; zero elsewhere.
template <typename T>
__device__ __forceinline__ Packed<T, kTimeVector<T>> load_some(const T* row, int offset, int first, int end, bool reverse) {
    constexpr int V = kTimeVector<T>;
    T element[V];
    float values[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
        element[j] = from_float<T>(0.0f);
        if (offset + j >= first && offset + j < end) {
            element[j] = *at_step(row, offset + j, reverse);
        }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
        values[j] = to_float(element[j]);
    }
    return pack<T, V>(values);
}

template <typename T>
__device__ __forceinline__ void store_some(T* row, int offset, int first, int end, bool reverse, const float* values) {
#pragma unroll
    for (int j = 0; j < kTimeVector<T>; ++j) {
        if (offset + j >= first && offset + j < end) {
            *at_step(row, offset + j, reverse) = from_float<T>(values[j]);
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
