// Tiles of states on their way to shared memory, where they take no registers.
#pragma once

#include "state_update/cuda/rows.cuh"

namespace mamba {

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
    // Elements that lie `stride` apart, of which `left` are there, one after the other.
    __device__ __forceinline__ void gather(int slot, int r, int v, const State* from, int64_t stride, int left) const {
        State* const to = reinterpret_cast<State*>(at(slot, r, v));
#pragma unroll 1
        for (int i = 0; i < Rows::kVector; ++i) {
            to[i] = i < left ? from[i * stride] : from_float<State>(0.0f);
        }
    }
    // What gather() takes, from registers, through the lane's place.
    __device__ __forceinline__ void scatter(int slot, int r, int v, State* to, int64_t stride, int left,
                                            const float* values) const {
        State* const place = reinterpret_cast<State*>(at(slot, r, v));
        const Packed<State, Rows::kVector> packed = pack<State, Rows::kVector>(values);
        *reinterpret_cast<uint4*>(place) = make_uint4(packed.word[0], packed.word[1], packed.word[2], packed.word[3]);
#pragma unroll 1
        for (int i = 0; i < Rows::kVector && i < left; ++i) {
            to[i * stride] = place[i];
        }
    }
    __device__ __forceinline__ void read(int slot, int r, int v, float* values) const {
        unpack<State, Rows::kVector>(packed_load<State, Rows::kVector>(reinterpret_cast<const State*>(at(slot, r, v))), values);
    }
};

}  // namespace mamba
