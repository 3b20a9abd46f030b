// The rows of q and k of four ranks, whose pairs lie half of dstate apart, turned on their way from memory: see
// turn_warpgroup.cuh.
#pragma once

#include "mamba3/cuda/warpgroup_block.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A lane has two neighbouring pairs in each 64 columns of the tile (element_of_pair_column), of every other rank: half a warp
// takes a row. So where angles turn 32 pairs at most, which is usual, none of the later columns is turned. A warp takes four
// steps one after the other, all ranks of q and k, which share the sines of their step. As soon as a row is turned, that of the
// next step is on its way. All biases stay in registers.
template <typename T, int kStates, bool kTurnsAll, Mamba3Pass kPass>
struct Mamba3RanksTurner {
    static constexpr bool kAwaitsCopies = false;  // see turn_mamba3_chunks
    static constexpr int kRanks = 4;
    static constexpr int kOwn = kRanks / 2;      // ranks of a lane
    static constexpr int kParts = kStates / 64;  // of the columns
    static constexpr int kTurned = kTurnsAll ? kParts : 1;
    static constexpr int kPartPairs = 32;
    static constexpr int kWarpSteps = 16 / kRanks, kChunkSteps = kMamba3ChunkRows / kRanks;
    static constexpr bool kFromEnd = kPass == kMamba3After;
    static constexpr bool kBothSides = mamba3_finds_rows(kPass);  // else what goes into the state: k, or q from the end
    using Tiles = Mamba3WarpgroupTiles<kStates, kPass>;
    using Block = Mamba3Block<kFromEnd>;
    const Mamba3WarpgroupLaunch& launch;

    // One of q and k.
    struct Side {
        uint32_t words[kOwn][kParts][2];  // of the step that is on its way
        float2 bias[kOwn][kParts][2];     // of the pairs
        const char* rows;                 // of the chunk's first step and the lane's first rank, its first word
        int step, rank;                   // bytes; to the lane's next rank
    };
    Side first, second;           // q if both are there; k, or q from the end
    float speed[kTurned][2], dt;  // of the step that is on its way; speed: 0 where no angle turns the pair
    uint32_t start[kTurned][2];   // what the chunk turns before the warp's first step
    const char* speeds;           // of the chunk's first step, the lane's angles
    const char* dts;              // of the chunk's first step
    const char* turns;            // of the lane's angles
    const char* part_turns;       // before the warp's first step
    int first_step;               // the warp's
    int left;                     // steps in the chunk, or more
    int half;                     // bytes from a pair's first one to its second one
    int place;                    // elements: the lane's in its first row
    bool has[kParts];             // pairs
    bool turns_pair[kTurned][2];
    float turned_by[kTurned][2];  // at first the bits of the count before the chunk

    __device__ __forceinline__ void set_side(Side& side, const MambaMamba3& p, const Block& block, const void* data,
                                             int64_t batch_stride, int64_t len_stride, int64_t group_stride, const float* bias,
                                             int step, int rank, int64_t begin, int pair) const {
        const int first_rank = threadIdx.x % 32 / 16;
        const int64_t at = block.range.row * batch_stride + begin * len_stride + block.group * group_stride + pair;
        side.rows = static_cast<const char*>(data) + at * static_cast<int64_t>(sizeof(T)) + int64_t{first_rank} * rank;
        side.step = step;
        side.rank = 2 * rank;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const float* const from = bias + (block.head * kRanks + first_rank + 2 * i) * p.dstate + pair;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                float2 one = make_float2(0.0f, 0.0f), other = one;
                if (has[part]) {
                    one = *reinterpret_cast<const float2*>(from + part * kPartPairs);
                    other = *reinterpret_cast<const float2*>(from + part * kPartPairs + p.dstate / 2);
                }
                side.bias[i][part][0] = make_float2(one.x, other.x);
                side.bias[i][part][1] = make_float2(one.y, other.y);
                side.words[i][part][0] = side.words[i][part][1] = 0u;
            }
        }
    }

    __device__ __forceinline__ Mamba3RanksTurner(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launched,
                                                 const Block& block, int thread)
        : launch(launched), first_step(opaque(thread / 32 * kWarpSteps)), half(static_cast<int>(p.dstate)) {
        static_assert(sizeof(T) == 2, "half of dstate's elements take dstate bytes");
        const Mamba3Chunks& chunks = launch.chunks;
        const int lane = thread % 16;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            has[part] = 64 * part + 4 * lane < p.dstate;
        }
        const int pair = has[0] ? 2 * lane : 0;
        dt = 0.0f;
