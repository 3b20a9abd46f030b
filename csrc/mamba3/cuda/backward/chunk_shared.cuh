// What a block of chunk_gradients.cuh has in shared memory.
#pragma once

#include "mamba3/cuda/backward/pairs.cuh"

namespace mamba {

template <typename T, class Tiles>
struct Mamba3ChunkShared {
    static constexpr int kPitch = Tiles::kStates + kTilePad;
    static constexpr int kInnerPitch = Tiles::kInner + kTilePad;
    static constexpr int kRowsPitch = Tiles::kRows + kTilePad;
    static constexpr int kPairs = Tiles::kStates / 2;
    T q[Tiles::kRows * kPitch];  // in the end, with k: dq as float
    T k[Tiles::kRows * kPitch];
    T state[Tiles::kInner * kPitch];  // with dstate: dk
    T dstate[Tiles::kInner * kPitch];
    T weights[Tiles::kRows * kRowsPitch];  // W G; with slopes: dx
    T slopes[Tiles::kRows * kRowsPitch];   // W R
    T x[Tiles::kRows * kInnerPitch];
    T dy[Tiles::kRows * kInnerPitch];
    float dturns[Tiles::kRows * kPairs];  // what rows give to angles
    ChunkSteps<Tiles::kRows> steps[2];
    Mamba3ChunkSums<Tiles> sums;

    static_assert(2 * sizeof(T) * kPitch >= 4 * kPitch, "dq fits");
    static_assert(2 * sizeof(T) * Tiles::kInner >= 4 * Tiles::kRows, "dk fits");
    static_assert(2 * sizeof(T) * kRowsPitch >= 4 * kInnerPitch, "dx fits");

    __device__ __forceinline__ float* dq_tile() { return reinterpret_cast<float*>(q); }
    __device__ __forceinline__ float* dk_tile() { return reinterpret_cast<float*>(state); }
    __device__ __forceinline__ float* dx_tile() { return reinterpret_cast<float*>(weights); }
};

}  // namespace mamba
