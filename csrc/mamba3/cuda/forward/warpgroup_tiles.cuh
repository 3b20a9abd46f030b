// One of the two warpgroups of forward/warpgroup.cuh: it makes the tiles of a chunk, while the other one multiplies those of
// the chunk before. It rotates the rows of q and k on their way from memory or in the tiles, and copies those of x.
#pragma once

#include "mamba3/cuda/forward/rotate_pairs.cuh"
#include "mamba3/cuda/forward/rotate_steps.cuh"

namespace mamba {

// Weights of 64 columns in shared memory. A rank's eight lanes find theirs in other banks than those of the next rank.
constexpr int kMamba3WeightPitch = kMamba3StateRows + 8;
// There threads read eight columns each, four at a time: neighbours' lie beside each other.
MAMBA_HOST_DEVICE constexpr int place_of_mimo_v(int column) {
    return column % 8 / 4 * (kMamba3StateRows / 2) + column / 8 * 4 + column % 4;
}

// A chunk's tiles: q and k, or k alone.
template <typename T, int kStates, bool kBothSides>
struct Mamba3StageTiles {
    T q[kMamba3ChunkRows * kStates];
    T k[kMamba3ChunkRows * kStates];
};
template <typename T, int kStates>
struct Mamba3StageTiles<T, kStates, false> {
    T k[kMamba3ChunkRows * kStates];
};

// What the warpgroup that rotates needs: of one rank the biases of q and k, of four the weights of v and rows on their way.
template <int kStates, int kRanks>
struct Mamba3RotateShared {
    float biases[2 * kStates];
};
template <int kStates>
struct Mamba3RotateShared<kStates, 4> {
    float mimo_v[4 * kMamba3WeightPitch];
    alignas(16) unsigned char steps[kMamba3Warps * Mamba3StepsShared<1>::kBytes];
};

// What rows need besides. z: the results take its place. near: Mamba3PairWeights.
template <typename T, bool kRows>
struct Mamba3RowsOfBlock {};
template <typename T>
struct Mamba3RowsOfBlock<T, true> {
    T z[kMamba3XTile];
    float norm_weight[kMamba3StateRows];
    float near[2][kMamba3ChunkRows];
};

// Shared memory of a block: two chunks' tiles and x, one of which the warpgroups meet over, the state before a chunk.
template <typename T, int kStates, int kRanks, bool kRows>
struct alignas(1024) Mamba3WalkShared {
    Mamba3StageTiles<T, kStates, kRows> stage[2];
    T x[2][kMamba3XTile];
    T state[kMamba3StateRows * kStates];
    Mamba3RowsOfBlock<T, kRows> rows;
    Mamba3ChunkValues values[2];
    Mamba3RotateShared<kStates, kRanks> rotate;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The rows of x of a chunk. Of one rank these are v's; of four, forward, v's times mimo_v, from the end those of dy. A thread
// copies the pieces that it multiplies. Of one rank all threads share the pointer, so that it takes no registers; of four the
// compiler needs fewer if each has its own.
template <typename T, int kRanks>
struct Mamba3XCopies {
    static constexpr bool kOneRank = kRanks == 1;
    static constexpr int kTogether = kMamba3Threads / 8;  // rows
    const T* v;                                           // of a chunk's first step; of four ranks the thread's columns
    int first;                                            // of one rank: elements to the thread's first piece
    int thread;
    int left;      // steps of the chunk, or more
    int columns;   // of the block
    bool expands;  // a row of v becomes one of each rank

