// One of the two warpgroups of forward_warpgroup.cuh: it makes the tiles of a chunk, while the other one multiplies those of
// the chunk before. It turns the rows of q and k on their way from memory or in the tiles, and copies those of x.
#pragma once

#include "mamba3/cuda/turn_pairs_warpgroup.cuh"
#include "mamba3/cuda/turn_ranks_warpgroup.cuh"
#include "mamba3/cuda/turn_steps_warpgroup.cuh"
#include "mamba3/cuda/turn_warpgroup.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The rows of x of a chunk: v's, times mimo_v if there is one; or from the end dy's, which has ranks of its own. A thread
// copies the pieces that it multiplies: of v's rows, of which each becomes one of each rank. Of one rank all threads share the
// pointer, so that it takes no registers; of more the compiler needs fewer if each has its own. kRanks: 0 if not known.
template <typename T, int kRanks, bool kFromEnd>
struct Mamba3XCopies {
    using Block = Mamba3Block<kFromEnd>;
    static constexpr bool kOneRank = kRanks == 1;
    static constexpr int kTogether = kMamba3Threads / 8;  // rows
    const MambaMamba3& p;
    const Mamba3WarpgroupLaunch& launch;
    const Block& block;
    const float* mimo_v;  // of the block's first column; of four ranks in shared memory, see place_of_mimo_v
    const T* v;           // of a chunk's first step; of more ranks the thread's columns
    int first;            // of one rank: elements to the thread's first piece
    int thread;
    int left;  // rows of v in the chunk, or more

    __device__ __forceinline__ Mamba3XCopies(const MambaMamba3& params, const Mamba3WarpgroupLaunch& launched,
                                             const Block& own_block, const float* shared_mimo_v, int own_thread)
        : p(params), launch(launched), block(own_block), mimo_v(shared_mimo_v), first(0), thread(own_thread) {
        const int64_t first_step = block.first_step(launch.chunks);
        const int64_t steps = block.range.begin + block.range.seqlen - first_step;
        int64_t stride = p.v_len_stride;
        if (kFromEnd) {
            stride = launch.backward.dy_stride;
            left = static_cast<int>(steps * p.rank);
            v = static_cast<const T*>(launch.backward.dy) + (block.range.row * p.seqlen + first_step) * p.rank * stride +
                block.launch_head * p.headdim;
        } else {
            left = static_cast<int>(steps);
            v = static_cast<const T*>(p.v) + block.range.row * p.v_batch_stride + first_step * stride +
                block.head * p.v_head_stride;
            if (kRanks != kMamba3RanksInShared) {
                mimo_v = p.mimo_v + block.head * p.rank * p.headdim + block.row0;
            }
        }
        v += block.row0;
        const int column = thread % 8 * 8;
        if (kOneRank) {
            first = opaque(thread / 8 * static_cast<int>(stride) + column);
        } else {
            v += column < block.columns ? column : 0;
        }
    }
    // Rows of the tile for one of v; those that exist.
    __device__ __forceinline__ int rows_log2() const { return kFromEnd || kOneRank ? 0 : kRanks == 4 ? 2 : launch.ranks_log2; }
    __device__ __forceinline__ int rows() const { return kFromEnd || kOneRank ? 1 : kRanks > 0 ? kRanks : launch.ranks; }
    // Begins to copy a chunk's rows.
    __device__ __forceinline__ void begin(T* tile, int64_t stride) {
        const int own_thread = kOneRank ? thread : opaque(thread);  // else the compiler would keep what follows from it
        const int row = own_thread / 8, column = own_thread % 8 * 8, steps = kMamba3ChunkRows >> rows_log2();
        const bool exists = column < block.columns;
        const T* from = kOneRank ? v + opaque(first) : opaque(v);
#pragma unroll
        for (int i = 0; i < kMamba3ChunkRows; i += kTogether) {
            const int own = row + i;
            const bool valid = exists && own < left;
            if constexpr (kOneRank) {
                from = opaque(from);
                cp_async<16>(tile + Mamba3XTile::at(row, column) + i * 64, from, valid);
                from += kTogether * stride;
            } else if (own < steps) {
                cp_async<16>(tile + Mamba3XTile::at(own << rows_log2(), column), valid ? from + own * stride : from, valid);
            }
        }
        if (kFromEnd) {
            v -= steps * stride;
            left = kMamba3ChunkRows;  // all chunks but the last are full
        } else {
            v += steps * stride;
            left -= steps;
        }
    }
    // When they have come.
    __device__ __forceinline__ void finish(T* tile) const {
        const int own_thread = opaque(thread), column = own_thread % 8 * 8;
        const bool projects = !kFromEnd && p.mimo_v != nullptr;
        if ((rows() == 1 && !projects) || column >= block.columns) {
            return;
        }
        for (int own = own_thread / 8; own < kMamba3ChunkRows >> rows_log2(); own += kTogether) {
            const uint4 words = *reinterpret_cast<const uint4*>(tile + Mamba3XTile::at(own << rows_log2(), column));
            const float2 pairs[4] = {unpack2<T>(words.x), unpack2<T>(words.y), unpack2<T>(words.z), unpack2<T>(words.w)};
#pragma unroll(kRanks > 0 ? kRanks : 1)
            for (int r = 0; r < rows(); ++r) {
                float by[8] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
                if constexpr (kRanks == kMamba3RanksInShared) {
                    const float* const from = mimo_v + r * kMamba3WeightPitch;
                    unpack<float, 4>(packed_load<float, 4>(from + place_of_mimo_v(column)), by);
                    unpack<float, 4>(packed_load<float, 4>(from + place_of_mimo_v(column + 4)), by + 4);
                } else if (projects) {
                    unpack<float, 8>(packed_load<float, 8>(mimo_v + r * p.headdim + column), by);
                }
                const auto times = [&](int j) { return pack2<T>(pairs[j].x * by[2 * j], pairs[j].y * by[2 * j + 1]); };
                *reinterpret_cast<uint4*>(tile + Mamba3XTile::at((own << rows_log2()) + r, column)) =
                    make_uint4(times(0), times(1), times(2), times(3));
            }
        }
    }
};

