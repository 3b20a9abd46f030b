// The rows of q and k of four ranks, whose pairs lie half of dstate apart, turned on their way from memory: see
// turn_warpgroup.cuh.
#pragma once

#include "mamba3/cuda/warpgroup_block.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A lane has two neighbouring pairs of each row, which become neighbours in the tile (element_of_pair_column). A warp takes
// four steps one after the other, all ranks of q and k, which share the sines of their step. As soon as a row is turned, that
// of the next step is on its way. All biases stay in registers.
template <typename T, int kStates, Mamba3Pass kPass>
struct Mamba3RanksTurner {
    static constexpr int kRanks = 4, kRanksLog2 = 2;
    static constexpr int kWarpSteps = 16 / kRanks, kChunkSteps = kMamba3ChunkRows / kRanks;
    static constexpr bool kFromEnd = kPass == kMamba3After;
    static constexpr bool kBothSides = mamba3_finds_rows(kPass);  // else what goes into the state: k, or q from the end
    using Tiles = Mamba3WarpgroupTiles<kStates, kPass>;
    using Block = Mamba3Block<kFromEnd>;
    const Mamba3WarpgroupLaunch& launch;

    // One of q and k.
    struct Side {
        uint32_t words[kRanks][2];  // of the step that is on its way
        float2 bias[kRanks][2];     // of the pairs
        const char* rows;           // of the chunk's first step and rank, the lane's first word
        int step, rank;             // bytes
    };
    Side first, second;      // q if both are there; k, or q from the end
    float speed[2], dt;      // of the step that is on its way; speed: 0 where no angle turns the pair
    uint32_t start[2];       // what the chunk turns before the warp's first step
    const char* speeds;      // of the chunk's first step, the lane's angles
    const char* dts;         // of the chunk's first step
    const char* turns;       // of the lane's angles
    const char* part_turns;  // before the warp's first step
    int first_step;          // the warp's
    int left;                // steps in the chunk, or more
    int half;                // bytes from a pair's first one to its second one
    int place;               // elements: the lane's in the warp's first row
    bool has;                // pairs
    bool turns_pair[2];
    float turned_by[2];  // at first the bits of the count before the chunk

    __device__ __forceinline__ void set_side(Side& side, const MambaMamba3& p, const Block& block, const void* data,
                                             int64_t batch_stride, int64_t len_stride, int64_t group_stride, const float* bias,
                                             int step, int rank, int64_t begin, int pair) const {
        const int64_t at = block.range.row * batch_stride + begin * len_stride + block.group * group_stride + pair;
        side.rows = static_cast<const char*>(data) + at * static_cast<int64_t>(sizeof(T));
        side.step = step;
        side.rank = rank;
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            const float* const from = bias + (block.head * kRanks + r) * p.dstate + pair;
            const float2 none = make_float2(0.0f, 0.0f);
            const float2 one = has ? *reinterpret_cast<const float2*>(from) : none;
            const float2 other = has ? *reinterpret_cast<const float2*>(from + p.dstate / 2) : none;
            side.bias[r][0] = make_float2(one.x, other.x);
            side.bias[r][1] = make_float2(one.y, other.y);
            side.words[r][0] = side.words[r][1] = 0u;
        }
    }

    __device__ __forceinline__ Mamba3RanksTurner(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launched,
                                                 const Block& block, int thread)
        : launch(launched), first_step(opaque(thread / 32 * kWarpSteps)), half(static_cast<int>(p.dstate)) {
        static_assert(sizeof(T) == 2, "half of dstate's elements take dstate bytes");
        const Mamba3Chunks& chunks = launch.chunks;
        const int lane = thread % 32;
        has = 4 * lane < p.dstate;
        const int pair = has ? 2 * lane : 0;
        speed[0] = speed[1] = dt = turned_by[0] = turned_by[1] = 0.0f;
        start[0] = start[1] = 0u;
        turns_pair[0] = has && pair < p.nangles;
        turns_pair[1] = has && pair + 1 < p.nangles;
        place = opaque(Mamba3XTile::at(first_step * kRanks, 4 * lane));
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
        const int angle = turns_pair[0] ? pair : 0;
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
    __device__ __forceinline__ void begin_words(Side& side, const char* rows, int r) const {
        const char* const at = rows + static_cast<int64_t>(r) * side.rank;
        const char* const other = at + half;
        if (has) {
            side.words[r][0] = *reinterpret_cast<const uint32_t*>(at);
            side.words[r][1] = *reinterpret_cast<const uint32_t*>(other);
        }
    }
    __device__ __forceinline__ void begin_turns(int step, bool starts) {
        const char* const from = opaque(speeds) + static_cast<int64_t>(step) * opaque(launch.speeds_step);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (turns_pair[e]) {
                speed[e] = *reinterpret_cast<const float*>(from + 4 * e);
                if (starts) {
                    turned_by[e] = *reinterpret_cast<const float*>(turns + 4 * e);
                    start[e] = *reinterpret_cast<const uint32_t*>(part_turns + 4 * e);
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
    __device__ __forceinline__ void turn_side(Side& side, const float2 (&cos_sin)[2], T* tile, const char* next) const {
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            const float2 one = unpack2<T>(side.words[r][0]), other = unpack2<T>(side.words[r][1]);
            const float2 left_pair = turned(make_float2(one.x, other.x), side.bias[r][0], cos_sin[0]);
            const float2 right_pair = turned(make_float2(one.y, other.y), side.bias[r][1], cos_sin[1]);
            if (kStates == 128 || has) {
                // A row's number is in its pieces' places.
                T* const to = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(tile) ^ static_cast<uintptr_t>(r * 16)) + r * 64;
                *reinterpret_cast<uint2*>(to) =
                    make_uint2(pack2<T>(left_pair.x, left_pair.y), pack2<T>(right_pair.x, right_pair.y));
            }
            begin_words(side, next, r);
        }
    }
    // number: of the warp's steps. more: whether there is another one.
    __device__ __forceinline__ void turn(int number, T* tile, bool more) {
        float2 cos_sin[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float before = number == 0 ? turns_of_count(__float_as_uint(turned_by[e]) + start[e]) : turned_by[e];
            const float sum = fmaf(speed[e], dt, before);
            turned_by[e] = sum - rintf(sum);
            cos_sin[e] = make_float2(cos_fast(turned_by[e] * 6.2831853f), sin_fast(turned_by[e] * 6.2831853f));
        }
        T* const to = tile + ((place ^ number % 2 * (kRanks * 8)) + number * (kRanks * 64));
        const int next = (number + 1) % kWarpSteps;
        if (next == 0 && more) {
            next_chunk();
        }
        const int step = step_at(more ? next : number);  // behind the last one the same again
        begin_turns(step, more && next == 0);
        if (kBothSides) {
            turn_side(first, cos_sin, to, rows_of(first, step));
        }
        turn_side(second, cos_sin, to + Tiles::kQ, rows_of(second, step));
    }

    // Before the first chunk.
    __device__ __forceinline__ void begin() {
        const int step = step_at(0);
        begin_turns(step, true);
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            if (kBothSides) {
                begin_words(first, rows_of(first, step), r);
            }
            begin_words(second, rows_of(second, step), r);
        }
    }
    // A chunk, whose tiles begin at `tile`. more: whether there is another one.
    __device__ __forceinline__ void turn_chunk(T* tile, bool more) {
#pragma unroll 1
        for (int number = 0; number < kWarpSteps; ++number) {
            turn(number, tile, number + 1 < kWarpSteps || more);
        }
    }
};

#endif

}  // namespace mamba
