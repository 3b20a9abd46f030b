// A block of backward_warpgroup.cuh: its shared memory, its chunk and items, and what comes from memory.
#pragma once

#include "mamba3/cuda/backward/pairs.cuh"
#include "ssd/cuda/backward_warpgroup_tile.cuh"

namespace mamba {

constexpr int kMamba3BackwardThreads = 512;
constexpr int kMamba3WarpgroupRank = 4;                        // at most
using Mamba3WarpgroupSums = Mamba3BackwardTiles<128, 64, 64>;  // whose sums of steps these are
constexpr int kMamba3WarpgroupWarps = kMamba3BackwardThreads / 32;

// Where a block's chunk lies in tensors and workspace: of the launch's first head in the group, of its first step. In shared
// memory, since registers are few, and what the compiler puts into local memory is as far as the L2: shared memory leaves the
// L1 no room.
template <typename T>
struct Mamba3ChunkPlaces {
    const float *speeds, *values, *q_bias, *k_bias;
    const uint32_t *turns, *part_turns;
    const T *states, *dstates, *v, *dy;
    T *dv, *dz;  // SISO's dz: what y is to be multiplied with is there
    float4* terms;
    float *dturns, *angle_totals, *bias, *mimo_v, *D;
    const float *dfinal_k, *dfinal_v;  // NULL unless the chunk is its sequence's last one
    int steps, rows;                   // that exist
    int slot, group_head;              // group_head: the head
    int64_t dy_stride, part_turns_stride, bias_stride;
    int dturns_pitch, dturns_stride;  // to the next step, head
};

// Columns of a tile of 128 are two blocks of 64, and so 32 pairs, a lane each.
template <typename T>
struct Mamba3WarpgroupShared {
    using Sums = Mamba3ChunkSums<Mamba3WarpgroupSums>;
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
    T slopes[kBlock];                            // W R by (t, s); with what follows in the end dx as float
    T weights_transposed[kBlock];                // W G by (s, t)
    T behind_dx[kBlock / 4];
    T dz[kBlock];             // SISO: what times y is dz
    uint32_t turned[kBlock];  // cos and sin of steps as two float16, as the columns of q lie
    Item items[2];
    float values[2][kMamba3BackwardArrays * kRows];  // of the item's steps, as prepare.cuh has left them; see projection
    ChunkSteps<kRows> steps[2];
    Sums sums[2];
    float bias[2][kMamba3WarpgroupRank][kStates];  // in the order of memory, zero behind dstate
    struct Pairs {  // of rows in a block of 16: decays from the row before the block, and to its last row, also times scale
        float head[kRows], tail[kRows], scaled_tail[kRows];
    } pairs;
    float turn_parts[kWarps / 2][64];  // of dturns, each eight rows' sums
    float D[2][kRows];                 // SISO's dy . x
    uint64_t barriers[2];              // of bulk copies
    Mamba3ChunkPlaces<T> places;

    static_assert(kWarpRows * kWarps == kRows, "all rows");
    static_assert(sizeof(Item) % 1024 == 0, "tiles begin at multiples of 1024 bytes");
    static_assert(4 * 2 * 4 * kMamba3WarpgroupRank * kStates <= 2 * kBlock * static_cast<int>(sizeof(T)), "the sums fit");
    static_assert(4 * kRows * kDxPitch <= 9 * kBlock / 4 * static_cast<int>(sizeof(T)), "dx fits");