    __device__ __forceinline__ Mamba3XCopies(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                             const Mamba3Block& block, int own_thread)
        : first(0), thread(own_thread), columns(block.columns), expands(!kOneRank && launch.direction > 0) {
        const int64_t first_step = block.first_step(launch.chunks);
        left = static_cast<int>(block.range.begin + block.range.seqlen - first_step);
        v = static_cast<const T*>(p.v) + block.range.row * p.v_batch_stride + first_step * p.v_len_stride +
            (launch.direction > 0 ? block.head : block.launch_head) * p.v_head_stride + block.row0;
        const int column = thread % 8 * 8;
        if (kOneRank) {
            first = opaque(thread / 8 * static_cast<int>(p.v_len_stride) + column);
        } else {
            v += column < columns ? column : 0;
        }
    }
    // Begins to copy a chunk's rows.
    __device__ __forceinline__ void begin(T* tile, const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch) {
        const int own_thread = kOneRank ? thread : opaque(thread);  // else the compiler would keep what follows from it
        const int row = own_thread / 8, column = own_thread % 8 * 8;
        const bool exists = column < columns;
        const T* from = kOneRank ? v + opaque(first) : opaque(v);
        if (kOneRank) {
#pragma unroll
            for (int i = 0; i < kMamba3ChunkRows; i += kTogether) {
                from = opaque(from);
                cp_async<16>(tile + Mamba3XTile::at(row, column) + i * 64, from, exists && row + i < left);
                from += kTogether * p.v_len_stride;
            }
        } else if (expands) {
            static_assert(kMamba3ChunkRows / 4 == kTogether, "a step a thread");
            const bool valid = exists && row < left;
            cp_async<16>(tile + Mamba3XTile::at(4 * row, column), valid ? from + row * p.v_len_stride : from, valid);
        } else {
#pragma unroll
            for (int i = 0; i < kMamba3ChunkRows; i += kTogether) {
                const bool valid = exists && row + i < kRanks * left;
                cp_async<16>(tile + Mamba3XTile::at(row + i, column),
                             valid ? from + (row + i) * launch.backward.dy_stride : from, valid);
            }
        }
        const int steps = launch.direction * (kMamba3ChunkRows / kRanks);
        v += steps * p.v_len_stride;
        left -= steps;
    }
    // When they have come.
    __device__ __forceinline__ void finish(T* tile, const float* mimo_v) const {
        const int own_thread = opaque(thread), column = own_thread % 8 * 8, own = own_thread / 8;
        if (kOneRank || !expands || column >= columns) {
            return;
        }
        const uint4 words = *reinterpret_cast<const uint4*>(tile + Mamba3XTile::at(4 * own, column));
        const float2 pairs[4] = {unpack2<T>(words.x), unpack2<T>(words.y), unpack2<T>(words.z), unpack2<T>(words.w)};
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            const float* const from = mimo_v + r * kMamba3WeightPitch;
            const float4 weights[2] = {*reinterpret_cast<const float4*>(from + place_of_mimo_v(column)),
                                       *reinterpret_cast<const float4*>(from + place_of_mimo_v(column + 4))};
            *reinterpret_cast<uint4*>(tile + Mamba3XTile::at(4 * own + r, column)) =
                make_uint4(pack2<T>(pairs[0].x * weights[0].x, pairs[0].y * weights[0].y),
                           pack2<T>(pairs[1].x * weights[0].z, pairs[1].y * weights[0].w),
                           pack2<T>(pairs[2].x * weights[1].x, pairs[2].y * weights[1].y),
                           pack2<T>(pairs[3].x * weights[1].z, pairs[3].y * weights[1].w));
        }
    }
};

// A row's two threads copy three values each: the first ones, and the others. A warp has 16 rows.
template <int kRanks>
struct Mamba3ValueCopies {
    static constexpr int kHalf = kMamba3RowValues / 2;
    static constexpr int kPitch = kMamba3ChunkRows / kRanks;
    int row, first_value, own_value;
    const float* from;  // of the chunk

