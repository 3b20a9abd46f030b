// The rows of q and k of four ranks and 128 states (MIMO), whose pairs lie half of dstate apart, rotated on their way to the
// tiles.
#pragma once

#include "mamba3/cuda/forward/warpgroup_block.cuh"

namespace mamba {

constexpr int kMamba3RankStates = 128;
constexpr int kMamba3RankSteps = kMamba3ChunkRows / 4;  // of a chunk

// Of a warp in shared memory, bytes: the rows of q and k of two steps, or of q of four; sines and cosines of 32 pairs in four
// steps; speeds of the next chunk's steps, what the chunk turns before and its steps before the warp's, and dt.
template <int kSides>
struct Mamba3StepsShared {
    static constexpr int kSteps = 4, kPairs = 32, kSlots = kSides == 1 ? 4 : 2;
    static constexpr int kRow = kMamba3RankStates * 2, kSlot = kSides * 4 * kRow;
    static constexpr int kAnglesAt = kSlots * kSlot;
    static constexpr int kInputsAt = kAnglesAt + kSteps * kPairs * 8, kInputs = kSteps + 2;
    static constexpr int kDtAt = kInputsAt + kInputs * kPairs * 4;
    static constexpr int kBytes = kDtAt + kSteps * 4;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A warp has four steps of a chunk, one after the other: eight lanes a rank, four neighbouring pairs of each 64 columns of the
// tile a lane (element_of_pair_column), q's and k's. Angles turn 32 pairs at most: none of the later columns is turned. Rows
// come to shared memory two steps before they are turned, of one side a chunk before. Before a chunk's rows, each lane finds
// sine and cosine of one pair in all four steps, for the whole warp. What all lanes share is the same in all of them for the
// compiler too, which keeps it in registers of the warp: lanes have none left.
template <typename T, bool kBothSides>
struct Mamba3StepRotator {
    static constexpr bool kByRanks = kBothSides;       // the order of a tile's rows, else by steps
    static constexpr int kSides = kBothSides ? 2 : 1;  // else k, which goes into the state
    static constexpr bool kAwaitsCopies = true;        // see rotate_mamba3_chunks
    static constexpr int kRanks = 4, kStates = kMamba3RankStates;
    static constexpr int kParts = kStates / 64;        // of the columns, the first of which angles turn
    static constexpr int kPartPairs = 32, kPairs = 4;  // of a part, and a lane's of it
    static constexpr int kWarpSteps = 16 / kRanks, kChunkSteps = kMamba3ChunkRows / kRanks;
    using Shared = Mamba3StepsShared<kSides>;
    const Mamba3WarpgroupLaunch& launch;

    float2 bias[kSides][kParts][kPairs];  // of q's and k's pairs
    int place;                            // elements: the lane's in its first row
    // Bytes. Odd ranks' pieces of a part of the columns lie where the other part's are, in other banks than those of even
    // ranks.
    int words_place[kParts];  // in a slot, the lane's first words
    int copy_place;           // what it copies first: 16 bytes of a rank
    int q_lane, k_lane;       // these, from a step's first row on
    // Of all lanes: of the chunk's first step.
    const char *q, *k;
    const char *speeds, *dts, *turns, *part_turns;
    unsigned char* shared;  // the warp's
    int first_step;         // the warp's
    int left;               // steps in the chunk, or more
    int angles;