    // Of angle 32 block + lane in a row: they lie in another order in each of eight rows, so that neither rows nor lanes share
    // a bank. From one of a row's first four angles on, the others' places differ by the bits of their distance.
    static __device__ __forceinline__ int dturn_at(int row, int block, int lane) {
        return block * (32 * kRows) + row * 32 + (lane ^ row % 8 * 4);
    }
    __device__ __forceinline__ float* dturns(int item, int of_k) {
        return reinterpret_cast<float*>(of_k != 0 ? items[item % 2].dstate : items[item % 2].state);
    }
    __device__ __forceinline__ float* bias_parts(int item) { return reinterpret_cast<float*>(items[item % 2].x); }
    __device__ __forceinline__ float* dx() { return reinterpret_cast<float*>(slopes); }
};
static_assert(sizeof(Mamba3WarpgroupShared<__half>) <= kMamba3BackwardSharedWarpgroups, "the table says so");

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

// Where a thread stands. Each phase of an item asks anew: what follows from it is not kept from phase to phase. The masks tell
// the compiler that nothing is negative, the shuffle that a warp's lanes agree.
struct Mamba3Stand {
    int thread, lane, warp;
    __device__ __forceinline__ explicit Mamba3Stand(int of_block)
        : thread(opaque(of_block) & (kMamba3BackwardThreads - 1)),
          lane(thread % 32),
          warp(__shfl_sync(0xffffffffu, thread / 32, 0) & (kMamba3WarpgroupWarps - 1)) {}
};

// A block's chunk and items. kRank: 1 (SISO: pairs are neighbours, no projections), or 4 (MIMO: halves, all projections).
template <typename T, int kRank>
struct Mamba3Walk {
    static constexpr bool kRanks = kRank > 1;
    static constexpr int kRankLog2 = kRank / 2;
    using Shared = Mamba3WarpgroupShared<T>;
    using Places = Mamba3ChunkPlaces<T>;
    using Tile = SwizzledTile<Shared::kRows>;
    static constexpr int kRows = Shared::kRows;
    static constexpr int kWarpRows = Shared::kWarpRows;
    static constexpr int kWarpSteps = kWarpRows / kRank;

    const MambaMamba3Backward& q;
    const Mamba3BackwardLaunch& launch;
    Shared& shared;
    int count;  // of items
    Mamba3Item first;

    __device__ __forceinline__ Mamba3Walk(const MambaMamba3Backward& q_, const Mamba3BackwardLaunch& launch_, Shared& shared_)
        : q(q_), launch(launch_), shared(shared_) {
        const int64_t heads = launch.group_heads, split = blockIdx.x % launch.plan.splits;
        const int begin = static_cast<int>(heads * split / launch.plan.splits);
        count = (static_cast<int>(heads * (split + 1) / launch.plan.splits) - begin) * row_tiles();
        first = {0, begin, 0};
    }

    __device__ __forceinline__ static Mamba3Stand stand() { return Mamba3Stand(static_cast<int>(threadIdx.x)); }
    __device__ __forceinline__ const MambaMamba3& p() const { return q.forward; }
    __device__ __forceinline__ int dstate() const { return static_cast<int>(q.forward.dstate); }
    __device__ __forceinline__ int angles() const { return static_cast<int>(q.forward.nangles); }
    __device__ __forceinline__ int row_tiles() const { return static_cast<int>(launch.plan.row_tiles); }
    // Of headdim, from an item's first one on; may be more than kInner.
    __device__ __forceinline__ int columns(const Mamba3Item& item) const {
        return static_cast<int>(q.forward.headdim) - item.row0();
    }
    __device__ __forceinline__ float D_of(const Mamba3Item& item) const {
        return q.forward.D != nullptr ? q.forward.D[shared.places.group_head + item.slot] : 0.0f;
    }
    // The element of q, k or a bias that lies in a tile's column.
    __device__ __forceinline__ int element_of(int column) const {
        return kRanks ? column / 2 + column % 2 * (dstate() / 2) : column;
    }