// All of a block's chunks, one ahead of the other warpgroup. behind_weights: see Mamba3WarpgroupTiles.
template <typename T, int kStates, bool kPairwise, Mamba3Pass kPass, typename Turner>
__device__ __forceinline__ void turn_mamba3_chunks(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                   const Mamba3Block<kPass == kMamba3After>& block, T* tiles,
                                                   Mamba3ChunkValues* values, float* behind_weights, Turner& turner,
                                                   int thread) {
    using Tiles = Mamba3WarpgroupTiles<kStates, kPass>;
    using Block = Mamba3Block<kPass == kMamba3After>;
    constexpr bool kFromEnd = kPass == kMamba3After;
    Mamba3XCopies<T, Turner::kRanks, kFromEnd> x(p, launch, block, behind_weights, thread);
    // A row's two threads copy three values each: the first ones, and the others. A warp has 16 rows.
    constexpr int kHalf = kMamba3RowValues / 2;
    const int row = thread / 2, first_value = thread % 2 * kHalf;
    const int pitch = kPairwise ? kMamba3ChunkRows : 1 << launch.steps_log2;
    const float* chunk_values = mamba3_values(launch.chunks, p.nheads, block.slot, block.head, kMamba3High);
    const int own_value = opaque(first_value * pitch + (kPairwise ? row : row >> launch.ranks_log2));
    if (block.chunks > 0) {
        turner.begin();
    }
    for (int i = 0; i < block.chunks; ++i) {
        T* const x_tile = tiles + Tiles::kXAt + i % 2 * kMamba3XTile;
        float* const own = values[i % 2].of[first_value] + row;
        turner.turn_chunk(tiles + i % 2 * Tiles::kQK, i + 1 < block.chunks, [&] {
            x.begin(x_tile, kFromEnd ? launch.backward.dy_stride : p.v_len_stride);
            const float* const from = chunk_values + opaque(own_value);
#pragma unroll
            for (int j = 0; j < kHalf; ++j) {
                cp_async_4(own + j * kMamba3ChunkRows, from + j * pitch);
            }
        });
        chunk_values += Block::kDirection * launch.values_step;
        if constexpr (!Turner::kAwaitsCopies) {  // else only those of the next chunk's rows are on their way
            cp_async_wait_group<0>();
        }
        const float first = own[0], second = own[kMamba3ChunkRows], third = own[2 * kMamba3ChunkRows];
        static_assert(kMamba3High == 0 && kMamba3Low == 1, "one thread has them");
        static_assert(kMamba3Scale == 3 && kMamba3Entering == 4 && kMamba3Leaving == 5, "the other one has them");
        if (kPairwise && mamba3_finds_rows(kPass)) {
            const float scale = __shfl_down_sync(0xffffffffu, first, 1);
            const float last_high = __shfl_sync(0xffffffffu, first, 30), last_low = __shfl_sync(0xffffffffu, second, 30);
            if (first_value == 0) {
                behind_weights[i % 2 * kMamba3ChunkRows + row] = exp2_fast((last_high - first) + (last_low - second)) * scale;
            }
        }
        if (first_value > 0) {  // a NaN stays there
            own[2 * kMamba3ChunkRows] = kFromEnd ? second : third != 0.0f ? third * first : 0.0f;
        }
        x.finish(x_tile);
        fence_proxy_async();
        __syncthreads();  // the chunk's tiles are there, those of the one before are free
    }
}

template <typename T, int kStates, bool kPairwise, Mamba3Pass kPass>
__device__ __forceinline__ void make_mamba3_tiles(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                  const Mamba3Block<kPass == kMamba3After>& block, T* tiles,
                                                  Mamba3ChunkValues* values, const float* biases, float* behind_weights,
                                                  unsigned char* steps, int thread) {
    const auto turn_chunks = [&](auto& turner) {
        turn_mamba3_chunks<T, kStates, kPairwise, kPass>(p, launch, block, tiles, values, behind_weights, turner, thread);
    };
    if constexpr (kPairwise) {
        Mamba3PairTurner<T, kStates, kPass> turner(p, launch, block, biases, thread);
        turn_chunks(turner);
    } else if (kPass == kMamba3After && launch.steps_at != 0) {
        if constexpr (kPass == kMamba3After) {
            Mamba3StepsTurner<T, kPass> turner(p, launch, block, steps, thread);
            turn_chunks(turner);
        }
    } else if (kPass != kMamba3After && launch.ranks == kMamba3RanksInShared && p.nangles <= 32) {
        Mamba3RanksTurner<T, kStates, false, kPass> turner(p, launch, block, thread);
        turn_chunks(turner);
    } else if (launch.ranks == kMamba3RanksInShared) {
        Mamba3RanksTurner<T, kStates, true, kPass> turner(p, launch, block, thread);
        turn_chunks(turner);
    } else {
        Mamba3HalvesTurner<T, kStates, kPass> turner(p, launch, block, thread);
        turn_chunks(turner);
    }
}

#endif

}  // namespace mamba
