// One of the two warpgroups of forward/warpgroup.cuh rotates the rows of q and k of the next chunk. Here those of neighbouring
// pairs and one rank (SISO), copied into the tiles and rotated there; forward/rotate_steps.cuh has four ranks.
#pragma once

#include "mamba3/cuda/forward/warpgroup_block.cuh"

namespace mamba {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Half a warp takes a row: a lane has four columns of each 64. Rows are copied into the tiles and turned there: if they were on
// their way to registers, they would be waited for together with whatever else is, since waiting knows few kinds of loads.
// While they come, sines are found. The eight rows of a chunk are groups of four, or of two where angles turn all columns.
template <typename T, int kStates, bool kBothSides>
struct Mamba3PairRotator {
    static constexpr bool kAwaitsCopies = false;  // see rotate_mamba3_chunks
    static constexpr int kMost = 4;
    template <bool kMore>                                        // angles turn second pieces, too
    static constexpr int kTogether = kMore ? kMost / 2 : kMost;  // rows of a group
    static constexpr int kPieces = kStates / 64;
    // Bytes from q's tile to k's. Not both: k, which goes into the state.
    static constexpr int kToK = kBothSides ? kMamba3ChunkRows * kStates * static_cast<int>(sizeof(T)) : 0;
    static constexpr uint32_t kPieceBytes = kMamba3ChunkRows * 64 * sizeof(T);
    // A row's place, and what its number does to those of its pieces.
    static constexpr uint32_t kRowBytes = 64 * sizeof(T) + 16;
    const Mamba3WarpgroupLaunch& launch;

    // The lane's eight columns of the first chunk's first step.
    const char *q, *k;
    float2 speed[kMost][kPieces];  // of a group's rows; 0 where no angle turns the pair
    float dt[kMost];
    float2 turned_by[kPieces];
    // The turns before the chunk, and of the chunk before its part, which is half a warp's.
    uint2 before[kPieces], part[kPieces];
    // All lanes' places, to which a lane's are added when it loads: two registers each are more than it has.
    const char *speeds, *dts, *turns, *part_turns;  // of the first chunk
    const float* biases;                            // of the lane's first columns: q's, then k's
    int lane_bytes;   // to the lane's first columns of q and k, its first angles of speeds and turns
    int part_bytes;   // to the same of part_turns
    int place;        // of the lane's first row in a tile, in bytes
    int copy_place;   // the same of its eight columns
    int number;       // of the block's chunk
    int first_row;    // of the lane's eight
    int last_step;    // counted from the first chunk's first
    int columns;      // that exist from the lane's first one on
    int turns_last;   // and its angles of the last piece that has any
    bool turns_more;  // whether angles turn second pieces

    static __device__ __forceinline__ const char* eight_columns(const Mamba3Block& block, const void* data,
                                                                int64_t batch_stride, int64_t len_stride, int64_t group_stride,
                                                                int64_t first_step, int lane) {
        const int64_t at = block.range.row * batch_stride + first_step * len_stride + block.group * group_stride + 8 * lane;
        return static_cast<const char*>(data) + at * static_cast<int64_t>(sizeof(T));
    }

    __device__ __forceinline__ Mamba3PairRotator(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launched,
                                                 const Mamba3Block& block, const float* all_biases, int thread)
        : launch(launched), biases(all_biases + thread % 16 * 4) {
        const Mamba3Chunks& chunks = launch.chunks;
        const int row0 = thread / 16 * 8, lane = thread % 16, column = 4 * lane;
        turns_more = kPieces > 1 && p.nangles > 32;
        columns = opaque(static_cast<int>(p.dstate) - column);
        turns_last = opaque((turns_more ? 32 : 0) + 2 * lane < p.nangles ? 1 : 0);
#pragma unroll
        for (int e = 0; e < kPieces; ++e) {
            turned_by[e] = make_float2(0.0f, 0.0f);
            before[e] = part[e] = make_uint2(0u, 0u);
#pragma unroll
            for (int i = 0; i < kMost; ++i) {
                speed[i][e] = make_float2(0.0f, 0.0f);
            }
        }
        const int64_t first_step = block.first_step(chunks);
        q = nullptr;
        if (kBothSides) {
            q = eight_columns(block, p.q, p.q_batch_stride, p.q_len_stride, p.q_group_stride, first_step, lane);
        }
        k = eight_columns(block, p.k, p.k_batch_stride, p.k_len_stride, p.k_group_stride, first_step, lane);
        place = opaque((row0 * 64 + Mamba3XTile::at(0, column)) * static_cast<int>(sizeof(T)));
        copy_place = opaque((row0 * 64 + Mamba3XTile::at(0, 8 * lane)) * static_cast<int>(sizeof(T)));
        number = 0;
        speeds = reinterpret_cast<const char*>(chunks.speeds + mamba3_speeds_index(p, block.range.row, first_step, block.head));
        dts = reinterpret_cast<const char*>(mamba3_values(chunks, p.nheads, block.slot, block.head, kMamba3Dt));
        turns = reinterpret_cast<const char*>(chunks.turns + mamba3_turns_index(p, block.slot, block.head));
        part_turns =
            reinterpret_cast<const char*>(chunks.part_turns + mamba3_part_turns_index(p, chunks, block.slot, 0, block.head));
        lane_bytes = 8 * lane;
        part_bytes = row0 / static_cast<int>(chunks.part) * launch.turns_part + lane_bytes;
        first_row = row0;
        last_step = static_cast<int>(block.range.begin + block.range.seqlen - first_step) - 1;
    }