    // By one thread.
    __device__ __forceinline__ void find_places() const {
        const MambaMamba3& p = q.forward;
        const Mamba3BackwardWorkspace& w = launch.plan.workspace;
        Places& to = shared.places;
        const int64_t block = blockIdx.x / launch.plan.splits;
        const int64_t group = block % p.ngroups, slot = block / p.ngroups;
        const Mamba3Chunk chunk = find_chunk(p, launch.chunks, slot);
        const int64_t head = group * (p.nheads / p.ngroups) + launch.first_head, launch_head = group * launch.group_heads;
        const int64_t step = chunk.row * p.seqlen + chunk.first;
        to.speeds = launch.chunks.speeds + mamba3_speeds_index(p, chunk.row, chunk.first, 0);  // heads share them
        to.values = mamba3_values(launch.chunks, p.nheads, slot, head, kMamba3High);
        to.q_bias = p.q_bias + head * p.rank * p.dstate;
        to.k_bias = p.k_bias + head * p.rank * p.dstate;
        to.turns = launch.chunks.turns + mamba3_turns_index(p, slot, head);
        to.part_turns = launch.chunks.part_turns + mamba3_part_turns_index(p, launch.chunks, slot, 0, head);
        const int64_t tile = (slot * launch.group_heads * p.ngroups + launch_head) * launch.plan.row_tiles;
        to.states = launch.at<const T>(w.states) + tile * (Shared::kInner * Shared::kStates);
        to.dstates = launch.at<const T>(w.dstates) + tile * (Shared::kInner * Shared::kStates);
        to.v =
            static_cast<const T*>(p.v) + chunk.row * p.v_batch_stride + chunk.first * p.v_len_stride + head * p.v_head_stride;
        to.dy = dy_rows<T>(p, launch, chunk, launch_head, &to.dy_stride);
        to.part_turns_stride = p.nheads * p.nangles;
        to.bias_stride = launch.chunks.slots * p.nheads * p.rank * p.dstate;
        to.dv = static_cast<T*>(q.dv) + step * q.dv_step_stride + head * p.headdim;
        to.terms = launch.at<float4>(w.step_terms) + step * p.nheads + head;
        to.dz = static_cast<T*>(q.dz) + step * q.dz_step_stride + head * p.headdim;
        to.D = launch.at<float>(w.D) + slot * launch.plan.row_tiles * p.nheads + head;
        to.dturns_pitch = static_cast<int>(mamba3_dturns_pitch(p));
        to.dturns_stride = static_cast<int>(launch.chunks.steps) * to.dturns_pitch;
        to.dturns = launch.at<float>(w.dturns) + (slot * p.nheads + head) * to.dturns_stride;
        to.angle_totals = launch.at<float>(w.angle_totals) + (slot * p.nheads + head) * p.nangles;
        to.bias = launch.at<float>(w.bias) + (slot * p.nheads + head) * p.rank * p.dstate;
        to.mimo_v = launch.at<float>(w.mimo_v) + (slot * p.nheads + head) * p.rank * p.headdim;
        const int64_t k_row = chunk.sequence * p.rank * p.nheads + head;  // of rank 0
        to.dfinal_k = chunk.last && q.dfinal_k != nullptr ? q.dfinal_k + k_row * p.dstate : nullptr;
        const int64_t v_row = chunk.sequence * p.nheads + head;
        to.dfinal_v = chunk.last && q.dfinal_v != nullptr ? q.dfinal_v + v_row * p.headdim : nullptr;
        to.steps = chunk.steps;
        to.rows = chunk.steps * kRank;
        to.slot = static_cast<int>(slot);
        to.group_head = static_cast<int>(head);
    }

    // The group's rows of q and k, in the order of columns.
    __device__ __forceinline__ void load_group() const {
        const MambaMamba3& p = q.forward;
        int64_t block = blockIdx.x / launch.plan.splits;
        const int64_t group = block % p.ngroups;
        const Mamba3Chunk chunk = find_chunk(p, launch.chunks, block / p.ngroups);
        const T* const q_rows =
            static_cast<const T*>(p.q) + chunk.row * p.q_batch_stride + chunk.first * p.q_len_stride + group * p.q_group_stride;
        const T* const k_rows =
            static_cast<const T*>(p.k) + chunk.row * p.k_batch_stride + chunk.first * p.k_len_stride + group * p.k_group_stride;
        const int thread = stand().thread;
#pragma unroll 4
        for (int i = thread; i < kRows * 64; i += kMamba3BackwardThreads) {
            const int row = i / 64, column = i % 64 * 2, step = row >> kRankLog2, r = row & (kRank - 1);
            const bool exists = row < shared.places.rows && column < dstate();  // an even number
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const T* const from = m == 0 ? q_rows + step * p.q_len_stride + r * p.q_rank_stride
                                             : k_rows + step * p.k_len_stride + r * p.k_rank_stride;
                float2 value = make_float2(0.0f, 0.0f);
                if (exists && kRank == 1) {  // neighbours
                    value = load_pair<T>(from + column);
                } else if (exists) {
                    value = make_float2(to_float(from[column / 2]), to_float(from[column / 2 + dstate() / 2]));
                }
                store_pair<T>((m == 0 ? shared.group_q : shared.group_k) + Tile::at(row, column), value.x, value.y);
            }
        }
    }

