// One of the two warpgroups of forward_warpgroup.cuh turns the rows of q and k on their way from memory into the tiles of the
// next chunk. Here those of pairs that lie half of dstate apart, of some ranks; turn_pairs_warpgroup.cuh has neighbours.
#pragma once

#include "mamba3/cuda/warpgroup_block.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A lane has two neighbouring pairs of each row, which become neighbours in the tile (element_of_pair_column). Of each warp's
// 16 rows of a chunk it takes four at a time: steps that follow each other, of one rank. While it turns q's, k's are on their
// way, and the next four rows of q while it turns k's.
template <typename T, int kStates, Mamba3Pass kPass>
struct Mamba3HalvesTurner {
    static constexpr bool kAwaitsCopies = false;  // see turn_mamba3_chunks
    static constexpr int kRanks = 0;              // any
    static constexpr int kTogether = 4;
    static constexpr int kGroups = 16 / kTogether;
    static constexpr bool kFromEnd = kPass == kMamba3After;
    static constexpr bool kBothSides = mamba3_finds_rows(kPass);  // else what goes into the state: k, or q from the end
    using Tiles = Mamba3WarpgroupTiles<kStates, kPass>;
    using Block = Mamba3Block<kFromEnd>;
    const Mamba3WarpgroupLaunch& launch;

    // One of q and k.
    struct Side {
        uint32_t words[kTogether][2];  // of rows that are on their way
        float2 bias[2];                // of the pairs
        const char* rows;              // of the chunk's first step and rank, the lane's first word
        const float* biases;           // of the first rank, the lane's
        int step, rank;                // bytes
    };
    Side first, second;                        // q if both are there; k, or q from the end
    float speed[kTogether][2], dt[kTogether];  // of rows that are on their way; speed: 0 where no angle turns the pair
    uint32_t start[2];                         // the turn before them
    const char* speeds;                        // of the lane's angles
    const char* dts;
    const char *turns, *part_turns;
    int left;  // steps in the chunk, or more
    int row;   // of the warp's first one, as rows are turned: rank by rank
    int dstate;
    bool has;  // pairs
    bool turns_pair[2];
    int place;  // elements, in a row of a tile whose number is a multiple of 8
    float turned_by[2];