    __device__ __forceinline__ bool exists(int piece) const { return 64 * piece < columns; }
    template <bool kMore>
    __device__ __forceinline__ bool turns_piece(int piece) const {
        return kMore ? piece == 0 || turns_last != 0 : piece == 0 && turns_last != 0;
    }

    // A step that does not exist gets the last one's rows; its weights are zero.
    __device__ __forceinline__ int step_of(int row) const {
        const int own = first_row + row;
        return own < last_step ? own : last_step;
    }
    // Begins to copy the first or last four of a chunk's rows, q's and k's, into the tiles. kVectors: eight columns a lane,
    // which pass the L1 by; `to` is of the lane's in its first row. Else the columns that it turns.
    template <bool kVectors>
    __device__ __forceinline__ void begin_rows(int chunk, int half, uint32_t to) const {
        const auto begin_row = [&](const char* from, uint32_t at) {
            if constexpr (kVectors) {
                cp_async_shared<16>(at, from);
            } else {
#pragma unroll
                for (int e = 0; e < kPieces; ++e) {
                    if (exists(e)) {
                        cp_async_shared<8>(at + e * kPieceBytes, from - lane_bytes + e * 64 * static_cast<int>(sizeof(T)));
                    }
                }
            }
        };
#pragma unroll
        for (int i = 4 * half; i < 4 * half + 4; ++i) {
            const int step = step_of(chunk * kMamba3ChunkRows + i);
            const uint32_t at = to ^ i * kRowBytes;
            if (kBothSides) {
                begin_row(row_at(opaque(q), step, launch.q_step), at);
            }
            begin_row(row_at(opaque(k), step, launch.k_step), at + kToK);
        }
    }
    // All of them, in two groups of copies, the second of which is left open.
    template <bool kVectors>
    __device__ __forceinline__ void begin_all_rows(int chunk, uint32_t to) const {
        begin_rows<kVectors>(chunk, 0, to);
        cp_async_commit_group();
        begin_rows<kVectors>(chunk, 1, to);
    }
    // Begins to load how fast row `i` of the group whose first one is `row` turns.
    template <bool kMore>
    __device__ __forceinline__ void begin_speeds(int row, int i) {
        const char* const at = row_at(speeds, step_of(row + i), launch.speeds_step) + opaque(lane_bytes);
#pragma unroll
        for (int e = 0; e < kPieces; ++e) {
            if (turns_piece<kMore>(e)) {
                speed[i][e] = *reinterpret_cast<const float2*>(at + 128 * e);
            }
        }
    }
    // What a group's rows share.
    template <bool kMore>
    __device__ __forceinline__ void begin_group(int chunk, int group) {
        const char* const own_dts = row_at(dts, chunk, static_cast<int>(launch.values_step * 4)) + opaque(4 * first_row) +
                                    group * (4 * kTogether<kMore>);
        if constexpr (kMore) {
            const float2 two = *reinterpret_cast<const float2*>(own_dts);
            dt[0] = two.x;
            dt[1] = two.y;
        } else {
            const float4 four = *reinterpret_cast<const float4*>(own_dts);
            dt[0] = four.x;
            dt[1] = four.y;
            dt[2] = four.z;
            dt[3] = four.w;
        }
        if (group == 0) {
            const char* const chunk_turns = row_at(turns, chunk, static_cast<int>(launch.turns_step * 4)) + opaque(lane_bytes);
            const char* const own_turns =
                row_at(part_turns, chunk, static_cast<int>(launch.part_turns_step * 4)) + opaque(part_bytes);
#pragma unroll
            for (int e = 0; e < kPieces; ++e) {
                if (turns_piece<kMore>(e)) {
                    before[e] = *reinterpret_cast<const uint2*>(chunk_turns + 128 * e);
                    part[e] = *reinterpret_cast<const uint2*>(own_turns + 128 * e);
                }
            }
        }
    }

