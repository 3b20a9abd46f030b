// Tiles of states on their way to shared memory, where they take no registers.
#pragma once

#include "state_update/cuda/rows.cuh"

namespace mamba {

constexpr int kCacheLine = 128;

// A warp's kDepth tiles. Each lane reads what it copied itself, so that nobody waits for anybody else's copies.
template <class Rows, int kDepth>
struct StateRing {
    using State = typename Rows::State;
    static constexpr int kTileBytes = Rows::kVector > 1 ? 512 * Rows::kRows* Rows::kVectors : 0;
    static constexpr int kWarpBytes = kDepth * kTileBytes;

    unsigned char* mine;

    __device__ __forceinline__ explicit StateRing(unsigned char* warp) : mine(warp + (threadIdx.x & 31) * 16) {}
    // A slot is where a tile begins, in bytes.
    __device__ __forceinline__ int after(int slot) const { return slot == kWarpBytes - kTileBytes ? 0 : slot + kTileBytes; }
    __device__ __forceinline__ unsigned char* at(int slot, int r, int v) const {
        return mine + slot + (r * Rows::kVectors + v) * 512;
    }
    __device__ __forceinline__ void load(int slot, int r, int v, const State* from) const {
        cp_async<16>(at(slot, r, v), from, true);
    }
    __device__ __forceinline__ void read(int slot, int r, int v, float* values) const {
        unpack<State, Rows::kVector>(packed_load<State, Rows::kVector>(reinterpret_cast<const State*>(at(slot, r, v))), values);
    }
};

}  // namespace mamba
