// One of the two warpgroups of forward_warpgroup.cuh: it makes the tiles of a chunk, while the other one multiplies those of
// the chunk before. It turns the rows of q and k on their way from memory, and copies those of x.
#pragma once

#include "mamba3/cuda/turn_pairs_warpgroup.cuh"
#include "mamba3/cuda/turn_ranks_warpgroup.cuh"
#include "mamba3/cuda/turn_warpgroup.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The rows of x of a chunk: v's, times mimo_v if there is one; or from the end dy's, which has ranks of its own. A thread
// copies the pieces that it multiplies.
template <typename T, bool kFromEnd>
struct Mamba3XCopies {
    using Block = Mamba3Block<kFromEnd>;
    static constexpr int kTogether = kMamba3Threads / 8;  // rows
    const T* v;                                           // of a chunk's first step, the thread's columns
    const float* mimo;                                    // of the thread's columns and rank, or NULL
    int row, column;
    int rows_log2;  // rows of the tile for one of v
    int left;       // rows of v in the chunk, or more
    bool exists;    // the columns and the rank

    __device__ __forceinline__ Mamba3XCopies(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch, const Block& block,
                                             int thread)
        : mimo(nullptr), row(thread / 8), column(thread % 8 * 8) {
        static_assert(kTogether % kMamba3MostRanks == 0, "a thread's rank stays the same");
        const int64_t first = block.first_step(launch.chunks);
        const int64_t steps = block.range.begin + block.range.seqlen - first;
        if (kFromEnd) {
            rows_log2 = 0;
            const int64_t stride = launch.backward.dy_stride;
            exists = column < block.columns;
            left = static_cast<int>(steps * p.rank);
            v = static_cast<const T*>(launch.backward.dy) + (block.range.row * p.seqlen + first) * p.rank * stride +
                block.launch_head * p.headdim;
        } else {
            rows_log2 = launch.ranks_log2;
            const int rank = row % (1 << rows_log2);
            exists = column < block.columns && rank < p.rank;
            left = static_cast<int>(steps);
            v = static_cast<const T*>(p.v) + block.range.row * p.v_batch_stride + first * p.v_len_stride +
                block.head * p.v_head_stride;
            if (p.mimo_v != nullptr && exists) {
                mimo = p.mimo_v + (block.head * p.rank + rank) * p.headdim + block.row0 + column;
            }
        }
        v += block.row0 + (exists ? column : 0);
    }
    // Begins to copy a chunk's rows.
    __device__ __forceinline__ void begin(T* tile, int64_t stride) {
        const T* const from = opaque(v);
        T* const to = tile + Mamba3XTile::at(row, column);
#pragma unroll
        for (int i = 0; i < kMamba3ChunkRows; i += kTogether) {
            const int own = (row + i) >> rows_log2;
            const bool valid = exists && own < left;
            copy_async<16>(to + i * 64, valid ? from + own * stride : from, valid);
        }
        end_copies();
        const int rows = kMamba3ChunkRows >> rows_log2;
        if (kFromEnd) {
            v -= rows * stride;
            left = kMamba3ChunkRows;  // all chunks but the last are full
        } else {
            v += rows * stride;
            left -= rows;
        }
    }
    __device__ __forceinline__ void finish(T* tile) const {
        wait_for_copies<0>();
        if (mimo == nullptr) {
            return;
        }
        float weights[8];
        unpack<float, 8>(packed_load<float, 8>(mimo), weights);
#pragma unroll
        for (int i = 0; i < kMamba3ChunkRows; i += kTogether) {
            uint4& words = *reinterpret_cast<uint4*>(tile + Mamba3XTile::at(row + i, column));
            const auto times = [&](uint32_t word, int j) {
                const float2 pair = unpack2<T>(word);
                return pack2<T>(pair.x * weights[j], pair.y * weights[j + 1]);
            };
            words = make_uint4(times(words.x, 0), times(words.y, 2), times(words.z, 4), times(words.w, 6));
        }
    }
};

// All of a block's chunks, one ahead of the other warpgroup.
template <typename Turner, typename T, int kStates, Mamba3Pass kPass>
__device__ __forceinline__ void turn_mamba3_chunks(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                   const Mamba3Block<kPass == kMamba3After>& block, T* tiles,
                                                   Mamba3ChunkValues* values, int thread) {
    using Tiles = Mamba3WarpgroupTiles<kStates, kPass>;
    using Block = Mamba3Block<kPass == kMamba3After>;
    Turner turner(p, launch, block, thread);
    Mamba3XCopies<T, kPass == kMamba3After> x(p, launch, block, thread);
    const float* chunk_values = mamba3_values(launch.chunks, p.nheads, block.slot, block.head, kMamba3High);
    if (block.chunks > 0) {
        turner.begin();
    }
    for (int i = 0; i < block.chunks; ++i) {
        T* const x_tile = tiles + Tiles::kXAt + i % 2 * kMamba3XTile;
        T* const qk_tile = tiles + i % 2 * Tiles::kQK;
        x.begin(x_tile, kPass == kMamba3After ? launch.backward.dy_stride : p.v_len_stride);
        // A thread's row has its first three values, or the other three.
        constexpr int kHalf = kMamba3Start / 2;
        const int row = thread % kMamba3ChunkRows;
        const bool first_half = thread < kMamba3ChunkRows;
        const int pitch = 1 << launch.steps_log2;
        float own[kHalf], carry = 0.0f;
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
            own[j] = chunk_values[(j + (first_half ? 0 : kHalf)) * pitch + (row >> launch.ranks_log2)];
        }
        if (thread == 0) {
            carry = chunk_values[kMamba3Entering * pitch + pitch - 1];
        }
        turner.turn_chunk(qk_tile, i + 1 < block.chunks);
        Mamba3ChunkValues& to = values[i % 2];
        if (first_half) {
            to.high[row] = own[kMamba3High];
            to.low[row] = own[kMamba3Low];
            to.gamma[row] = own[kMamba3Gamma];
        } else {
            const float scale = own[kMamba3Scale - kHalf], leaving = own[kMamba3Leaving - kHalf];
            to.scale[row] = scale;
            const float entering = own[kMamba3Entering - kHalf];
            to.entering[row] = entering;
            // A NaN stays there.
            to.adding[row] = kPass == kMamba3After ? entering : leaving != 0.0f ? leaving * scale : 0.0f;
        }
        if (thread == 0) {
            to.carry[0] = carry;
        }
        chunk_values += Block::kDirection * launch.values_step;
        x.finish(x_tile);
        show_to_warpgroup();
        __syncthreads();  // the chunk's tiles are there, those of the one before are free
    }
}

template <typename T, int kStates, bool kPairwise, Mamba3Pass kPass>
__device__ __forceinline__ void make_mamba3_tiles(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                  const Mamba3Block<kPass == kMamba3After>& block, T* tiles,
                                                  Mamba3ChunkValues* values, int thread) {
    if constexpr (kPairwise) {
        turn_mamba3_chunks<Mamba3PairTurner<T, kStates, kPass>, T, kStates, kPass>(p, launch, block, tiles, values, thread);
    } else if (launch.ranks == Mamba3RanksTurner<T, kStates, kPass>::kRanks) {
        turn_mamba3_chunks<Mamba3RanksTurner<T, kStates, kPass>, T, kStates, kPass>(p, launch, block, tiles, values, thread);
    } else {
        turn_mamba3_chunks<Mamba3HalvesTurner<T, kStates, kPass>, T, kStates, kPass>(p, launch, block, tiles, values, thread);
    }
}

#endif

}  // namespace mamba
