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
    static constexpr int kStates = 128;
    static constexpr int kInner = kForwardRows;
    static constexpr int kBlock = kRows * 64;  // elements
    static constexpr int kWarps = kMamba3WarpgroupWarps;
    static constexpr int kWarpRows = kRows / kWarps;  // rows whose turns are a warp's
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
    uint32_t first_turn[64];          // before the chunk
    uint32_t part_turns[kWarps][64];  // what each warp's steps turn, from their last restart on
    int part_restarts[2][kWarps];

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

    // Starts to copy an item's tiles, all but x that is projected.
    __device__ __forceinline__ void begin_copies(const Mamba3Item& item) const {
        constexpr int kThreads = kMamba3BackwardThreads;
        const MambaMamba3& p = q.forward;
        typename Shared::Item& to = shared.items[item.number % 2];
        const int width = columns(item);
        const int state_rows = width < Shared::kInner ? width : Shared::kInner;
        int64_t dy_stride;
        const T* const dy = dy_rows<T>(p, launch, chunk, launch_head(item), &dy_stride) + item.row0();
        load_swizzled<T, kThreads>(to.dy, first_piece(dy, dy_stride, thread), dy_stride, rows, width, launch.dy_vectors != 0,
                                   thread);
        if (plain_x()) {
            load_swizzled<T, kThreads>(to.x, first_piece(chunk_v(item), p.v_len_stride, thread), p.v_len_stride, rows, width,
                                       launch.v_vectors != 0, thread);
        }
        const int64_t at = ((slot * launch.group_heads * p.ngroups + launch_head(item)) * p.headdim + item.row0()) * p.dstate;
        const T* const states = first_piece(launch.at<const T>(launch.plan.workspace.states) + at, p.dstate, thread);
        const T* const dstates = first_piece(launch.at<const T>(launch.plan.workspace.dstates) + at, p.dstate, thread);
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            const int left = dstate - 64 * block;
            load_swizzled<T, kThreads>(to.state + block * Shared::kBlock, states + 64 * block, p.dstate, state_rows, left,
                                       launch.state_vectors != 0, thread);
            load_swizzled<T, kThreads>(to.dstate + block * Shared::kBlock, dstates + 64 * block, p.dstate, state_rows, left,
                                       launch.state_vectors != 0, thread);
        }
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
        const int row = thread / 8, column = thread % 8 * 8;
        const int left = row < rows ? columns(item) - column : 0;
        const uint4 piece =
            load_piece(chunk_v(item) + (row >> rank_log2) * p.v_len_stride + column, left, launch.v_vectors != 0);
        const float* const weights =
            p.mimo_v != nullptr ? p.mimo_v + (head(item) * rank + (row & (rank - 1))) * p.headdim + item.row0() + column
                                : nullptr;
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
        uint32_t results[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 value = unpack2<T>(words[i]);
            if (weights != nullptr) {
                value.x *= 2 * i < left ? weights[2 * i] : 0.0f;
                value.y *= 2 * i + 1 < left ? weights[2 * i + 1] : 0.0f;
            }
            results[i] = pack2<T>(value.x, value.y);
        }
        *reinterpret_cast<uint4*>(shared.items[item.number % 2].x + Tile::at(row, column)) =
            make_uint4(results[0], results[1], results[2], results[3]);
    }

    // What an item needs beside its copies: weights of steps, biases, and what each warp's steps turn.
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
        const float* const dt = values + kMamba3Dt * launch.chunks.pitch;
        const float* const start = values + kMamba3Start * launch.chunks.pitch;
        const float* const speeds = chunk_speeds();
        bool restarts = false;
#pragma unroll 1
        for (int angle = lane; angle < round_up(angles, 32); angle += 32) {
            float speed[kWarpRows], step_dt[kWarpRows];
            bool starts[kWarpRows];
#pragma unroll
            for (int i = 0; i < kWarpRows; ++i) {  // all loads are on their way before the first is used
                const int row = kWarpRows * warp + i, t = row >> rank_log2;
                const bool counts = begins_step(row) && row < rows;
                speed[i] = counts && angle < angles ? speeds[t * angles + angle] : 0.0f;
                step_dt[i] = counts ? dt[t] : 0.0f;
                starts[i] = counts && __float_as_int(start[t]) == t;
            }
            uint32_t sum = 0;
#pragma unroll
            for (int i = 0; i < kWarpRows; ++i) {
                restarts = restarts || starts[i];
                sum = (starts[i] ? 0u : sum) + count_of_turns(turn_of_step(speed[i], step_dt[i]));
            }
            shared.part_turns[warp][angle] = sum;
            if (warp == 0) {
                const uint32_t* const turns = launch.chunks.turns + (slot * p.nheads + own_head) * angles;
                shared.first_turn[angle] = angle < angles ? turns[angle] : 0u;
            }
        }
        if (lane == 0) {
            shared.part_restarts[item.number % 2][warp] = restarts ? 1 : 0;
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