    __device__ __forceinline__ Mamba3StepRotator(const MambaMamba3& p, const Mamba3WarpgroupLaunch& launched,
                                                 const Mamba3Block& block, unsigned char* all_shared, int thread)
        : launch(launched), angles(static_cast<int>(p.nangles)) {
        static_assert(sizeof(T) == 2, "half of dstate's elements take dstate bytes");
        const Mamba3Chunks& chunks = launch.chunks;
        const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
        shared = all_shared + warp * Shared::kBytes;
        first_step = warp * kWarpSteps;
        const int rank = thread % 32 / 8, lane = thread % 8, own = thread % 32;
        const int pair = kPairs * lane;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int side = 0; side < kSides; ++side) {
                const float* const from = (kBothSides && side == 0 ? p.q_bias : p.k_bias) +
                                          (block.head * kRanks + rank) * kStates + part * kPartPairs + pair;
#pragma unroll
                for (int e = 0; e < kPairs; ++e) {
                    bias[side][part][e] = make_float2(from[e], from[e + kStates / 2]);
                }
            }
        }
        place = opaque(Mamba3XTile::at(kByRanks ? rank * kChunkSteps + first_step : first_step * kRanks + rank, 8 * lane));
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            words_place[part] = rank * Shared::kRow + (part ^ rank % 2) * kPartPairs * 2 + pair * 2;
        }
        const int odd = own / 16, piece = own % 16;
        copy_place = odd * Shared::kRow + (piece ^ odd * 4) * 16;
        q_lane = odd * launch.q_rank + piece * 16;
        k_lane = odd * launch.k_rank + piece * 16;
        const int64_t begin = block.first_step(chunks);
        q = static_cast<const char*>(p.q) +
            (block.range.row * p.q_batch_stride + begin * p.q_len_stride + block.group * p.q_group_stride) * 2;
        k = static_cast<const char*>(p.k) +
            (block.range.row * p.k_batch_stride + begin * p.k_len_stride + block.group * p.k_group_stride) * 2;
        float* const inputs = reinterpret_cast<float*>(shared + Shared::kInputsAt) + own;
        if (own >= p.nangles) {  // no angle turns the pair
#pragma unroll
            for (int i = 0; i < Shared::kInputs; ++i) {
                inputs[i * kPartPairs] = 0.0f;
            }
        }
        speeds = reinterpret_cast<const char*>(chunks.speeds + mamba3_speeds_index(p, block.range.row, begin, block.head));
        dts = reinterpret_cast<const char*>(mamba3_values(chunks, p.nheads, block.slot, block.head, kMamba3Dt) + first_step);
        turns = reinterpret_cast<const char*>(chunks.turns + mamba3_turns_index(p, block.slot, block.head));
        part_turns = reinterpret_cast<const char*>(
            chunks.part_turns + mamba3_part_turns_index(p, chunks, block.slot, first_step >> launch.part_log2, block.head));
        left = static_cast<int>(block.range.begin + block.range.seqlen - begin);
    }

    static __device__ __forceinline__ int own_lane() { return opaque(static_cast<int>(threadIdx.x) % 32); }
    // Steps that do not exist count nothing: they get the last one's rows.
    __device__ __forceinline__ int step_at(int number) const {
        const int step = first_step + number;
        return step < left ? step : left - 1;
    }
    // Begins to copy the rows of one of the warp's steps, where no lane reads any more.
    __device__ __forceinline__ void begin_rows(int number) const {
        const int step = step_at(number);
        unsigned char* const to = shared + number % Shared::kSlots * Shared::kSlot + copy_place;
        unsigned char* const to_k = to + (kSides - 1) * kRanks * Shared::kRow;
        const char* const from_q = opaque(q + static_cast<int64_t>(step) * launch.q_step + q_lane);
        const char* const from_k = opaque(k + static_cast<int64_t>(step) * launch.k_step + k_lane);
        if constexpr (kBothSides) {
            cp_async<16>(to, from_q, true);
            cp_async<16>(to + 2 * Shared::kRow, from_q + 2 * launch.q_rank, true);
        }
        cp_async<16>(to_k, from_k, true);
        cp_async<16>(to_k + 2 * Shared::kRow, from_k + 2 * launch.k_rank, true);
    }
    // Begins to copy what the sines and cosines of the chunk come from that the pointers are at.
    __device__ __forceinline__ void begin_turns() const {
        const int own = own_lane();
        float* const to = reinterpret_cast<float*>(shared + Shared::kInputsAt) + own;
        if (own < kWarpSteps) {
            cp_async_4(to + Shared::kInputs * kPartPairs, dts + own * 4);
        }
        if (own < angles) {
#pragma unroll
            for (int i = 0; i < kWarpSteps; ++i) {
                cp_async_4(to + i * kPartPairs, speeds + static_cast<int64_t>(step_at(i)) * launch.speeds_step + own * 4);
            }
            cp_async_4(to + kWarpSteps * kPartPairs, turns + own * 4);
            cp_async_4(to + (kWarpSteps + 1) * kPartPairs, part_turns + own * 4);
        }
    }
    __device__ __forceinline__ void next_chunk() {
        const int steps = launch.direction * kChunkSteps;
        q += static_cast<int64_t>(steps) * launch.q_step;
        k += static_cast<int64_t>(steps) * launch.k_step;
        speeds += static_cast<int64_t>(steps) * launch.speeds_step;
        dts += launch.direction * launch.values_step * 4;
        turns += launch.direction * launch.turns_step * 4;
        part_turns += launch.direction * launch.part_turns_step * 4;
        left -= steps;
    }

    // Where a step's sines and cosines of four pairs lie: two pairs, and 32 floats on the other two.
    static __device__ __forceinline__ int place_of_angle(int pair) { return pair % 4 / 2 * 32 + pair / 4 * 4 + pair % 2 * 2; }
    // When what they come from is there.
    __device__ __forceinline__ void find_angles() const {
        const unsigned own = static_cast<unsigned>(own_lane());
        float* const to = reinterpret_cast<float*>(shared + Shared::kAnglesAt) + place_of_angle(own);
        const float* const from = reinterpret_cast<const float*>(shared + Shared::kInputsAt) + own;
        const float4 dts = *reinterpret_cast<const float4*>(shared + Shared::kDtAt);
        const float dt[kWarpSteps] = {dts.x, dts.y, dts.z, dts.w};
        float by = turns_of_count(__float_as_uint(from[kWarpSteps * kPartPairs]) +
                                  __float_as_uint(from[(kWarpSteps + 1) * kPartPairs]));
#pragma unroll
        for (int i = 0; i < kWarpSteps; ++i) {
            *reinterpret_cast<float2*>(to + i * (2 * kPartPairs)) = cos_sin_after_step(by, from[i * kPartPairs], dt[i]);
        }
        __syncwarp();
    }

    // Turns a row into a tile.
    __device__ __forceinline__ void turn_row(int side, const uint2 (&words)[kParts][2], const float2 (&cos_sin)[kPairs],
                                             T* to) const {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const uint2(&own)[2] = words[part];
            const float2 one[2] = {unpack2<T>(own[0].x), unpack2<T>(own[0].y)};
            const float2 other[2] = {unpack2<T>(own[1].x), unpack2<T>(own[1].y)};
            uint32_t results[kPairs];
#pragma unroll
            for (int e = 0; e < kPairs; ++e) {
                const float2 by = bias[side][part][e];
                const float2 pair =
                    e % 2 == 0 ? make_float2(one[e / 2].x, other[e / 2].x) : make_float2(one[e / 2].y, other[e / 2].y);
                const float2 result = part == 0 ? rotate_pair(pair, by, cos_sin[e]) : make_float2(pair.x + by.x, pair.y + by.y);
                results[e] = pack2<T>(result.x, result.y);
            }
            *reinterpret_cast<uint4*>(to + part * (kMamba3ChunkRows * 64)) =
                make_uint4(results[0], results[1], results[2], results[3]);
        }
    }

    // Before the first chunk.
    __device__ __forceinline__ void begin() const {
        begin_turns();
        for (int number = 0; number < Shared::kSlots; ++number) {
            begin_rows(number);
            cp_async_commit_group();
        }
    }
    // A chunk, whose tiles begin at `tile`. more: whether there is another one. begin_others: begins copies that will have come
    // at the end.
    template <typename Others>
    __device__ __forceinline__ void turn_chunk(T* tile, bool more, const Others& begin_others) {
        const int angles_place = opaque(static_cast<int>(threadIdx.x) % 8 * 4);
#pragma unroll
        for (int number = 0; number < kWarpSteps; ++number) {
            cp_async_wait_group<Shared::kSlots - 1>();
            __syncwarp();
            if (number == 0) {
                find_angles();
            }
            uint2 words[kSides][kParts][2];
#pragma unroll
            for (int side = 0; side < kSides; ++side) {
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    const unsigned char* const from = shared + words_place[part] + number % Shared::kSlots * Shared::kSlot;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        words[side][part][i] =
                            *reinterpret_cast<const uint2*>(from + side * kRanks * Shared::kRow + i * Shared::kRow / 2);
                    }
                }
            }
            float2 cos_sin[kPairs];
            const float* const angles =
                reinterpret_cast<const float*>(shared + Shared::kAnglesAt) + angles_place + number * (2 * kPartPairs);
            const float4 first = *reinterpret_cast<const float4*>(angles);
            const float4 second = *reinterpret_cast<const float4*>(angles + 32);
            cos_sin[0] = make_float2(first.x, first.y);
            cos_sin[1] = make_float2(first.z, first.w);
            cos_sin[2] = make_float2(second.x, second.y);
            cos_sin[3] = make_float2(second.z, second.w);
            __syncwarp();  // all have read the rows
            if (number == kWarpSteps - Shared::kSlots && more) {
                next_chunk();
                begin_turns();
            }
            if (number == 0) {
                begin_others();
            }
            if (number < kWarpSteps - Shared::kSlots || more) {
                begin_rows((number + Shared::kSlots) % kWarpSteps);
            }
            cp_async_commit_group();
            // A row's number is in its pieces' places.
            T* const to = tile + (kByRanks ? (place ^ number * 8) + number * 64
                                           : (place ^ number % 2 * (kRanks * 8)) + number * (kRanks * 64));
            turn_row(0, words[0], cos_sin, to);
            if constexpr (kSides == 2) {
                turn_row(1, words[1], cos_sin, to + kMamba3ChunkRows * kStates);
            }
        }
        if constexpr (Shared::kSlots == kWarpSteps) {  // else they have come
            cp_async_wait_group<kWarpSteps - 1>();
        }
    }
};

#endif

}  // namespace mamba