    __device__ __forceinline__ Mamba3ValueCopies(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                 const Mamba3Block& block, int thread)
        : row(thread / 2),
          first_value(thread % 2 * kHalf),
          own_value(opaque(first_value * kPitch + row / kRanks)),
          from(mamba3_values(launch.chunks, p.nheads, block.slot, block.head, kMamba3High)) {}
    __device__ __forceinline__ float* own(Mamba3ChunkValues& values) const { return values.of[first_value] + row; }
    __device__ __forceinline__ void begin(Mamba3ChunkValues& values) const {
        const float* const first = from + opaque(own_value);
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
            cp_async_4(own(values) + j * kMamba3ChunkRows, first + j * kPitch);
        }
    }
    // When they have come: kMamba3Adding; and with rows the decay of each to the last one of its 16, times scale, to near.
    template <bool kRows>
    __device__ __forceinline__ void finish(Mamba3ChunkValues& values, float* near, bool from_end) const {
        static_assert(kMamba3High == 0 && kMamba3Low == 1, "one thread has them");
        static_assert(kMamba3Scale == 3 && kMamba3Entering == 4 && kMamba3Leaving == 5, "the other one has them");
        float* const at = own(values);
        const float first = at[0], second = at[kMamba3ChunkRows], third = at[2 * kMamba3ChunkRows];
        if constexpr (kRows) {
            const float scale = __shfl_down_sync(0xffffffffu, first, 1);
            const float last_high = __shfl_sync(0xffffffffu, first, 30), last_low = __shfl_sync(0xffffffffu, second, 30);
            if (first_value == 0) {
                near[row] = exp2_fast((last_high - first) + (last_low - second)) * scale;
            }
        }
        if (first_value > 0) {  // a NaN stays there
            at[2 * kMamba3ChunkRows] = from_end ? second : third != 0.0f ? third * first : 0.0f;
        }
    }
};

// All of a block's chunks, one ahead of the other warpgroup.
template <typename T, int kStates, int kRanks, bool kRows, typename Rotator>
__device__ __forceinline__ void rotate_mamba3_chunks(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                     const Mamba3Block& block,
                                                     Mamba3WalkShared<T, kStates, kRanks, kRows>& shared, Rotator& rotator,
                                                     int thread) {
    Mamba3XCopies<T, kRanks> x(p, launch, block, thread);
    Mamba3ValueCopies<kRanks> values(p, launch, block, thread);
    if (block.chunks > 0) {
        rotator.begin();
    }
    for (int i = 0; i < block.chunks; ++i) {
        T* const x_tile = shared.x[i % 2];
        rotator.turn_chunk(reinterpret_cast<T*>(&shared.stage[i % 2]), i + 1 < block.chunks, [&] {
            if (kRanks == 4 || launch.direction > 0) {  // else the other warpgroup makes them
                x.begin(x_tile, p, launch);
            }
            values.begin(shared.values[i % 2]);
        });
        values.from += launch.direction * launch.values_step;
        if constexpr (!Rotator::kAwaitsCopies) {  // else only those of the next chunk's rows are on their way
            cp_async_wait_group<0>();
        }
        if constexpr (kRows) {
            values.template finish<true>(shared.values[i % 2], shared.rows.near[i % 2], false);
        } else {
            values.template finish<false>(shared.values[i % 2], nullptr, launch.direction < 0);
        }
        if constexpr (kRanks == 4) {
            x.finish(x_tile, shared.rotate.mimo_v);
        }
        fence_proxy_async();
        __syncthreads();  // the chunk's tiles are there, those of the one before are free
    }
}

template <typename T, int kStates, int kRanks, bool kRows>
__device__ __forceinline__ void make_mamba3_tiles(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                  const Mamba3Block& block, Mamba3WalkShared<T, kStates, kRanks, kRows>& shared,
                                                  int thread) {
    if constexpr (kRanks == 1) {
        Mamba3PairRotator<T, kStates, kRows> rotator(p, launch, block, shared.rotate.biases, thread);
        rotate_mamba3_chunks(p, launch, block, shared, rotator, thread);
    } else {
        static_assert(kStates == kMamba3RankStates && !kRows, "forward/mimo.cuh finds their rows");
        Mamba3StepRotator<T, false> rotator(p, launch, block, shared.rotate.steps, thread);
        rotate_mamba3_chunks(p, launch, block, shared, rotator, thread);
    }
}

#endif

}  // namespace mamba
