// One of the two warpgroups of forward_warpgroup.cuh: it makes the tiles of a chunk, while the other one multiplies those of
// the chunk before. It turns the rows of q and k on their way from memory, and copies those of x.
#pragma once

#include "mamba3/cuda/turn_pairs_warpgroup.cuh"
#include "mamba3/cuda/turn_ranks_warpgroup.cuh"
#include "mamba3/cuda/turn_warpgroup.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The rows of x of a chunk: v's, times mimo_v if there is one; or from the end dy's, which has ranks of its own. A thread
// copies the pieces that it multiplies. Of one rank all threads share the pointer, so that it takes no registers; of more the
// compiler needs fewer if each has its own.
template <typename T, bool kOneRank, bool kFromEnd>
struct Mamba3XCopies {
    using Block = Mamba3Block<kFromEnd>;
    static constexpr int kTogether = kMamba3Threads / 8;  // rows
    const T* v;                                           // of a chunk's first step; of more ranks the thread's columns
    const float* mimo;                                    // of the thread's columns and rank, or NULL
    int first;                                            // of one rank: elements to the thread's first piece
    int row, column;
    int rows_log2;  // rows of the tile for one of v
    int left;       // rows of v in the chunk, or more
    bool exists;    // the columns and the rank

    __device__ __forceinline__ Mamba3XCopies(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch, const Block& block,
                                             int thread)
        : mimo(nullptr), first(0), row(thread / 8), column(thread % 8 * 8) {
        static_assert(kTogether % kMamba3MostRanks == 0, "a thread's rank stays the same");
        const int64_t first_step = block.first_step(launch.chunks);
        const int64_t steps = block.range.begin + block.range.seqlen - first_step;
        int64_t stride = p.v_len_stride;
        if (kFromEnd) {
            stride = launch.backward.dy_stride;
            rows_log2 = 0;
            exists = column < block.columns;
            left = static_cast<int>(steps * p.rank);
            v = static_cast<const T*>(launch.backward.dy) + (block.range.row * p.seqlen + first_step) * p.rank * stride +
                block.launch_head * p.headdim;
        } else {
            rows_log2 = kOneRank ? 0 : launch.ranks_log2;
            const int rank = row % (1 << rows_log2);
            exists = column < block.columns && rank < p.rank;
            left = static_cast<int>(steps);
            v = static_cast<const T*>(p.v) + block.range.row * p.v_batch_stride + first_step * stride +
                block.head * p.v_head_stride;
            if (p.mimo_v != nullptr && exists) {
                mimo = p.mimo_v + (block.head * p.rank + rank) * p.headdim + block.row0 + column;
            }
        }
        v += block.row0;
        if (kOneRank) {
            first = opaque(row * static_cast<int>(stride) + column);
        } else {
            v += exists ? column : 0;
        }
    }
    // Begins to copy a chunk's rows.
    __device__ __forceinline__ void begin(T* tile, int64_t stride) {
        const T* from = kOneRank ? v + opaque(first) : opaque(v);
        T* const to = tile + Mamba3XTile::at(row, column);
#pragma unroll
        for (int i = 0; i < kMamba3ChunkRows; i += kTogether) {
            const int own = (row + i) >> rows_log2;
            const bool valid = exists && own < left;
            if constexpr (kOneRank) {
                from = opaque(from);
                copy_async<16>(to + i * 64, from, valid);
                from += kTogether * stride;
            } else {
                copy_async<16>(to + i * 64, valid ? from + own * stride : from, valid);
            }
        }
        const int rows = kMamba3ChunkRows >> rows_log2;
        if (kFromEnd) {
            v -= rows * stride;
            left = kMamba3ChunkRows;  // all chunks but the last are full
        } else {
            v += rows * stride;
            left -= rows;
        }
    }
    // When they have come.
    __device__ __forceinline__ void finish(T* tile) const {
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
template <typename T, int kStates, bool kPairwise, Mamba3Pass kPass, typename Turner>
__device__ __forceinline__ void turn_mamba3_chunks(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                   const Mamba3Block<kPass == kMamba3After>& block, T* tiles,
                                                   Mamba3ChunkValues* values, Turner& turner, int thread) {
    using Tiles = Mamba3WarpgroupTiles<kStates, kPass>;
    using Block = Mamba3Block<kPass == kMamba3After>;
    constexpr bool kFromEnd = kPass == kMamba3After;
    Mamba3XCopies<T, kPairwise, kFromEnd> x(p, launch, block, thread);
    // A thread copies three values of its row: the first ones, or the others.
    constexpr int kHalf = kMamba3RowValues / 2;
    const int row = thread % kMamba3ChunkRows, first_value = thread < kMamba3ChunkRows ? 0 : kHalf;
    const int pitch = kPairwise ? kMamba3ChunkRows : 1 << launch.steps_log2;
    const float* chunk_values = mamba3_values(launch.chunks, p.nheads, block.slot, block.head, kMamba3High);
    const int own_value = opaque(first_value * pitch + (kPairwise ? row : row >> launch.ranks_log2));
    if (block.chunks > 0) {
        turner.begin();
    }
    for (int i = 0; i < block.chunks; ++i) {
        T* const x_tile = tiles + Tiles::kXAt + i % 2 * kMamba3XTile;
        float* const own = values[i % 2].of[first_value] + row;
        x.begin(x_tile, kFromEnd ? launch.backward.dy_stride : p.v_len_stride);
        const float* const from = chunk_values + opaque(own_value);
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
            copy_async_4_bytes(own + j * kMamba3ChunkRows, from + j * pitch);
        }
        end_copies();
        chunk_values += Block::kDirection * launch.values_step;
        turner.turn_chunk(tiles + i % 2 * Tiles::kQK, i + 1 < block.chunks);
        wait_for_copies<0>();
        if (first_value > 0) {
            static_assert(kMamba3Entering == 4 && kMamba3Leaving == 5, "a thread has them and the scale");
            const float scale = own[0], entering = own[kMamba3ChunkRows], leaving = own[2 * kMamba3ChunkRows];
            // A NaN stays there.
            own[2 * kMamba3ChunkRows] = kFromEnd ? entering : leaving != 0.0f ? leaving * scale : 0.0f;
        }
        x.finish(x_tile);
        show_to_warpgroup();
        __syncthreads();  // the chunk's tiles are there, those of the one before are free
    }
}

template <typename T, int kStates, bool kPairwise, Mamba3Pass kPass>
__device__ __forceinline__ void make_mamba3_tiles(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                  const Mamba3Block<kPass == kMamba3After>& block, T* tiles,
                                                  Mamba3ChunkValues* values, const float* biases, int thread) {
    const auto turn_chunks = [&](auto& turner) {
        turn_mamba3_chunks<T, kStates, kPairwise, kPass>(p, launch, block, tiles, values, turner, thread);
    };
    if constexpr (kPairwise) {
        Mamba3PairTurner<T, kStates, kPass> turner(p, launch, block, biases, thread);
        turn_chunks(turner);
    } else if (launch.ranks == Mamba3RanksTurner<T, kStates, kPass>::kRanks) {
        Mamba3RanksTurner<T, kStates, kPass> turner(p, launch, block, thread);
        turn_chunks(turner);
    } else {
        Mamba3HalvesTurner<T, kStates, kPass> turner(p, launch, block, thread);
        turn_chunks(turner);
    }
}

#endif

}  // namespace mamba
