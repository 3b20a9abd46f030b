// A block of backward_warpgroup.cuh: its shared memory, its chunk and items, and what comes from memory.
#pragma once

#include "mamba3/cuda/backward_tile.cuh"
#include "ssd/cuda/backward_warpgroup_tile.cuh"

namespace mamba {

constexpr int kMamba3BackwardThreads = 512;
constexpr int kMamba3WarpgroupWarps = kMamba3BackwardThreads / 32;

// Columns of a tile of 128 are two blocks of 64, and so 32 pairs, a lane each.
template <typename T>
struct Mamba3WarpgroupShared {
    using Sums = Mamba3ChunkSums<Mamba3BackwardLayouts<__half>::Middle>;
    static constexpr int kRows = kWarpgroupSteps;
    static constexpr int kStates = kMamba3WarpgroupStates;
    static constexpr int kInner = kForwardRows;
    static constexpr int kBlock = kRows * 64;  // elements
    static constexpr int kWarps = kMamba3WarpgroupWarps;
    static constexpr int kWarpRows = kMamba3WarpgroupRows;  // whose turns are a warp's: a part of the chunk
    static constexpr int kDxPitch = kInner + 8;

    struct Item {
        T state[2 * kBlock];  // in the end, with dstate: what angles get of q, and of k; see dturn_at
        T dstate[2 * kBlock];
        T x[kBlock];  // with dy: sums of a warp's rows of dq and dk, (2, 4 warps, R, kStates) floats
        T dy[kBlock];
    };
    T group_q[2 * kBlock], group_k[2 * kBlock];  // the group's rows
    T q[2 * kBlock], k[2 * kBlock];              // with the head's bias, turned
    T slopes[kBlock];                            // W R by (t, s); with the next two in the end dx as float, and part_later
    T slopes_transposed[kBlock];                 // by (s, t)
    T weights_transposed[kBlock];                // W G
    uint32_t turned[kBlock];                     // cos and sin of steps as two float16, as the columns of q lie
    Item items[2];
    float values[2][kMamba3BackwardArrays * kRows];  // of the item's steps, as prepare.cuh has left them
    ChunkSteps<kRows> steps[2];
    Sums sums[2];
    float bias[2][kMamba3WarpgroupRank][kStates];
    float first_turns[kWarps][64];  // before each warp's rows
    uint64_t barriers[2];           // of the states' copies

    static_assert(kWarpRows * kWarps == kRows, "all rows");
    static_assert(sizeof(Item) % 1024 == 0, "tiles begin at multiples of 1024 bytes");
    static_assert(4 * 2 * 4 * kMamba3WarpgroupRank * kStates <= 2 * kBlock * static_cast<int>(sizeof(T)), "the sums fit");
    static_assert(4 * (kRows * kDxPitch + kWarps * 64) <= 3 * kBlock * static_cast<int>(sizeof(T)), "dx and part_later fit");

    // Of angle 32 block + lane in a row: rows lie shifted, so that neither rows nor lanes share a bank.
    static __device__ __forceinline__ int dturn_at(int row, int block, int lane) {
        return block * (32 * kRows) + row * 32 + (lane + 4 * row) % 32;
    }
    __device__ __forceinline__ float* dturns(int item, int of_k) {
        return reinterpret_cast<float*>(of_k != 0 ? items[item % 2].dstate : items[item % 2].state);
    }
    __device__ __forceinline__ float* bias_parts(int item) { return reinterpret_cast<float*>(items[item % 2].x); }
    __device__ __forceinline__ float* dx() { return reinterpret_cast<float*>(slopes); }
    // What each warp's rows hand to the angles of earlier steps.
    __device__ __forceinline__ float* part_later(int part) { return dx() + kRows * kDxPitch + part * 64; }
};
static_assert(sizeof(Mamba3WarpgroupShared<__half>) <= kMamba3WarpgroupShared, "what the plan counts on");

// A head of the launch's in a group, or 64 rows of its headdim.
struct Mamba3Item {
    int number;  // of the block's
    int slot, tile;
    __device__ __forceinline__ Mamba3Item next(int row_tiles) const {
        const bool last = tile + 1 == row_tiles;
        return {number + 1, last ? slot + 1 : slot, last ? 0 : tile + 1};
    }
    __device__ __forceinline__ int row0() const { return tile * kForwardRows; }
};

// A block's chunk, and where its threads stand.
template <typename T>
struct Mamba3Walk {
    using Shared = Mamba3WarpgroupShared<T>;
    using Tile = SwizzledTile<Shared::kRows>;
    static constexpr int kRows = Shared::kRows;
    static constexpr int kWarpRows = Shared::kWarpRows;

