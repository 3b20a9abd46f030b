// A block of forward/mimo.cuh: its shared memory, and what ranks count.
#pragma once

#include "mamba3/cuda/forward/rotate_steps.cuh"

namespace mamba {

// What a chunk's steps need: the first arrays of Mamba3StepArray, kMamba3Adding among them.
struct alignas(16) Mamba3RanksValues {
    float of[kMamba3RowValues][kMamba3RankSteps];
};

// What a rank counts in each column of headdim.
enum Mamba3RanksWeight {
    kMamba3RankV,    // mimo_v
    kMamba3RankZ,    // mimo_z, for the output times -log2(e)
    kMamba3RankOut,  // mimo_out, for the output times mimo_z
    kMamba3RankWeights
};

// Shared memory of a block, in bytes: q and k of two chunks, M^T, v and z of two chunks, backward also the gradient of out, and
// what the turning warpgroup needs. The results leave through their places, and the state before a chunk through q's.
template <bool kBack>
struct Mamba3RanksTiles {
    static constexpr int kTile = kMamba3ChunkRows * kMamba3RankStates * 2;  // q's or k's
    static constexpr int kMixedAt = 4 * kTile;
    static constexpr int kSteps = kMamba3RankSteps * kMamba3StateRows * 2;  // v's or z's
    static constexpr int kVAt = kMixedAt + kMamba3ChunkRows * kMamba3ChunkRows * 2;
    static constexpr int kZAt = kVAt + 2 * kSteps;
    static constexpr int kDoutAt = kZAt + 2 * kSteps;
    static constexpr int kValuesAt = kDoutAt + (kBack ? 2 * kSteps : 0);
    static constexpr int kWeightsAt = kValuesAt + 2 * static_cast<int>(sizeof(Mamba3RanksValues));  // (.., column, rank)
    static constexpr int kTurnerAt = kWeightsAt + kMamba3RankWeights * kMamba3StateRows * 16;
    static constexpr int kBytes = kTurnerAt + kMamba3Warps * Mamba3StepsShared<2>::kBytes;
    static_assert(kBytes <= 113 * 1024, "two blocks a multiprocessor");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where eight columns of a step of v or z lie, in elements. A warp's columns lie together.
__device__ __forceinline__ int place_of_rank_piece(int step, int piece) {
    return piece * (kMamba3RankSteps * 8) + (step ^ piece) * 8;
}

__device__ __forceinline__ float rank_of(const float4& of, int rank) {
    return rank == 0 ? of.x : rank == 1 ? of.y : rank == 2 ? of.z : of.w;
}

#endif

}  // namespace mamba