#pragma unroll
        for (int part = 0; part < kTurned; ++part) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                speed[part][e] = turned_by[part][e] = 0.0f;
                start[part][e] = 0u;
                turns_pair[part][e] = has[part] && part * kPartPairs + pair + e < p.nangles;
            }
        }
        place = opaque(Mamba3XTile::at(first_step * kRanks + thread % 32 / 16, 4 * lane));
        const int64_t begin = block.first_step(chunks);
        const auto set_q = [&](Side& side) {
            set_side(side, p, block, p.q, p.q_batch_stride, p.q_len_stride, p.q_group_stride, p.q_bias, launch.q_step,
                     launch.q_rank, begin, pair);
        };
        if (kBothSides) {
            set_q(first);
        }
        if (kFromEnd) {
            set_q(second);
        } else {
            set_side(second, p, block, p.k, p.k_batch_stride, p.k_len_stride, p.k_group_stride, p.k_bias, launch.k_step,
                     launch.k_rank, begin, pair);
        }
        const int angle = turns_pair[0][0] ? pair : 0;
        speeds =
            reinterpret_cast<const char*>(chunks.speeds + mamba3_speeds_index(p, block.range.row, begin, block.head) + angle);
        dts = reinterpret_cast<const char*>(mamba3_values(chunks, p.nheads, block.slot, block.head, kMamba3Dt));
        turns = reinterpret_cast<const char*>(chunks.turns + mamba3_turns_index(p, block.slot, block.head) + angle);
        const int64_t part = first_step >> launch.part_log2;
        part_turns = reinterpret_cast<const char*>(chunks.part_turns +
                                                   mamba3_part_turns_index(p, chunks, block.slot, part, block.head) + angle);
        left = static_cast<int>(block.range.begin + block.range.seqlen - begin);
    }

    // Steps that do not exist count nothing: they get the last one's rows. What is opaque is so for a multiplication in one
    // instruction, and for the compiler not to keep sums of pointers.
    __device__ __forceinline__ int step_at(int number) const {
        const int step = first_step + number;
        return opaque(step < left ? step : left - 1);
    }
    __device__ __forceinline__ const char* rows_of(const Side& side, int step) const {
        return opaque(opaque(side.rows) + static_cast<int64_t>(step) * opaque(side.step));
    }
    __device__ __forceinline__ void begin_words(Side& side, const char* rows, int i) const {
        const char* const at = rows + static_cast<int64_t>(i) * side.rank;
        const char* const other = at + half;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            constexpr int kPartBytes = kPartPairs * static_cast<int>(sizeof(T));
            if (has[part]) {
                side.words[i][part][0] = *reinterpret_cast<const uint32_t*>(at + part * kPartBytes);
                side.words[i][part][1] = *reinterpret_cast<const uint32_t*>(other + part * kPartBytes);
            }
        }
    }
    __device__ __forceinline__ void begin_turns(int step, bool starts) {
        const char* const from = opaque(speeds) + static_cast<int64_t>(step) * opaque(launch.speeds_step);
#pragma unroll
        for (int part = 0; part < kTurned; ++part) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int at = 4 * (part * kPartPairs + e);
                if (turns_pair[part][e]) {
                    speed[part][e] = *reinterpret_cast<const float*>(from + at);
                    if (starts) {
                        turned_by[part][e] = *reinterpret_cast<const float*>(turns + at);
                        start[part][e] = *reinterpret_cast<const uint32_t*>(part_turns + at);
                    }
                }
            }
        }
        dt = *reinterpret_cast<const float*>(opaque(dts) + static_cast<int64_t>(step) * 4);
    }
    __device__ __forceinline__ void next_chunk() {
        constexpr int kSteps = Block::kDirection * kChunkSteps;
        if (kBothSides) {
            first.rows += static_cast<int64_t>(kSteps) * first.step;
        }
        second.rows += static_cast<int64_t>(kSteps) * second.step;
        speeds += static_cast<int64_t>(kSteps) * launch.speeds_step;
        dts += Block::kDirection * launch.values_step * 4;
        turns += Block::kDirection * launch.turns_step * 4;
        part_turns += Block::kDirection * launch.part_turns_step * 4;
        left -= kSteps;
    }

    // Turns a step's rows into a tile, and begins to load another one's, whose rows begin at `next`. Columns from dstate on
    // get zeros.
    __device__ __forceinline__ void turn_side(Side& side, const float2 (&cos_sin)[kTurned][2], T* tile, int place_of_step,
                                              const char* next) const {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            T* const to = tile + ((place_of_step ^ i * 2 * 8) + i * 2 * 64);  // a row's number is in its pieces' places
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const float2 one = unpack2<T>(side.words[i][part][0]), other = unpack2<T>(side.words[i][part][1]);
                float2 pairs[2] = {make_float2(one.x, other.x), make_float2(one.y, other.y)};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float2 bias = side.bias[i][part][e];
                    if constexpr (kTurnsAll) {
                        pairs[e] = turned(pairs[e], bias, cos_sin[part][e]);
                    } else {
                        pairs[e] = part == 0 ? turned(pairs[e], bias, cos_sin[0][e])
                                             : make_float2(pairs[e].x + bias.x, pairs[e].y + bias.y);
                    }
                }
                if (kStates == 128 || has[part]) {
                    *reinterpret_cast<uint2*>(to + part * (kMamba3ChunkRows * 64)) =
                        make_uint2(pack2<T>(pairs[0].x, pairs[0].y), pack2<T>(pairs[1].x, pairs[1].y));
                }
            }
            begin_words(side, next, i);
        }
    }
    // number: of the warp's steps. more: whether there is another one.
    __device__ __forceinline__ void turn(int number, T* tile, bool more) {
        float2 cos_sin[kTurned][2];
#pragma unroll
        for (int part = 0; part < kTurned; ++part) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& by = turned_by[part][e];
                const float before = number == 0 ? turns_of_count(__float_as_uint(by) + start[part][e]) : by;
                const float sum = fmaf(speed[part][e], dt, before);
                by = sum - rintf(sum);
                cos_sin[part][e] = make_float2(cos_fast(by * 6.2831853f), sin_fast(by * 6.2831853f));
            }
        }
        const int place_of_step = (place ^ number % 2 * (kRanks * 8)) + number * (kRanks * 64);
        const int next = (number + 1) % kWarpSteps;
        if (next == 0 && more) {
            next_chunk();
        }
        const int step = step_at(more ? next : number);  // behind the last one the same again
        begin_turns(step, more && next == 0);
        if (kBothSides) {
            turn_side(first, cos_sin, tile, place_of_step, rows_of(first, step));
        }
        turn_side(second, cos_sin, tile + Tiles::kQ, place_of_step, rows_of(second, step));
    }

    // Before the first chunk.
    __device__ __forceinline__ void begin() {
        const int step = step_at(0);
        begin_turns(step, true);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (kBothSides) {
                begin_words(first, rows_of(first, step), i);
            }
            begin_words(second, rows_of(second, step), i);
        }
    }
    // A chunk, whose tiles begin at `tile`. more: whether there is another one. begin_others: begins copies that will have come
    // at the end.
    template <typename Others>
    __device__ __forceinline__ void turn_chunk(T* tile, bool more, const Others& begin_others) {
        begin_others();
        cp_async_commit_group();
#pragma unroll 1
        for (int number = 0; number < kWarpSteps; ++number) {
            turn(number, tile, number + 1 < kWarpSteps || more);
        }
    }
};

#endif

}  // namespace mamba