    __device__ __forceinline__ void set_side(Side& side, const MambaMamba3& p, const Block& block, const void* data,
                                             int64_t batch_stride, int64_t len_stride, int64_t group_stride, const float* bias,
                                             int step, int rank, int64_t first_step, int pair) const {
        const int64_t at = block.range.row * batch_stride + first_step * len_stride + block.group * group_stride + pair;
        side.rows = static_cast<const char*>(data) + at * static_cast<int64_t>(sizeof(T));
        side.biases = bias + block.head * p.rank * p.dstate + pair;
        side.step = step;
        side.rank = rank;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            side.words[i][0] = side.words[i][1] = 0u;
        }
        side.bias[0] = side.bias[1] = make_float2(0.0f, 0.0f);
    }

    __device__ __forceinline__ Mamba3HalvesTurner(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launched,
                                                  const Block& block, int thread)
        : launch(launched), row(opaque(thread / 32 * 16)), dstate(static_cast<int>(p.dstate)) {
        const Mamba3Chunks& chunks = launch.chunks;
        const int lane = thread % 32;
        has = 4 * lane < dstate;
        const int pair = has ? 2 * lane : 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            turns_pair[e] = has && pair + e < p.nangles;
            turned_by[e] = 0.0f;
            start[e] = 0u;
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                speed[i][e] = 0.0f;
            }
        }
        place = opaque(Mamba3XTile::at(0, 2 * pair));
        const int64_t first_step = block.first_step(chunks);
        const auto set_q = [&](Side& side) {
            set_side(side, p, block, p.q, p.q_batch_stride, p.q_len_stride, p.q_group_stride, p.q_bias, launch.q_step,
                     launch.q_rank, first_step, pair);
        };
        if (kBothSides) {
            set_q(first);
        }
        if (kFromEnd) {
            set_q(second);
        } else {
            set_side(second, p, block, p.k, p.k_batch_stride, p.k_len_stride, p.k_group_stride, p.k_bias, launch.k_step,
                     launch.k_rank, first_step, pair);
        }
        const int angle = turns_pair[0] ? pair : 0;
        speeds = reinterpret_cast<const char*>(chunks.speeds + mamba3_speeds_index(p, block.range.row, first_step, block.head) +
                                               angle);
        dts = reinterpret_cast<const char*>(mamba3_values(chunks, p.nheads, block.slot, block.head, kMamba3Dt));
        turns = reinterpret_cast<const char*>(chunks.turns + mamba3_turns_index(p, block.slot, block.head) + angle);
        part_turns = reinterpret_cast<const char*>(chunks.part_turns +
                                                   mamba3_part_turns_index(p, chunks, block.slot, 0, block.head) + angle);
        left = static_cast<int>(block.range.begin + block.range.seqlen - first_step);
    }

    __device__ __forceinline__ int rank_of(int group) const { return (row + kTogether * group) >> launch.steps_log2; }
    __device__ __forceinline__ bool exists(int group) const { return rank_of(group) < launch.ranks; }
    __device__ __forceinline__ int step_of(int group) const {
        return (row + kTogether * group) & ((1 << launch.steps_log2) - 1);
    }
    __device__ __forceinline__ bool starts_anew(int group) const { return group == 0 || step_of(group) == 0; }
    // The steps of a group's rows. Those that do not exist count nothing: they get the last one's rows.
    __device__ __forceinline__ void find_steps(int (&steps)[kTogether], int group) const {
        const int step = step_of(group);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            steps[i] = opaque(step + i < left ? step + i : left - 1);
        }
    }

    __device__ __forceinline__ void load_biases(Side& side, int rank) const {
        if (rank < launch.ranks && has) {
            const float* const from = side.biases + rank * dstate;
            const float2 one = *reinterpret_cast<const float2*>(from),
                         other = *reinterpret_cast<const float2*>(from + dstate / 2);
            side.bias[0] = make_float2(one.x, other.x);
            side.bias[1] = make_float2(one.y, other.y);
        }
    }
    __device__ __forceinline__ void load_biases(int rank) {
        if (kBothSides) {
            load_biases(first, rank);
        }
        load_biases(second, rank);
    }

    // What is opaque is so for a multiplication in one instruction, and for the compiler not to keep sums of pointers.
    __device__ __forceinline__ void begin_words(Side& side, const int (&steps)[kTogether], int group) const {
        const char* const rows = opaque(side.rows + static_cast<int64_t>(rank_of(group)) * side.rank);
        const int stride = opaque(side.step);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const char* const at = opaque(rows + static_cast<int64_t>(steps[i]) * stride);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (has) {
                    side.words[i][e] = *reinterpret_cast<const uint32_t*>(at + e * dstate);
                }
            }
        }
    }
    __device__ __forceinline__ void begin_turns(const int (&steps)[kTogether], int group) {
        const char* const from = opaque(speeds);
        const int stride = opaque(launch.speeds_step);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (turns_pair[e]) {
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    speed[i][e] = *reinterpret_cast<const float*>(from + static_cast<int64_t>(steps[i]) * stride + 4 * e);
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
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (turns_pair[e]) {
                    start[e] = *reinterpret_cast<const uint32_t*>(turns + 4 * e);
                    if (launch.part_log2 < launch.steps_log2) {
                        start[e] += *reinterpret_cast<const uint32_t*>(
                            part_turns + static_cast<int64_t>(step >> launch.part_log2) * launch.turns_part + 4 * e);
                    }
                }
            }
        }
    }
    __device__ __forceinline__ void next_chunk() {
        const int steps = Block::kDirection * (1 << launch.steps_log2);
        if (kBothSides) {
            first.rows += static_cast<int64_t>(steps) * first.step;
        }
        second.rows += static_cast<int64_t>(steps) * second.step;
        speeds += static_cast<int64_t>(steps) * launch.speeds_step;
        dts += Block::kDirection * launch.values_step * 4;
        turns += Block::kDirection * launch.turns_step * 4;
        part_turns += Block::kDirection * launch.part_turns_step * 4;
        left -= steps;
    }

    __device__ __forceinline__ void turn_side(const Side& side, const float2 (&cos_sin)[kTogether][2], T* tile,
                                              const int (&to)[kTogether]) const {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const float2 one = unpack2<T>(side.words[i][0]), other = unpack2<T>(side.words[i][1]);
            const float2 pairs[2] = {turned(make_float2(one.x, other.x), side.bias[0], cos_sin[i][0]),
                                     turned(make_float2(one.y, other.y), side.bias[1], cos_sin[i][1])};
            if (has) {
                *reinterpret_cast<uint2*>(tile + to[i]) =
                    make_uint2(pack2<T>(pairs[0].x, pairs[0].y), pack2<T>(pairs[1].x, pairs[1].y));
            }
        }
    }
    __device__ __forceinline__ void find_angles(float2 (&cos_sin)[kTogether][2], int group) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
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
    // Turns the rows of a group into the tiles of q and k, the first of which is `tile`, and begins to load those of the next
    // group, if it exists.
    __device__ __forceinline__ void turn(int group, T* tile, bool more) {
        const int next = (group + 1) % kGroups;
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
        if (launch.steps_log2 < 4 && starts_anew(group)) {
            load_biases(rank_of(group));
        }
        float2 cos_sin[kTogether][2];
        find_angles(cos_sin, group);
        int steps[kTogether], to[kTogether];
        find_steps(steps, next);
        if (next_exists) {
            begin_turns(steps, next);
        }
        const int own = step_of(group) << launch.ranks_log2 | rank_of(group);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int at = own + (i << launch.ranks_log2);
            to[i] = at * 64 + (place ^ (at & 7) * 8);
        }
        if (kBothSides) {
            turn_side(first, cos_sin, tile, to);
            if (next_exists) {
                begin_words(first, steps, next);
            }
        }
        turn_side(second, cos_sin, tile + Tiles::kQ, to);
        if (next_exists) {
            begin_words(second, steps, next);
        }
    }
    __device__ __forceinline__ void begin(int group) {
        int steps[kTogether];
        find_steps(steps, group);
        begin_turns(steps, group);
        if (kBothSides) {
            begin_words(first, steps, group);
        }
        begin_words(second, steps, group);
    }

    // Before the first chunk.
    __device__ __forceinline__ void begin() {
        load_biases(rank_of(0));
        if (exists(0)) {
            begin(0);
        }
    }
    // A chunk, whose tiles begin at `tile`. more: whether there is another one. begin_others: begins copies that will have come
    // at the end.
    template <typename Others>
    __device__ __forceinline__ void turn_chunk(T* tile, bool more, const Others& begin_others) {
        begin_others();
        cp_async_commit_group();
#pragma unroll 1
        for (int group = 0; group < kGroups; ++group) {
            turn(group, tile, group + 1 < kGroups || more);
        }
    }
};

#endif

}  // namespace mamba