    // Starts to copy an item's rows of dy and x, or v and mimo_v, by the first two warpgroups. What has used their places must
    // have been shown.
    __device__ __forceinline__ void begin_row_copies(const Mamba3Item& item) const {
        const MambaMamba3& p = q.forward;
        const Places& from = shared.places;
        typename Shared::Item& to = shared.items[item.number % 2];
        const int thread = stand().thread;
        const int own_column = thread % 8 * 8, column = own_column < columns(item) ? item.row0() + own_column : 0;
        copy_rows<kRows>(to.dy, from.dy + (item.slot * static_cast<int>(p.headdim) + column), from.dy_stride, from.rows, item,
                         thread);
        const T* const v = from.v + (item.slot * p.v_head_stride + column);
        if constexpr (!kRanks) {
            copy_rows<kRows>(to.x, v, p.v_len_stride, from.steps, item, thread);
        } else if (thread < kCopyThreads / 2) {
            copy_rows<kRows / kRank>(copied_v(item), v, p.v_len_stride, from.steps, item, thread);
        } else if (thread < kCopyThreads / 2 + kRank * (Shared::kInner / 4)) {
            const int piece = thread - kCopyThreads / 2, r = piece / 16, weight = piece % 16 * 4;
            const bool exists = weight < columns(item);
            const float* const weights =
                p.mimo_v + static_cast<int64_t>(from.group_head + item.slot) * p.rank * p.headdim + item.row0();
            cp_async<16>(copied_projection(item) + 4 * piece, exists ? weights + r * p.headdim + weight : weights, exists);
        }
        cp_async_commit_group();
    }
    // A thread's pieces of a tile's rows, zeros where there is nothing. from: its columns of the first row.
    static constexpr int kCopyThreads = kMamba3BackwardThreads / 2;
    template <int kCount>
    __device__ __forceinline__ void copy_rows(T* tile, const T* from, int64_t stride, int rows, const Mamba3Item& item,
                                              int thread) const {
        constexpr int kTogether = kCopyThreads / 8;
        const int row = thread / 8, column = thread % 8 * 8;
        const bool has_column = column < columns(item);
        T* const to = tile + Tile::at(row, column);
        const T* own = from + row * stride;
#pragma unroll
        for (int i = 0; i < kCount; i += kTogether) {
            const bool exists = has_column && row + i < rows;
            cp_async<16>(to + i * 64, exists ? own : from, exists);
            own += kTogether * stride;
        }
    }
    // By one thread, the states, the values of steps and the biases.
    __device__ __forceinline__ void begin_bulk_copies(const Mamba3Item& item) const {
        typename Shared::Item& to = shared.items[item.number % 2];
        constexpr int kSize = Shared::kInner * Shared::kStates, kBytes = kSize * static_cast<int>(sizeof(T));
        const Places& from = shared.places;
        uint64_t* const barrier = &shared.barriers[item.number % 2];
        const int values = static_cast<int>(launch.chunks.arrays * launch.chunks.pitch), biases = kRank * dstate();
        const int64_t index = static_cast<int64_t>(item.slot * row_tiles() + item.tile) * kSize;
        mbarrier_arrive_expect_tx(barrier, 2 * kBytes + 4 * values + 8 * biases);
        cp_async_bulk_load(to.state, from.states + index, kBytes, barrier);
        cp_async_bulk_load(to.dstate, from.dstates + index, kBytes, barrier);
        cp_async_bulk_load(shared.values[item.number % 2], from.values + item.slot * values, 4 * values, barrier);
        cp_async_bulk_load(shared.bias[0], from.q_bias + item.slot * biases, 4 * biases, barrier);
        cp_async_bulk_load(shared.bias[1], from.k_bias + item.slot * biases, 4 * biases, barrier);
    }
    __device__ __forceinline__ void wait_for_copies(const Mamba3Item& item) const {
        mbarrier_wait_parity(&shared.barriers[item.number % 2], static_cast<uint32_t>(item.number / 2 % 2));
    }

