// The rows of q and k of neighbouring pairs, turned on their way from memory: see turn_warpgroup.cuh. There is one rank.
#pragma once

#include "mamba3/cuda/warpgroup_block.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Half a warp takes a row: a lane has four columns of each 64. Of its eight rows of a chunk it takes two at a time: while it
// turns q's, k's are on their way, and the next two rows of q while it turns k's.
template <typename T, int kStates, Mamba3Pass kPass>
struct Mamba3PairTurner {
    static constexpr int kTogether = 2;
    static constexpr int kGroups = 8 / kTogether;
    static constexpr int kPieces = kStates / 64;
    static constexpr bool kFromEnd = kPass == kMamba3After;
    static constexpr bool kBothSides = mamba3_finds_rows(kPass);  // else what goes into the state: k, or q from the end
    using Tiles = Mamba3WarpgroupTiles<kStates, kPass>;
    using Block = Mamba3Block<kFromEnd>;
    const Mamba3WarpgroupLaunch& launch;

    // One of q and k.
    struct Side {
        uint2 words[kTogether][kPieces];  // of rows that are on their way
        float4 bias[kPieces];
        const char* rows;  // of the chunk's first step, the lane's first columns
    };
    Side first, second;                // q if both are there; k, or q from the end
    float2 speed[kTogether][kPieces];  // of rows that are on their way; 0 where no angle turns the pair
    float2 dt;
    float2 turned_by[kPieces];
    uint2 start[kPieces];  // the turns before the chunk's part, which is half a warp's
    const char* speeds;    // of the lane's first angles
    const char* dts;       // of the lane's first step
    const char *turns, *part_turns;
    int first_row;  // of the lane's eight, and its place in a tile, in elements
    int place;
    int left;           // steps in the chunk, or more
    bool has[kPieces];  // columns
    bool turns_piece[kPieces];
    bool turns_more;  // whether angles turn second pieces

