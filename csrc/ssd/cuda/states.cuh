// The state alone, walked along a segment's chunks: what the segments pass on, the state before each chunk for the backward
// kernel, and, walked from the end, the gradient of the state after each chunk (the same sums with dout for x, C for B).
#pragma once

#include "common/sequences.cuh"
#include "ssd/cuda/chunk_tile.cuh"
#include "ssd/launch.h"

namespace mamba {

// Which step size a head has at its row's first step.
__device__ __forceinline__ StepSize step_size(const MambaSsd& p, int64_t batch, int64_t first, int64_t head) {
    const int64_t element = p.dt_dtype == MAMBA_FLOAT32 ? 4 : 2;
    StepSize size;
    size.dt = static_cast<const char*>(p.dt) +
              (batch * p.dt_batch_stride + first * p.dt_len_stride + head * p.dt_head_stride) * element;
    size.stride = p.dt_len_stride;
    size.dtype = p.dt_dtype;
    size.softplus = p.dt_softplus != 0;
    size.bias = p.dt_bias != nullptr ? load_as_float(p.dt_bias, head, p.dt_bias_dtype) : 0.0f;
    size.min = p.dt_min;
    size.max = p.dt_max;
    return size;
}

// Which part of the problem a block walks. kSteps: of a chunk. slices: parts of the states, a block each.
template <int kSteps>
struct StatesBlock {
    int slice, slices;
    int64_t row_tiles, tile, heads, slot, segment, batch, group, head;
    bool from_end;
    SequenceRange range;
    int64_t chunks, first_chunk;
    int count;            // of chunks
    int row0, rows;       // of headdim that exist from row0 on; may be more than kForwardRows
    int64_t state_index;  // of this block's first row in (B, H, P, N)

    __device__ __forceinline__ StatesBlock(const MambaSsd& p, const StatesLaunch& launch, int slices_) : slices(slices_) {
        row_tiles = ceil_div(p.headdim, kForwardRows);
        // In 32 bits, which all fit: a division of 64 takes long.
        const uint32_t walked = static_cast<uint32_t>(launch.ends_only != 0 ? launch.segments - 1 : launch.segments);
        const uint32_t tiles = static_cast<uint32_t>(row_tiles);
        const uint32_t group_heads = static_cast<uint32_t>(launch.group_heads);
        const uint32_t directions = static_cast<uint32_t>(launch.directions);
        const uint32_t launched = group_heads * static_cast<uint32_t>(p.ngroups);
        uint32_t index = blockIdx.x;
        slice = static_cast<int>(index % static_cast<uint32_t>(slices));
        index /= static_cast<uint32_t>(slices);
        tile = index % tiles;
        index /= tiles;
        const uint32_t own = index % launched;
        index /= launched;
        from_end = index % directions != 0;
        index /= directions;
        segment = index % walked;
        batch = index / walked;
        group = own / group_heads;
        slot = own;
        heads = launched;
        head = group * (static_cast<uint32_t>(p.nheads) / static_cast<uint32_t>(p.ngroups)) + launch.first_head +
               own % group_heads;
        range = sequence_range(p, batch);
        chunks = ceil_div(range.seqlen, kSteps);
        first_chunk = segment * launch.chunks_a_segment;
        const int64_t left = chunks - first_chunk;
        count = static_cast<int>(left < launch.chunks_a_segment ? left : launch.chunks_a_segment);
        row0 = static_cast<int>(tile) * kForwardRows;
        rows = static_cast<int>(p.headdim) - row0;
        state_index = ((batch * p.nheads + head) * p.headdim + row0) * p.dstate;
    }
    // In walking order.
    __device__ __forceinline__ int64_t chunk(int i) const { return from_end ? chunks - 1 - first_chunk - i : first_chunk + i; }
    __device__ __forceinline__ int steps(int i) const { return steps_in<kSteps>(range.seqlen, chunk(i)); }
    // What the head has in StateWalk::ends for a segment, `offset` elements on.
    __device__ __forceinline__ float* end_of(const MambaSsd& p, const StatesLaunch& launch, const StateWalk& walk, int64_t of,
                                             int64_t offset) const {
        return walk.ends + ((of * p.batch + batch) * p.nheads + head) * launch.end_size + offset;
    }
    // Where the walk starts: the first segment from a state in (B, H, P, N) or from zero (NULL), a later one, in the second
    // pass, from what the carry kernel has left in the place of the one before (starts_at_end).
    __device__ __forceinline__ const float* first(const StateWalk& walk) const {
        return segment == 0 && walk.first != nullptr ? walk.first + state_index : nullptr;
    }
    __device__ __forceinline__ bool starts_at_end(const StatesLaunch& launch) const {
        return segment != 0 && launch.ends_only == 0;
    }
    // Where the state goes in (B, H, P, N) at the end of the walk, or NULL.
    __device__ __forceinline__ float* last(const StatesLaunch& launch, const StateWalk& walk) const {
        return launch.ends_only == 0 && walk.last != nullptr && segment == launch.segments - 1 ? walk.last + state_index
                                                                                               : nullptr;
    }
    // The first pass also leaves the product of the decays.
    __device__ __forceinline__ void store_product(const MambaSsd& p, const StateWalk& walk, float product) const {
        if (threadIdx.x == 0 && row0 == 0 && slice == 0) {
            walk.decays[(segment * p.batch + batch) * p.nheads + head] = product;
        }
    }
};

// Eight warps: 16 rows and half of the states each.
constexpr int kStatesThreads = 256;

// Two stages of tiles.
template <typename T, int kStates, int kSteps>
struct StatesTiles {
    static constexpr int kX = kSteps * (kForwardRows + kTilePad);
    static constexpr int kB = kSteps * (kStates + kTilePad);
    alignas(16) T x[2][kX];
    alignas(16) T B[2][kB];
    ChunkDecays<kSteps> decays[kDecayChunks];
};

// The state before a chunk to memory, 16 rows and kColumns states of it a warp. to: the state's first element.
template <typename T, int kColumns>
__device__ __forceinline__ void store_chunk_state(T* to, const float (&state)[kColumns / 8][4], int row, int rows, int column,
                                                  int dstate, int lane) {
    const bool vectors = dstate % 4 == 0;
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int p_row = row + lane / 4 + 8 * half;
            T* const at = p_row < rows ? to + static_cast<int64_t>(p_row) * dstate + column + 16 * j : nullptr;
            store_row<T>(at, dstate - column - 16 * j, vectors, make_float2(state[2 * j][2 * half], state[2 * j][2 * half + 1]),
                         make_float2(state[2 * j + 1][2 * half], state[2 * j + 1][2 * half + 1]), lane);
        }
    }
}

