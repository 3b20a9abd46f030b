// Before the warpgroup kernels of backward (states_warpgroup.cuh, backward_warpgroup.cuh): B and C as their tiles lie in shared
// memory, and the decays of all chunks, each computed once for all blocks. It moves bits, and knows no dtype of x.
#pragma once

#include "ssd/cuda/states.cuh"
#include "ssd/cuda/warpgroup.cuh"
#include "ssd/launch.h"

namespace mamba {
namespace {

constexpr int kPrepareThreads = 256;
static_assert(sizeof(BackwardDecays<kWarpgroupSteps>) == kBackwardDecaysBytes, "what the plan reserves");

// Eight neighbours of 16 bits, of which `count` exist; the others are zero. vectors: all or none exist, at a multiple of 16
// bytes.
__device__ __forceinline__ uint4 load_piece(const uint16_t* from, int count, bool vectors) {
    uint32_t words[4] = {0, 0, 0, 0};
    if (vectors) {
        return count > 0 ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        words[i / 2] |= (i < count ? static_cast<uint32_t>(from[i]) : 0) << 16 * (i % 2);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The tiles of a chunk and group by a block.
__device__ __forceinline__ void prepare_tiles(const MambaSsd& p, const PrepareLaunch& launch, int64_t index) {
    using Tile = SwizzledTile<kWarpgroupSteps>;
    const int64_t group = index % p.ngroups;
    const int64_t chunk = index / p.ngroups % launch.chunks;
    const int64_t batch = index / p.ngroups / launch.chunks;
    const int64_t first = chunk * kWarpgroupSteps;
    const int valid = steps_in<kWarpgroupSteps>(p.seqlen, chunk);
    const int pieces = launch.states / 8;  // of a row
    const int together = kPrepareThreads / pieces;
    const int column = static_cast<int>(threadIdx.x) % pieces * 8;
    const int left = static_cast<int>(p.dstate) - column;
    const uint16_t* const B = static_cast<const uint16_t*>(p.B) + batch * p.B_batch_stride + first * p.B_len_stride +
                              group * p.B_group_stride + column;
    const uint16_t* const C = static_cast<const uint16_t*>(p.C) + batch * p.C_batch_stride + first * p.C_len_stride +
                              group * p.C_group_stride + column;
    const int tile = kWarpgroupSteps * launch.states;
    uint16_t* const tiles = static_cast<uint16_t*>(launch.prepared.tiles) + index * 3 * tile;
#pragma unroll 2
    for (int row = static_cast<int>(threadIdx.x) / pieces; row < kWarpgroupSteps; row += together) {
        const int count = row < valid ? left : 0;
        const uint4 b = load_piece(B + row * p.B_len_stride, count, launch.B_vectors != 0);
        const uint4 c = load_piece(C + row * p.C_len_stride, count, launch.C_vectors != 0);
        *reinterpret_cast<uint4*>(tiles + Tile::at(row, column)) = b;
        *reinterpret_cast<uint4*>(tiles + tile + Tile::at(row, column)) = c;
        *reinterpret_cast<uint4*>(tiles + 2 * tile + PairedTile::at(row, column)) = b;
    }
}

// The decays of a chunk and head by a warp.
__device__ __forceinline__ void prepare_decays(const MambaSsd& p, const PrepareLaunch& launch, int64_t index, int lane) {
    const int64_t head = index % p.nheads;
    const int64_t chunk = index / p.nheads % launch.chunks;
    const int64_t batch = index / p.nheads / launch.chunks;
    if (batch < p.batch) {
        const StepSize size = step_size(p, batch, 0, head);
        StepInputs<kWarpgroupSteps> inputs;
        load_steps<kWarpgroupSteps>(inputs, size, p.seq_idx == nullptr ? nullptr : p.seq_idx + batch * p.seqlen,
                                    chunk * kWarpgroupSteps, steps_in<kWarpgroupSteps>(p.seqlen, chunk), lane);
        chunk_decays<kWarpgroupSteps>(static_cast<BackwardDecays<kWarpgroupSteps>*>(launch.prepared.decays)[index], inputs,
                                      size, head_A(p, head), lane);
    }
}

__global__ void __launch_bounds__(kPrepareThreads) ssd_prepare_kernel(const MambaSsd p, const PrepareLaunch launch) {
    const int64_t tile_blocks = p.batch * launch.chunks * p.ngroups;
    if (blockIdx.x < tile_blocks) {
        prepare_tiles(p, launch, blockIdx.x);
    } else {
        prepare_decays(p, launch, (blockIdx.x - tile_blocks) * (kPrepareThreads / 32) + threadIdx.x / 32, threadIdx.x % 32);
    }
}

}  // namespace

cudaError_t launch_prepare(const MambaSsd& p, const PrepareLaunch& launch) {
    const int64_t chunks = p.batch * launch.chunks;
    const int64_t blocks = chunks * p.ngroups + ceil_div(chunks * p.nheads, kPrepareThreads / 32);
    return chunks == 0 ? cudaSuccess : launch_kernel(ssd_prepare_kernel, blocks, kPrepareThreads, 0, p.run.stream, p, launch);
}

}  // namespace mamba
