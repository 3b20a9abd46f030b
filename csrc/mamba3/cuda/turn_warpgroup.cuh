// One of the two warpgroups of forward_warpgroup.cuh: it makes the tiles of a chunk, while the other one multiplies those of
// the chunk before. It turns the rows of q and k on their way from memory, and copies those of x.
#pragma once

#include "mamba3/cuda/warpgroup_block.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A lane owns two words of each row, as in turn_rows.cuh, and of each warp's 16 rows of a chunk it takes four at a time: steps
// that follow each other, of one rank. While it turns q's, k's are on their way, and the next four rows of q while it turns
// k's.
constexpr int kMamba3TogetherRows = 4;

template <typename T, int kStates, bool kPairwise, bool kResults>
struct Mamba3Turner {
    static constexpr Mamba3PairKind kKind = kPairwise ? kMamba3Neighbours : kMamba3Halves;
    static constexpr int kTogether = kMamba3TogetherRows;
    using Tiles = Mamba3WarpgroupTiles<kStates, kResults>;
    static constexpr bool kOneRank = kPairwise;  // what choose_mamba3_warpgroups lets come
    const MambaMamba3& p;
    const Mamba3WarpgroupLaunch& launch;

    // Of the rows that are on their way:
    uint32_t q_words[kTogether][2], k_words[kTogether][2];
    float speed[kTogether][2], dt[kTogether];  // speed: 0 where no angle turns the pair
    uint32_t start[2];                         // the turn before them
    const char *q, *k;                         // their chunk's first step, the lane's first word
    const char* speeds[2];                     // of the lane's angles
    const char* dts;
    const char* turns;  // of angle 0
    int left;           // steps in the chunk, or more

    int row;        // of the warp's first one, as rows are turned: rank by rank
    bool has[2];    // words
    bool both;      // whether any lane's second pair is turned
    int column[2];  // of the words
    int angle[2];   // bytes from angle 0's; -1: none
    int place[2];   // elements, in a row of a tile whose number is a multiple of 8
    Mamba3Quad bias[2];
    float turned_by[2];