template <typename T, int kStates, int kSteps>
__global__ void __launch_bounds__(kStatesThreads, 2) ssd_states_kernel(const MambaSsd p, const StatesLaunch launch) {
    constexpr int kColumns = kStates / 2;  // of a warp
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    auto& shared = *reinterpret_cast<StatesTiles<T, kStates, kSteps>*>(memory);

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const StatesBlock<kSteps> block(p, launch, 1);
    const StateWalk& walk = launch.walks[block.from_end];
    const SequenceRange& range = block.range;
    const T* const x = static_cast<const T*>(walk.x) + range.row * walk.x_batch_stride + range.begin * walk.x_len_stride +
                       block.head * walk.x_head_stride + block.row0;
    const T* const B = static_cast<const T*>(walk.B) + range.row * walk.B_batch_stride + range.begin * walk.B_len_stride +
                       block.group * walk.B_group_stride;
    const int32_t* const seq_idx = p.seq_idx == nullptr ? nullptr : p.seq_idx + range.row * p.seqlen + range.begin;
    const StepSize size = step_size(p, range.row, range.begin, block.head);
    const float A = head_A(p, block.head);
    const int dstate = static_cast<int>(p.dstate);
    const int row = 16 * (warp % 4);
    const int column = warp / 4 * kColumns;
    const bool stores = walk.chunks != nullptr && launch.ends_only == 0;

    float state[kColumns / 8][4];
    const int64_t offset = static_cast<int64_t>(block.row0) * dstate;  // in an end
    start_state<kColumns>(
        state, block.starts_at_end(launch) ? block.end_of(p, launch, walk, block.segment - 1, offset) : block.first(walk), row,
        block.rows, column, dstate, lane);
    float product = 1.0f;
    StepInputs<kSteps> inputs;  // of this warp's chunk of the next kDecayChunks
    const auto begin_steps = [&](int i) {
        if (warp < kDecayChunks && i < block.count) {
            load_steps<kSteps>(inputs, size, seq_idx, block.chunk(i) * kSteps, block.steps(i), lane);
        }
    };
    const auto begin_tiles = [&](int i) {
        if (i < block.count) {
            const int64_t first = block.chunk(i) * kSteps;
            load_tile<T, kSteps, kForwardRows, kStatesThreads>(shared.x[i % 2], x + first * walk.x_len_stride,
                                                               walk.x_len_stride, block.steps(i), block.rows, walk.x_vectors);
            load_tile<T, kSteps, kStates, kStatesThreads>(shared.B[i % 2], B + first * walk.B_len_stride, walk.B_len_stride,
                                                          block.steps(i), dstate, walk.B_vectors);
        }
        cp_async_commit_group();
    };
    begin_steps(warp);
    begin_tiles(0);
    for (int i = 0; i < block.count; ++i) {
        begin_tiles(i + 1);  // on their way while this chunk is computed
        if (i % kDecayChunks == 0 && warp < kDecayChunks) {
            if (i + warp < block.count) {
                chunk_decays<kSteps>(shared.decays[warp], inputs, size, A, lane);
            }
            begin_steps(i + kDecayChunks + warp);
        }
        cp_async_wait_group<1>();
        __syncthreads();
        const ChunkDecays<kSteps>& now = shared.decays[i % kDecayChunks];
        if (stores) {
            T* const to =
                static_cast<T*>(walk.chunks) +
                (((block.batch * block.heads + block.slot) * block.chunks + block.chunk(i)) * p.headdim + block.row0) *
                    p.dstate;
            store_chunk_state<T, kColumns>(to, state, row, block.rows, column, dstate, lane);
        }
        product *= now.carry;
        update_state<T, kColumns, kStates, kSteps>(state, shared.x[i % 2] + row, shared.B[i % 2] + column,
                                                   block.from_end ? now.entering : now.adding, now.carry, lane);
        __syncthreads();
    }
    float* to = block.last(launch, walk);
    if (launch.ends_only != 0) {
        block.store_product(p, walk, product);
        to = block.end_of(p, launch, walk, block.segment, offset);
    }
    if (to != nullptr) {
        store_state<kColumns>(to, state, row, block.rows, column, dstate, lane);
    }
}

}  // namespace mamba