    // MIMO's v of an item, rows of a tile, and mimo_v, (R, kInner). A chunk has fewer steps than SISO's: both are copied to
    // where shared memory has room for more of these.
    __device__ __forceinline__ T* copied_v(const Mamba3Item& item) const {
        return reinterpret_cast<T*>(shared.turned) + item.number % 2 * Shared::kBlock + (kRows >> kRankLog2) * 64;
    }
    __device__ __forceinline__ float* copied_projection(const Mamba3Item& item) const {
        return shared.values[item.number % 2] + kMamba3BackwardArrays * static_cast<int>(launch.chunks.pitch);
    }
    // MIMO's x = mimo_v v.
    __device__ __forceinline__ void project_x(const Mamba3Item& item) const {
        if (!kRanks) {
            return;
        }
        const int thread = stand().thread, row = thread / 8, column = thread % 8 * 8;
        uint4 piece = make_uint4(0u, 0u, 0u, 0u);
        if (row < shared.places.rows && column < columns(item)) {
            piece = *reinterpret_cast<const uint4*>(copied_v(item) + Tile::at(row >> kRankLog2, column));
            const float* const weights = copied_projection(item) + (row & (kRank - 1)) * Shared::kInner + column;
            const float4 low = reinterpret_cast<const float4*>(weights)[0], high = reinterpret_cast<const float4*>(weights)[1];
            const auto times = [](uint32_t word, float one, float other) {
                const float2 value = unpack2<T>(word);
                return pack2<T>(value.x * one, value.y * other);
            };
            piece = make_uint4(times(piece.x, low.x, low.y), times(piece.y, low.z, low.w), times(piece.z, high.x, high.y),
                               times(piece.w, high.z, high.w));
        }
        *reinterpret_cast<uint4*>(shared.items[item.number % 2].x + Tile::at(row, column)) = piece;
    }

    // The weights of an item's steps and pairs, when its bulk copies have come. part: of four warpgroups' worth of threads, the
    // thread's quarter.
    __device__ __forceinline__ void prepare(const Mamba3Item& item, int part, int row) const {
        const int step = row >> kRankLog2, pitch = static_cast<int>(launch.chunks.pitch);
        const float* const values = shared.values[item.number % 2];  // a chunk has as many steps as rows have room
        const auto value = [&](Mamba3StepArray array, int of) { return values[array * pitch + of]; };
        // Decay from one step to another.
        const auto decay = [&](int from, int to) {
            return exp2_fast((value(kMamba3High, to) - value(kMamba3High, from)) +
                             (value(kMamba3Low, to) - value(kMamba3Low, from)));
        };
        ChunkSteps<kRows>& to = shared.steps[item.number % 2];
        if (part == 0) {
            to.high[row] = value(kMamba3High, step);
            to.low[row] = value(kMamba3Low, step);
            to.gamma[row] = value(kMamba3Gamma, step);
            to.scale[row] = value(kMamba3Scale, step);
        } else if (part == 1) {
            to.leaving[row] = value(kMamba3Leaving, step);
            to.adding[row] = value(kMamba3Leaving, step) * value(kMamba3Scale, step);
            to.entering[row] = value(kMamba3Entering, step);
            if (row == kRows - 1) {
                to.carry = value(kMamba3Entering, step);
            }
        } else if (part == 2) {
            shared.pairs.head[row] = row >= 16 ? decay((row / 16 * 16 - 1) >> kRankLog2, step) : 0.0f;
        } else {
            const float tail = decay(step, (row / 16 * 16 + 15) >> kRankLog2);
            shared.pairs.tail[row] = tail;
            shared.pairs.scaled_tail[row] = tail * value(kMamba3Scale, step);
        }
    }
};

}  // namespace mamba