    const MambaMamba3Backward& q;
    const Mamba3BackwardLaunch& launch;
    Shared& shared;
    int thread, lane, warp;
    int64_t split, group, slot;
    Mamba3Chunk chunk;
    int rank, rank_log2, rows, dstate, angles, row_tiles;
    int group_head;  // the launch's first head of the group
    int count;       // of items
    Mamba3Item first;
    // Where the thread's pieces are, of dy and v of the chunk's rows in the launch's first head.
    const T *dy_piece, *v_piece;
    int piece_row, piece_column;

    __device__ __forceinline__ Mamba3Walk(const MambaMamba3Backward& q_, const Mamba3BackwardLaunch& launch_, Shared& shared_)
        : q(q_), launch(launch_), shared(shared_) {
        const MambaMamba3& p = q.forward;
        thread = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.x) % 32);
        lane = thread % 32;
        warp = thread / 32;
        int64_t block = blockIdx.x;
        split = block % launch.plan.splits;
        block /= launch.plan.splits;
        group = block % p.ngroups;
        slot = block / p.ngroups;
        chunk = find_chunk(p, launch.chunks, slot);
        rank = static_cast<int>(p.rank);
        rank_log2 = rank == 4 ? 2 : rank - 1;
        rows = chunk.steps * rank;
        dstate = static_cast<int>(p.dstate);
        angles = static_cast<int>(p.nangles);
        row_tiles = static_cast<int>(launch.plan.row_tiles);
        group_head = static_cast<int>(group * (p.nheads / p.ngroups) + launch.first_head);
        const int64_t items = launch.group_heads * row_tiles;
        const int begin = static_cast<int>(items * split / launch.plan.splits);
        count = static_cast<int>(items * (split + 1) / launch.plan.splits) - begin;
        first = {0, begin / row_tiles, begin % row_tiles};
        static_assert(kMamba3BackwardThreads == kRows * Shared::kInner / 8, "a piece each");
        piece_row = thread / 8;
        piece_column = thread % 8 * 8;
        int64_t dy_stride;
        const T* const dy = dy_rows<T>(p, launch, chunk, group * launch.group_heads, &dy_stride);
        const int row = piece_row < rows ? piece_row : 0;  // the first one exists
        dy_piece = dy + row * dy_stride + piece_column;
        v_piece = static_cast<const T*>(p.v) + chunk.row * p.v_batch_stride +
                  (chunk.first + (row >> rank_log2)) * p.v_len_stride + group_head * p.v_head_stride + piece_column;
    }

    __device__ __forceinline__ int64_t head(const Mamba3Item& item) const { return group_head + item.slot; }
    __device__ __forceinline__ int64_t launch_head(const Mamba3Item& item) const {
        return group * launch.group_heads + item.slot;
    }
    // Of headdim, from an item's first one on; may be more than kInner.
    __device__ __forceinline__ int columns(const Mamba3Item& item) const {
        return static_cast<int>(q.forward.headdim) - item.row0();
    }
    // Whether a row is its step's first one.
    __device__ __forceinline__ bool begins_step(int row) const { return (row & (rank - 1)) == 0; }
    // The group's rows of q and k, in the order of columns.
    __device__ __forceinline__ void load_group() const {
        const MambaMamba3& p = q.forward;
        const TurnSource<T> sources[2] = {q_source<T>(p, launch, chunk, 0, group, shared.group_q),
                                          k_source<T>(p, launch, chunk, 0, group, shared.group_k)};
#pragma unroll 4
        for (int i = thread; i < kRows * 64; i += kMamba3BackwardThreads) {
            const int row = i / 64, column = i % 64 * 2;
            const int a = element_of_column(p, column), b = element_of_column(p, column + 1);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const TurnSource<T>& source = sources[m];
                float2 value = make_float2(0.0f, 0.0f);
                if (row < rows && column < dstate) {
                    const T* const from =
                        source.rows + (row >> rank_log2) * source.len_stride + (row & (rank - 1)) * source.rank_stride;
                    if (column + 1 < dstate) {
                        value = load_two<T>(from, a, b, source.pairs);
                    } else {
                        value.x = to_float(from[a]);
                    }
                }
                store_pair<T>(source.tile + Tile::at(row, column), value.x, value.y);
            }
        }
    }

    // Whether rows of x are v as it is.
    __device__ __forceinline__ bool plain_x() const { return rank == 1 && q.forward.mimo_v == nullptr; }
    __device__ __forceinline__ const T* chunk_v(const Mamba3Item& item) const {
        const MambaMamba3& p = q.forward;
        return static_cast<const T*>(p.v) + chunk.row * p.v_batch_stride + chunk.first * p.v_len_stride +
               head(item) * p.v_head_stride + item.row0();
    }

    // Of the chunk's first step, (steps, S): heads share them.
    __device__ __forceinline__ const float* chunk_speeds() const {
        return launch.chunks.speeds + mamba3_speeds_index(q.forward, chunk.row, chunk.first, 0);
    }

    // Starts to copy an item's tiles, all but x that is projected. What has used their places must have been shown.
    __device__ __forceinline__ void begin_copies(const Mamba3Item& item) const {
        typename Shared::Item& to = shared.items[item.number % 2];
        const bool exists = piece_row < rows && piece_column < columns(item);
        const int at = Tile::at(piece_row, piece_column);
        const int column0 = exists ? item.row0() : 0;
        copy_async<16>(to.dy + at, opaque(dy_piece) + (item.slot * q.forward.headdim + column0), exists);
        if (plain_x()) {
            copy_async<16>(to.x + at, opaque(v_piece) + (item.slot * q.forward.v_head_stride + column0), exists);
        }
        if (thread == 0) {
            constexpr int kSize = Shared::kInner * Shared::kStates, kBytes = kSize * static_cast<int>(sizeof(T));
            const int64_t index =
                ((slot * launch.group_heads * q.forward.ngroups + launch_head(item)) * row_tiles + item.tile) * kSize;
            uint64_t* const barrier = &shared.barriers[item.number % 2];
            expect_copies(barrier, 2 * kBytes);
            copy_bulk(to.state, launch.at<const T>(launch.plan.workspace.states) + index, kBytes, barrier);
            copy_bulk(to.dstate, launch.at<const T>(launch.plan.workspace.dstates) + index, kBytes, barrier);
        }
    }
    __device__ __forceinline__ void wait_for_states(const Mamba3Item& item) const {
        wait_for_round(&shared.barriers[item.number % 2], static_cast<uint32_t>(item.number / 2 % 2));
    }

    // The values of its steps.
    __device__ __forceinline__ void begin_values(const Mamba3Item& item) const {
        const Mamba3Chunks& chunks = launch.chunks;
        if (4 * thread < kMamba3BackwardArrays * chunks.pitch) {
            copy_async<16>(shared.values[item.number % 2] + 4 * thread,
                           mamba3_values(chunks, q.forward.nheads, slot, head(item), kMamba3High) + 4 * thread, true);
        }
    }

    // x = mimo_v v.
    __device__ __forceinline__ void project_x(const Mamba3Item& item) const {
        const MambaMamba3& p = q.forward;
        const bool exists = piece_row < rows && piece_column < columns(item);
        uint4 piece = make_uint4(0u, 0u, 0u, 0u);
        if (exists) {
            piece = *reinterpret_cast<const uint4*>(v_piece + (item.slot * p.v_head_stride + item.row0()));
            if (p.mimo_v != nullptr) {
                const float* const from =
                    p.mimo_v + (head(item) * rank + (piece_row & (rank - 1))) * p.headdim + item.row0() + piece_column;
                const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
                const auto times = [](uint32_t word, float first, float second) {
                    const float2 value = unpack2<T>(word);
                    return pack2<T>(value.x * first, value.y * second);
                };
                piece = make_uint4(times(piece.x, low.x, low.y), times(piece.y, low.z, low.w), times(piece.z, high.x, high.y),
                                   times(piece.w, high.z, high.w));
            }
        }
        *reinterpret_cast<uint4*>(shared.items[item.number % 2].x + Tile::at(piece_row, piece_column)) = piece;
    }

    // What an item needs beside its copies: weights of steps, biases, and the turns before each warp's rows.
    __device__ __forceinline__ void prepare(const Mamba3Item& item) const {
        const MambaMamba3& p = q.forward;
        const int64_t own_head = head(item);
        float biases[2];  // a thread's, of which there are two with a rank of 4
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int place = thread + i * kMamba3BackwardThreads, column = place % Shared::kStates;
            const int r = place / Shared::kStates & (rank - 1), m = place / Shared::kStates >> rank_log2;
            const float* const bias = (m == 0 ? p.q_bias : p.k_bias) + (own_head * rank + r) * dstate;
            biases[i] = m < 2 && column < dstate ? bias[element_of_column(p, column)] : 0.0f;
        }
        const float* const values = shared.values[item.number % 2];
        const Mamba3Chunks& chunks = launch.chunks;
        const uint32_t* const turns = chunks.turns + mamba3_turns_index(p, slot, own_head);
        const uint32_t* const part_turns = chunks.part_turns + mamba3_part_turns_index(p, chunks, slot, warp, own_head);
#pragma unroll 1
        for (int angle = lane; angle < angles; angle += 32) {
            shared.first_turns[warp][angle] = turns_of_count(turns[angle] + part_turns[angle]);
        }
        load_chunk_steps<kRows>(shared.steps[item.number % 2], values, launch.chunks, rank);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int place = thread + i * kMamba3BackwardThreads;
            const int r = place / Shared::kStates & (rank - 1), m = place / Shared::kStates >> rank_log2;
            if (m < 2) {
                shared.bias[m][r][place % Shared::kStates] = biases[i];
            }
        }
        if (!plain_x()) {
            project_x(item);
        }
    }
};

}  // namespace mamba