    // Of an angle's pair of a row: its bias added, turned.
    static __device__ __forceinline__ uint32_t turn_word(uint32_t word, float bias_x, float bias_y, float2 cos_sin) {
        const float2 pair = rotate_pair(unpack2<T>(word), make_float2(bias_x, bias_y), cos_sin);
        return pack2<T>(pair.x, pair.y);
    }
    static __device__ __forceinline__ uint32_t add_to_word(uint32_t word, float bias_x, float bias_y) {
        const float2 pair = unpack2<T>(word);
        return pack2<T>(pair.x + bias_x, pair.y + bias_y);
    }
    // Turns two rows of q or k, where they lie. kMore: the second piece is turned too.
    template <bool kMore>
    __device__ __forceinline__ void turn_side(const float* side_biases, const float2 (&cos_sin)[2][kPieces][2],
                                              const uint32_t (&at)[2], uint32_t on) const {
        uint2 words[2][kPieces];
#pragma unroll
        for (int e = 0; e < kPieces; ++e) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                words[j][e] = ld_shared_v2_b32(at[j] + (on + e * kPieceBytes));
            }
        }
#pragma unroll
        for (int e = 0; e < kPieces; ++e) {
            const float4 bias = *reinterpret_cast<const float4*>(side_biases + 64 * e);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint2 own = words[j][e];
                if (e == 0 || kMore) {
                    own.x = turn_word(own.x, bias.x, bias.y, cos_sin[j][e][0]);
                    own.y = turn_word(own.y, bias.z, bias.w, cos_sin[j][e][1]);
                } else {
                    own.x = add_to_word(own.x, bias.x, bias.y);
                    own.y = add_to_word(own.y, bias.z, bias.w);
                }
                if (exists(e)) {
                    st_shared_v2_b32(at[j] + (on + e * kPieceBytes), own);
                }
            }
        }
    }
    // Turns a group's rows in the tiles of q and k, at `tile` for the lane's first one, and begins to load the speeds of the
    // next group's, in next_chunk.
    template <bool kMore>
    __device__ __forceinline__ void turn(int group, uint32_t tile, int next, int next_chunk) {
        constexpr int kOwn = kTogether<kMore>;
        if (group == 0) {
#pragma unroll
            for (int e = 0; e < (kMore ? kPieces : 1); ++e) {
                turned_by[e] = make_float2(turns_of_count(before[e].x + part[e].x), turns_of_count(before[e].y + part[e].y));
            }
        }
        float2 cos_sin[kOwn / 2][2][kPieces][2];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
            for (int e = 0; e < (kMore ? kPieces : 1); ++e) {
                cos_sin[i / 2][i % 2][e][0] = cos_sin_after_step(turned_by[e].x, speed[i][e].x, dt[i]);
                cos_sin[i / 2][i % 2][e][1] = cos_sin_after_step(turned_by[e].y, speed[i][e].y, dt[i]);
            }
        }
        __syncwarp();  // what is asked for from here on is not waited for before the next group
        begin_group<kMore>(next_chunk, next);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            begin_speeds<kMore>(next_chunk * kMamba3ChunkRows + next * kOwn, i);
        }
        if (group == 0) {
            cp_async_wait_group<1>();
        } else if (kOwn * group == kMost) {
            cp_async_wait_group<0>();
        }
        __syncwarp();  // other lanes have copied, too
#pragma unroll
        for (int i = 0; i < kOwn; i += 2) {
            uint32_t at[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                at[j] = tile ^ kOwn * group * kRowBytes ^ (i + j) * kRowBytes;
            }
            if (kBothSides) {
                turn_side<kMore>(biases, cos_sin[i / 2], at, 0);
            }
            turn_side<kMore>(biases + kStates, cos_sin[i / 2], at, kToK);
        }
    }

    // Before the first chunk.
    __device__ __forceinline__ void begin() {
        if (kPieces > 1 && turns_more) {
            begin<true>();
        } else {
            begin<false>();
        }
    }
    template <bool kMore>
    __device__ __forceinline__ void begin() {
        begin_group<kMore>(0, 0);
#pragma unroll
        for (int i = 0; i < kTogether<kMore>; ++i) {
            begin_speeds<kMore>(0, i);
        }
    }
    // A chunk, whose tiles begin at `tile`. more: whether there is another one, else this one's are loaded again. begin_others:
    // begins copies that will have come at the end.
    template <typename Others>
    __device__ __forceinline__ void turn_chunk(T* tile, bool more, const Others& begin_others) {
        const uint32_t tiles = shared_address(tile), to = tiles + place;
        const int chunk = launch.direction * number;
        if (kPieces > 1 && launch.vectors != 0) {
            begin_all_rows<true>(chunk, tiles + copy_place);
        } else {
            begin_all_rows<false>(chunk, to);
        }
        begin_others();
        cp_async_commit_group();
        if (kPieces > 1 && turns_more) {
            turn_groups<true>(to, more);
        } else {
            turn_groups<false>(to, more);
        }
        ++number;
    }
    template <bool kMore>
    __device__ __forceinline__ void turn_groups(uint32_t to, bool more) {
        constexpr int kGroups = 8 / kTogether<kMore>;
#pragma unroll 1  // or sines are found behind the wait for rows
        for (int group = 0; group < kGroups; ++group) {
            const int next = (group + 1) % kGroups;
            turn<kMore>(group, to, next, launch.direction * (next == 0 && more ? number + 1 : number));
        }
    }
};

#endif

}  // namespace mamba