    __device__ __forceinline__ Mamba3Turner(const MambaMamba3& params, const Mamba3WarpgroupLaunch& launched,
                                            const Mamba3Block& block, int thread)
        : p(params), launch(launched), row(opaque(thread / 32 * 16)) {
        const Mamba3Chunks& chunks = launch.chunks;
        const int size = static_cast<int>(sizeof(T));
        const Mamba3Pairs pairs =
            mamba3_pairs<kKind>(0, thread % 32, static_cast<int>(p.dstate), static_cast<int>(p.nangles), kPairwise);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            has[e] = pairs.first[e] >= 0;
            column[e] = pairs.first[e];
            angle[e] = has[e] && pairs.angle[e] >= 0 ? 4 * pairs.angle[e] : -1;
            place[e] = opaque(Mamba3XTile::at(0, has[e] ? column[e] : 0));
            turned_by[e] = 0.0f;
            start[e] = 0u;
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                speed[i][e] = 0.0f;
            }
        }
        both = !kPairwise || __any_sync(0xffffffffu, angle[1] >= 0);
        const int64_t first = block.first_step(chunks);
        const auto at = [&](const void* data, int64_t batch_stride, int64_t len_stride, int64_t group_stride) {
            const int64_t index = block.range.row * batch_stride + first * len_stride + block.group * group_stride;
            return static_cast<const char*>(data) + (index + (has[0] ? column[0] : 0)) * size;
        };
        q = at(p.q, p.q_batch_stride, p.q_len_stride, p.q_group_stride);
        k = at(p.k, p.k_batch_stride, p.k_len_stride, p.k_group_stride);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            speeds[e] =
                reinterpret_cast<const char*>(chunks.speeds + mamba3_speeds_index(p, block.range.row, first, block.head)) +
                (angle[e] >= 0 ? angle[e] : 0);
        }
        dts = reinterpret_cast<const char*>(mamba3_values(chunks, p.nheads, block.slot, block.head, kMamba3Dt));
        turns = reinterpret_cast<const char*>(chunks.turns + mamba3_turns_index(p, chunks, block.slot, 0, block.head));
        left = static_cast<int>(block.range.begin + block.range.seqlen - first);
    }

    __device__ __forceinline__ int ranks_log2() const { return kOneRank ? 0 : launch.ranks_log2; }
    __device__ __forceinline__ int steps_log2() const { return kOneRank ? 6 : launch.steps_log2; }
    __device__ __forceinline__ int rank_of(int group) const {
        return kOneRank ? 0 : (row + kTogether * group) >> launch.steps_log2;
    }
    __device__ __forceinline__ bool exists(int group) const { return kOneRank || rank_of(group) < launch.ranks; }
    __device__ __forceinline__ int step_of(int group) const { return (row + kTogether * group) & ((1 << steps_log2()) - 1); }
    __device__ __forceinline__ bool starts_anew(int group) const { return group == 0 || (!kOneRank && step_of(group) == 0); }
    // The steps of a group's rows. Those that do not exist count nothing: they get the last one's rows.
    __device__ __forceinline__ void find_steps(int (&steps)[kTogether], int group) const {
        const int step = step_of(group);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            steps[i] = opaque(step + i < left ? step + i : left - 1);
        }
    }

    __device__ __forceinline__ void load_biases(int64_t head, int rank) {
        if (rank < launch.ranks) {
            Mamba3Pairs pairs;
            pairs.first[0] = column[0];
            pairs.first[1] = column[1];
            bias[0] = load_bias<kKind>(p.q_bias + (head * p.rank + rank) * p.dstate, pairs);
            bias[1] = load_bias<kKind>(p.k_bias + (head * p.rank + rank) * p.dstate, pairs);
        }
    }

    // What is opaque is so for a multiplication in one instruction, and for the compiler not to keep sums of pointers.
    __device__ __forceinline__ void begin_words(uint32_t (&words)[kTogether][2], const char* from, int stride, int rank_stride,
                                                const int (&steps)[kTogether], int group) const {
        from = opaque(kOneRank ? from : from + static_cast<int64_t>(rank_of(group)) * rank_stride);
        stride = opaque(stride);
        const int second = kPairwise ? 64 * static_cast<int>(sizeof(T)) : static_cast<int>(p.dstate);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const char* const at = opaque(from + static_cast<int64_t>(steps[i]) * stride);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (has[e]) {
                    words[i][e] = *reinterpret_cast<const uint32_t*>(at + e * second);
                }
            }
        }
    }
    // Begin to load of a group what is named.
    __device__ __forceinline__ void begin_q(const int (&steps)[kTogether], int group) {
        if (kResults) {
            begin_words(q_words, q, launch.q_step, launch.q_rank, steps, group);
        }
    }
    __device__ __forceinline__ void begin_k(const int (&steps)[kTogether], int group) {
        begin_words(k_words, k, launch.k_step, launch.k_rank, steps, group);
    }
    __device__ __forceinline__ void begin_turns(const int (&steps)[kTogether], int group) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (e == 0 || both) {
                const char* const from = opaque(speeds[e]);
                const int stride = opaque(launch.speeds_step);
                if (angle[e] >= 0) {
#pragma unroll
                    for (int i = 0; i < kTogether; ++i) {
                        speed[i][e] = *reinterpret_cast<const float*>(from + static_cast<int64_t>(steps[i]) * stride);
                    }
                }
            }
        }
        const int step = step_of(group);
        const float4 four = *reinterpret_cast<const float4*>(opaque(dts) + static_cast<int64_t>(step) * 4);
        dt[0] = four.x;
        dt[1] = four.y;
        dt[2] = four.z;
        dt[3] = four.w;
        if (starts_anew(group)) {
            const int part = launch.chunks.parts > 1 ? step / kMamba3WarpSteps : 0;
            const char* const from = turns + static_cast<int64_t>(part) * launch.turns_part;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (angle[e] >= 0) {
                    start[e] = *reinterpret_cast<const uint32_t*>(from + angle[e]);
                }
            }
        }
    }
    __device__ __forceinline__ void next_chunk() {
        const int steps = 1 << steps_log2();
        q += static_cast<int64_t>(steps) * launch.q_step;
        k += static_cast<int64_t>(steps) * launch.k_step;
        speeds[0] += static_cast<int64_t>(steps) * launch.speeds_step;
        speeds[1] += static_cast<int64_t>(steps) * launch.speeds_step;
        dts += launch.values_step * 4;
        turns += launch.turns_step * 4;
        left -= steps;
    }

    // Adds the bias to the words of a row and turns them. kBoth: the second pair too.
    template <bool kBoth>
    __device__ __forceinline__ void turn_words(uint32_t (&words)[2], const Mamba3Quad& added,
                                               const float2 (&cos_sin)[2]) const {
        const float2 first = unpack2<T>(words[0]), other = unpack2<T>(words[1]);
        const float2 one = turned(kPairwise ? first : make_float2(first.x, other.x), added.pair[0], cos_sin[0]);
        float2 two = kPairwise ? other : make_float2(first.y, other.y);
        if (kBoth) {
            two = turned(two, added.pair[1], cos_sin[1]);
        } else {
            two.x += added.pair[1].x;
            two.y += added.pair[1].y;
        }
        words[0] = kPairwise ? pack2<T>(one.x, one.y) : pack2<T>(one.x, two.x);
        words[1] = kPairwise ? pack2<T>(two.x, two.y) : pack2<T>(one.y, two.y);
    }
    // to: where the words go.
    template <bool kBoth>
    __device__ __forceinline__ void turn_side(uint32_t (&words)[kTogether][2], const Mamba3Quad& added,
                                              const float2 (&cos_sin)[kTogether][2], T* tile,
                                              const int (&to)[kTogether][2]) const {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            turn_words<kBoth>(words[i], added, cos_sin[i]);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (has[e]) {
                    *reinterpret_cast<uint32_t*>(tile + to[i][e]) = words[i][e];
                }
            }
        }
    }
    // Finds the angles of a group of rows, and begins to load what the next group's need, if it exists.
    __device__ __forceinline__ void find_angles(float2 (&cos_sin)[kTogether][2], int group) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (e == 0 || both) {
                if (starts_anew(group)) {
                    turned_by[e] = turns_of_count(start[e]);
                }
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const float sum = fmaf(speed[i][e], dt[i], turned_by[e]);
                    turned_by[e] = sum - rintf(sum);
                    cos_sin[i][e] = make_float2(cos_fast(turned_by[e] * 6.2831853f), sin_fast(turned_by[e] * 6.2831853f));
                }
            }
        }
    }
    // steps: of the next group.
    template <bool kBoth>
    __device__ __forceinline__ void turn_group(const float2 (&cos_sin)[kTogether][2], int group, T* tile, int next,
                                               bool next_exists, const int (&steps)[kTogether]) {
        int to[kTogether][2];
        const int first = step_of(group) << ranks_log2() | rank_of(group);
        if (kOneRank) {  // a multiple of 4
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int at = opaque(first * 64 + (place[e] ^ (first & 4) * 8));
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    to[i][e] = (at ^ i * 8) + i * 64;
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int own = first + (i << ranks_log2());
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    to[i][e] = own * 64 + (place[e] ^ (own & 7) * 8);
                }
            }
        }
        if (kResults) {
            turn_side<kBoth>(q_words, bias[0], cos_sin, tile, to);
        }
        if (next_exists) {
            begin_q(steps, next);
        }
        turn_side<kBoth>(k_words, bias[1], cos_sin, tile + Tiles::kQ, to);
        if (next_exists) {
            begin_k(steps, next);
        }
    }
    // Turns the rows of a group into the tiles of q and k, the first of which is `tile`, and begins to load those of the next
    // group, if it exists.
    __device__ __forceinline__ void turn(int group, T* tile, int64_t head, bool more) {
        const int next = (group + 1) % (16 / kTogether);
        if (next == 0) {
            next_chunk();
        }
        const bool next_exists = more && exists(next);
        if (!exists(group)) {
            if (next_exists) {
                begin(next);
            }
            return;
        }
        if (steps_log2() < 4 && starts_anew(group)) {
            load_biases(head, rank_of(group));
        }
        float2 cos_sin[kTogether][2];
        find_angles(cos_sin, group);
        int steps[kTogether];
        find_steps(steps, next);
        if (next_exists) {
            begin_turns(steps, next);
        }
        if (!kPairwise || both) {
            turn_group<true>(cos_sin, group, tile, next, next_exists, steps);
        } else {
            turn_group<false>(cos_sin, group, tile, next, next_exists, steps);
        }
    }
    __device__ __forceinline__ void begin(int group) {
        int steps[kTogether];
        find_steps(steps, group);
        begin_turns(steps, group);
        begin_q(steps, group);
        begin_k(steps, group);
    }
};