    __device__ __forceinline__ void set_side(Side& side, const MambaMamba3& p, const Block& block, const void* data,
                                             int64_t batch_stride, int64_t len_stride, int64_t group_stride, const float* bias,
                                             int64_t first_step, int column) const {
        const int64_t at = block.range.row * batch_stride + first_step * len_stride + block.group * group_stride;
        side.rows = static_cast<const char*>(data) + (at + (has[0] ? column : 0)) * static_cast<int64_t>(sizeof(T));
#pragma unroll
        for (int e = 0; e < kPieces; ++e) {
            const float* const from = bias + block.head * p.dstate + 64 * e + column;
            side.bias[e] = has[e] ? *reinterpret_cast<const float4*>(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            side.words[0][e] = side.words[1][e] = make_uint2(0u, 0u);
        }
    }

    __device__ __forceinline__ Mamba3PairTurner(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launched, const Block& block,
                                                int thread)
        : launch(launched) {
        const Mamba3Chunks& chunks = launch.chunks;
        const int row0 = thread / 16 * 8, lane = thread % 16, column = 4 * lane;
#pragma unroll
        for (int e = 0; e < kPieces; ++e) {
            has[e] = 64 * e + column < p.dstate;
            turns_piece[e] = 32 * e + 2 * lane < p.nangles;
            turned_by[e] = make_float2(0.0f, 0.0f);
            start[e] = make_uint2(0u, 0u);
            speed[0][e] = speed[1][e] = make_float2(0.0f, 0.0f);
        }
        turns_more = kPieces > 1 && p.nangles > 32;
        const int64_t first_step = block.first_step(chunks);
        const auto set_q = [&](Side& side) {
            set_side(side, p, block, p.q, p.q_batch_stride, p.q_len_stride, p.q_group_stride, p.q_bias, first_step, column);
        };
        if (kBothSides) {
            set_q(first);
        }
        if (kFromEnd) {
            set_q(second);
        } else {
            set_side(second, p, block, p.k, p.k_batch_stride, p.k_len_stride, p.k_group_stride, p.k_bias, first_step, column);
        }
        place = opaque(row0 * 64 + Mamba3XTile::at(0, column));
        const int angle = turns_piece[0] ? 2 * lane : 0;
        speeds = reinterpret_cast<const char*>(chunks.speeds + mamba3_speeds_index(p, block.range.row, first_step, block.head) +
                                               angle);
        dts = reinterpret_cast<const char*>(mamba3_values(chunks, p.nheads, block.slot, block.head, kMamba3Dt) + row0);
        turns = reinterpret_cast<const char*>(chunks.turns + mamba3_turns_index(p, block.slot, block.head) + angle);
        const int64_t part = row0 / chunks.part;
        part_turns = reinterpret_cast<const char*>(chunks.part_turns +
                                                   mamba3_part_turns_index(p, chunks, block.slot, part, block.head) + angle);
        first_row = row0;
        left = static_cast<int>(block.range.begin + block.range.seqlen - first_step);
    }

    // Rows of steps that do not exist count nothing: they get the last one's. What is opaque is so for a multiplication in one
    // instruction, and for the compiler not to keep sums of pointers.
    __device__ __forceinline__ void find_steps(int (&steps)[kTogether], int group) const {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int step = first_row + kTogether * group + i;
            steps[i] = opaque(step < left ? step : left - 1);
        }
    }
    __device__ __forceinline__ void begin_words(Side& side, int step, const int (&steps)[kTogether]) const {
        const char* const rows = opaque(side.rows);
        const int stride = opaque(step);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const char* const at = rows + static_cast<int64_t>(steps[i]) * stride;
#pragma unroll
            for (int e = 0; e < kPieces; ++e) {
                if (has[e]) {
                    side.words[i][e] = *reinterpret_cast<const uint2*>(at + e * 64 * static_cast<int>(sizeof(T)));
                }
            }
        }
    }
    __device__ __forceinline__ void begin_turns(const int (&steps)[kTogether], int group) {
        const char* const from = opaque(speeds);
        const int stride = opaque(launch.speeds_step);
#pragma unroll
        for (int e = 0; e < kPieces; ++e) {
            if (turns_piece[e]) {
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    speed[i][e] = *reinterpret_cast<const float2*>(from + static_cast<int64_t>(steps[i]) * stride + 128 * e);
                }
                if (group == 0) {
                    const uint2 before = *reinterpret_cast<const uint2*>(turns + 128 * e);
                    const uint2 part = *reinterpret_cast<const uint2*>(part_turns + 128 * e);
                    start[e] = make_uint2(before.x + part.x, before.y + part.y);
                }
            }
        }
        dt = *reinterpret_cast<const float2*>(dts + group * (4 * kTogether));
    }

    __device__ __forceinline__ int second_step() const { return kFromEnd ? launch.q_step : launch.k_step; }

    // Of an angle's pair of a row: its bias added, turned.
    static __device__ __forceinline__ uint32_t turn_word(uint32_t word, float bias_x, float bias_y, float2 cos_sin) {
        const float2 pair = turned(unpack2<T>(word), make_float2(bias_x, bias_y), cos_sin);
        return pack2<T>(pair.x, pair.y);
    }
    static __device__ __forceinline__ uint32_t add_to_word(uint32_t word, float bias_x, float bias_y) {
        const float2 pair = unpack2<T>(word);
        return pack2<T>(pair.x + bias_x, pair.y + bias_y);
    }
    // to: where the rows go. kMore: the second piece is turned too.
    template <bool kMore>
    __device__ __forceinline__ void turn_side(const Side& side, const float2 (&cos_sin)[kTogether][kPieces][2], T* tile,
                                              const int (&to)[kTogether]) const {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
            for (int e = 0; e < kPieces; ++e) {
                uint2 words = side.words[i][e];
                const float4 bias = side.bias[e];
                if (e == 0 || kMore) {
                    words.x = turn_word(words.x, bias.x, bias.y, cos_sin[i][e][0]);
                    words.y = turn_word(words.y, bias.z, bias.w, cos_sin[i][e][1]);
                } else {
                    words.x = add_to_word(words.x, bias.x, bias.y);
                    words.y = add_to_word(words.y, bias.z, bias.w);
                }
                if (has[e]) {
                    *reinterpret_cast<uint2*>(tile + to[i] + e * (kMamba3ChunkRows * 64)) = words;
                }
            }
        }
    }
    static __device__ __forceinline__ float2 turn_on(float& turned_by, float speed, float dt) {
        const float sum = fmaf(speed, dt, turned_by);
        turned_by = sum - rintf(sum);
        return make_float2(cos_fast(turned_by * 6.2831853f), sin_fast(turned_by * 6.2831853f));
    }
    // Turns two rows into the tiles of q and k, the first of which is `tile`, and begins to load the next two, if there are
    // any.
    template <bool kMore>
    __device__ __forceinline__ void turn(int group, T* tile, bool more) {
        float2 cos_sin[kTogether][kPieces][2];
#pragma unroll
        for (int e = 0; e < kPieces; ++e) {
            if (e == 0 || kMore) {
                if (group == 0) {
                    turned_by[e] = make_float2(turns_of_count(start[e].x), turns_of_count(start[e].y));
                }
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const float own = i == 0 ? dt.x : dt.y;
                    cos_sin[i][e][0] = turn_on(turned_by[e].x, speed[i][e].x, own);
                    cos_sin[i][e][1] = turn_on(turned_by[e].y, speed[i][e].y, own);
                }
            }
        }
        const int next = (group + 1) % kGroups;
        if (next == 0) {
            next_chunk();
        }
        int steps[kTogether], to[kTogether];
        find_steps(steps, next);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            to[i] = place ^ (kTogether * group + i) * 72;  // a row's place, and what its number does to those of its pieces
        }
        if (more) {
            begin_turns(steps, next);
        }
        if (kBothSides) {
            turn_side<kMore>(first, cos_sin, tile, to);
            if (more) {
                begin_words(first, launch.q_step, steps);
            }
        }
        turn_side<kMore>(second, cos_sin, tile + Tiles::kQ, to);
        if (more) {
            begin_words(second, second_step(), steps);
        }
    }
    __device__ __forceinline__ void next_chunk() {
        constexpr int kSteps = Block::kDirection * kMamba3ChunkRows;
        if (kBothSides) {
            first.rows += static_cast<int64_t>(kSteps) * launch.q_step;
        }
        second.rows += static_cast<int64_t>(kSteps) * second_step();
        speeds += static_cast<int64_t>(kSteps) * launch.speeds_step;
        dts += Block::kDirection * launch.values_step * 4;
        turns += Block::kDirection * launch.turns_step * 4;
        part_turns += Block::kDirection * launch.part_turns_step * 4;
        left -= kSteps;
    }

    // Before the first chunk.
    __device__ __forceinline__ void begin() {
        int steps[kTogether];
        find_steps(steps, 0);
        begin_turns(steps, 0);
        if (kBothSides) {
            begin_words(first, launch.q_step, steps);
        }
        begin_words(second, second_step(), steps);
    }
    // A chunk, whose tiles begin at `tile`. more: whether there is another one.
    __device__ __forceinline__ void turn_chunk(T* tile, bool more) {
#pragma unroll 1
        for (int group = 0; group < kGroups; ++group) {
            const bool next_exists = group + 1 < kGroups || more;
            if (kPieces > 1 && turns_more) {
                turn<true>(group, tile, next_exists);
            } else {
                turn<false>(group, tile, next_exists);
            }
        }
    }
};

#endif

}  // namespace mamba
