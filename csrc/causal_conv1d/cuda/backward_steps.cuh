// Causal convolution, backward, lanes along channels: the next steps of x and dout, on their way while a lane computes those
// before.
#pragma once

#include "causal_conv1d/cuda/backward_common.cuh"

namespace mamba {

constexpr int kChannelSteps = kConvMaxWidth;  // steps that a lane takes at a time

// In registers.
template <typename T, int V>
struct StepsInRegisters {
    struct Shared {};

    Packed<T, V> next_x[kChannelSteps];
    Packed<T, V> next_dout[kChannelSteps];
    const T* x;
    const T* dout;
    int64_t x_stride, dout_stride;
    int left;  // steps to load

    __device__ __forceinline__ void begin(Shared&) {
#pragma unroll
        for (int i = 0; i < kChannelSteps; ++i) {
            next_x[i] = packed_zero<T, V>();
            next_dout[i] = packed_zero<T, V>();
        }
        load_next();
    }
    __device__ __forceinline__ void load_next() {
#pragma unroll
        for (int i = 0; i < kChannelSteps; ++i) {
            x = opaque(x);
            dout = opaque(dout);
            if (i < left) {
                next_x[i] = packed_load<T, V>(x);
                next_dout[i] = packed_load<T, V>(dout);
            }
            x += x_stride;
            dout += dout_stride;
        }
        left -= kChannelSteps;
    }
    __device__ __forceinline__ void take(Shared&, Packed<T, V>* steps_x, Packed<T, V>* steps_dout) {
#pragma unroll
        for (int i = 0; i < kChannelSteps; ++i) {
            steps_x[i] = next_x[i];
            steps_dout[i] = next_dout[i];
        }
        load_next();
    }
    __device__ __forceinline__ void end() {}
};

// In shared memory, which takes no registers, and where the compiler cannot delay the loads. A lane reads only what it has
// copied itself, 8 bytes a step of each, so that lanes do not wait for each other.
template <typename T, int V>
struct StepsInShared {
    struct Shared {
        uint2 of[2][2][kChannelSteps][kConvThreads];  // those in use and the next, alternating; of x, then of dout
    };

    const T* x;
    const T* dout;
    int64_t x_stride, dout_stride;
    int left;    // steps to load
    int buffer;  // of what is taken next

    __device__ __forceinline__ void begin(Shared& shared) {
        buffer = 0;
        load_next(shared, 0);
    }
    // Behind the last step there are zeros.
    __device__ __forceinline__ void load_next(Shared& shared, int to) {
#pragma unroll
        for (int i = 0; i < kChannelSteps; ++i) {
            x = opaque(x);
            dout = opaque(dout);
            cp_async<8>(&shared.of[to][0][i][threadIdx.x], x, i < left);
            cp_async<8>(&shared.of[to][1][i][threadIdx.x], dout, i < left);
            x += x_stride;
            dout += dout_stride;
        }
        cp_async_commit_group();
        left -= kChannelSteps;
    }
    __device__ __forceinline__ void take(Shared& shared, Packed<T, V>* steps_x, Packed<T, V>* steps_dout) {
        cp_async_wait_group<0>();
        load_next(shared, buffer ^ 1);
#pragma unroll
        for (int i = 0; i < kChannelSteps; ++i) {
            steps_x[i] = packed_load<T, V>(reinterpret_cast<const T*>(&shared.of[buffer][0][i][threadIdx.x]));
            steps_dout[i] = packed_load<T, V>(reinterpret_cast<const T*>(&shared.of[buffer][1][i][threadIdx.x]));
        }
        buffer ^= 1;
    }
    // Behind the last step zeros are on their way too, and the memory may be used for something else then.
    __device__ __forceinline__ void end() { cp_async_wait_group<0>(); }
};

template <typename T, int V>
struct StepsOf {
    using Type = StepsInShared<T, V>;
};
template <typename T>
struct StepsOf<T, 1> {
    using Type = StepsInRegisters<T, 1>;
};

}  // namespace mamba