// The rows of x of a chunk: v's, times mimo_v if there is one. A thread copies the pieces that it multiplies.
template <typename T>
struct Mamba3XCopies {
    static constexpr int kTogether = kMamba3Threads / 8;  // rows
    const T* v;                                           // of a chunk's first step, the thread's columns
    const float* mimo;                                    // of the thread's columns and rank, or NULL
    int64_t stride;
    int row, column, ranks_log2;
    int left;     // steps in the chunk, or more
    bool exists;  // the columns and the rank

    __device__ __forceinline__ Mamba3XCopies(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                             const Mamba3Block& block, int thread)
        : stride(p.v_len_stride), row(thread / 8), column(thread % 8 * 8), ranks_log2(launch.ranks_log2) {
        static_assert(kTogether % kMamba3MostRanks == 0, "a thread's rank stays the same");
        const int rank = row % (1 << ranks_log2);
        exists = column < block.columns && rank < p.rank;
        const int64_t first = block.first_step(launch.chunks);
        left = static_cast<int>(block.range.begin + block.range.seqlen - first);
        v = static_cast<const T*>(p.v) + block.range.row * p.v_batch_stride + first * p.v_len_stride +
            block.head * p.v_head_stride + block.row0 + (exists ? column : 0);
        mimo =
            p.mimo_v != nullptr && exists ? p.mimo_v + (block.head * p.rank + rank) * p.headdim + block.row0 + column : nullptr;
    }
    // Begins to copy a chunk's rows.
    __device__ __forceinline__ void begin(T* tile) {
#pragma unroll
        for (int i = 0; i < kMamba3ChunkRows; i += kTogether) {
            const int step = (row + i) >> ranks_log2;
            const bool valid = exists && step < left;
            copy_async<16>(tile + Mamba3XTile::at(row + i, column), valid ? v + step * stride : v, valid);
        }
        end_copies();
        const int steps = kMamba3ChunkRows >> ranks_log2;
        v += steps * stride;
        left -= steps;
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
template <typename T, int kStates, bool kPairwise, bool kResults>
__device__ __forceinline__ void make_mamba3_tiles(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launch,
                                                  const Mamba3Block& block, T* tiles, Mamba3ChunkValues* values, int thread) {
    using Tiles = Mamba3WarpgroupTiles<kStates, kResults>;
    constexpr int kGroups = 16 / kMamba3TogetherRows;
    Mamba3Turner<T, kStates, kPairwise, kResults> turner(p, launch, block, thread);
    Mamba3XCopies<T> x(p, launch, block, thread);
    const int64_t head = block.head;
    const float* chunk_values = mamba3_values(launch.chunks, p.nheads, block.slot, block.head, kMamba3High);
    turner.load_biases(head, turner.rank_of(0));
    if (block.chunks > 0 && turner.exists(0)) {
        turner.begin(0);
    }
    for (int i = 0; i < block.chunks; ++i) {
        T* const x_tile = tiles + Tiles::kXAt + i % 2 * kMamba3XTile;
        T* const qk_tile = tiles + i % 2 * Tiles::kQK;
        x.begin(x_tile);
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
#pragma unroll 1
        for (int group = 0; group < kGroups; ++group) {
            turner.turn(group, qk_tile, head, group + 1 < kGroups || i + 1 < block.chunks);
        }
        Mamba3ChunkValues& to = values[i % 2];
        if (first_half) {
            to.high[row] = own[kMamba3High];
            to.low[row] = own[kMamba3Low];
            to.gamma[row] = own[kMamba3Gamma];
        } else {
            const float scale = own[kMamba3Scale - kHalf], leaving = own[kMamba3Leaving - kHalf];
            to.scale[row] = scale;
            to.entering[row] = own[kMamba3Entering - kHalf];
            to.adding[row] = leaving != 0.0f ? leaving * scale : 0.0f;  // a NaN stays there
        }
        if (thread == 0) {
            to.carry[0] = carry;
        }
        chunk_values += launch.values_step;
        x.finish(x_tile);
        show_to_warpgroup();
        __syncthreads();  // the chunk's tiles are there, those of the one before are free
    }
}

#endif

}  // namespace mamba
