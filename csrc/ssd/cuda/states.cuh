// The state alone, walked along a segment's chunks: what the segments pass on, the state before each chunk for the backward
// kernel, and, walked from the end, the gradient of the state after each chunk (the same sums with dout for x, C for B).
#pragma once

#include "ssd/cuda/chunk_tile.cuh"
#include "ssd/launch.h"

namespace mamba {

// Eight warps: 16 rows and half of the states each.
constexpr int kStatesThreads = 256;

template <typename T, class Layout>
constexpr int states_shared_bytes() {
    return 2 * Layout::kSteps * (kForwardRows + kTilePad + Layout::kStates + kTilePad) * static_cast<int>(sizeof(T)) +
           kDecayChunks * static_cast<int>(sizeof(ChunkDecays<Layout::kSteps>));
}

// The steps of an entry of the batch.
struct SequenceRange {
    int64_t row;  // of the tensors
    int64_t begin, seqlen;
};

// With cu_seqlens an entry is a part of the one row; whatever is in there, memory beyond the row is not touched.
__device__ __forceinline__ SequenceRange sequence_range(const MambaSsd& p, int64_t batch) {
    if (p.cu_seqlens == nullptr) {
        return {batch, 0, p.seqlen};
    }
    const int64_t begin = p.cu_seqlens[batch] < 0 ? 0 : p.cu_seqlens[batch];
    const int64_t end = p.cu_seqlens[batch + 1] > p.seqlen ? p.seqlen : p.cu_seqlens[batch + 1];
    return {0, begin, end > begin ? end - begin : 0};
}

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

template <typename T, class Layout>
__global__ void __launch_bounds__(kStatesThreads, 2) ssd_states_kernel(const MambaSsd p, const StatesLaunch launch) {
    constexpr int kSteps = Layout::kSteps;
    constexpr int kStates = Layout::kStates;
    constexpr int kColumns = kStates / 2;  // of a warp
    constexpr int kXTile = kSteps * (kForwardRows + kTilePad);
    constexpr int kBTile = kSteps * (kStates + kTilePad);
    MAMBA_DYNAMIC_SHARED(16, unsigned char, shared);
    T* const x_tiles = reinterpret_cast<T*>(shared);
    T* const B_tiles = x_tiles + 2 * kXTile;
    ChunkDecays<kSteps>* const decays = reinterpret_cast<ChunkDecays<kSteps>*>(B_tiles + 2 * kBTile);

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int64_t row_tiles = ceil_div(p.headdim, kForwardRows);
    const int64_t heads = launch.group_heads * p.ngroups;
    const int64_t walked = launch.ends_only != 0 ? launch.segments - 1 : launch.segments;
    int64_t block = blockIdx.x;
    const int row0 = static_cast<int>(block % row_tiles) * kForwardRows;
    block /= row_tiles;
    const int64_t slot = block % heads;  // of this launch's heads
    block /= heads;
    const int64_t segment = block % walked;
    block /= walked;
    const int64_t batch = block % p.batch;
    const bool from_end = block / p.batch != 0;
    const StateWalk& walk = launch.walks[from_end];
    const int64_t group = slot / launch.group_heads;
    const int64_t head = group * (p.nheads / p.ngroups) + launch.first_head + slot % launch.group_heads;

    const SequenceRange range = sequence_range(p, batch);
    const int64_t begin = range.begin;
    const int64_t seqlen = range.seqlen;
    const int64_t row_batch = range.row;
    const int64_t chunks = ceil_div(seqlen, kSteps);
    const int64_t first_chunk = segment * launch.chunks_a_segment;
    int64_t last_chunk = first_chunk + launch.chunks_a_segment;
    last_chunk = last_chunk < chunks ? last_chunk : chunks;

    const T* const x = static_cast<const T*>(walk.x) + row_batch * walk.x_batch_stride + begin * walk.x_len_stride +
                       head * walk.x_head_stride + row0;
    const T* const B = static_cast<const T*>(walk.B) + row_batch * walk.B_batch_stride + begin * walk.B_len_stride +
                       group * walk.B_group_stride;
    const int32_t* const seq_idx = p.seq_idx == nullptr ? nullptr : p.seq_idx + row_batch * p.seqlen + begin;
    const StepSize size = step_size(p, row_batch, begin, head);
    const float A = head_A(p, head);
    const int rows = static_cast<int>(p.headdim) - row0;  // may be more than kForwardRows
    const int dstate = static_cast<int>(p.dstate);
    const int row = 16 * (warp % 4);
    const int column = warp / 4 * kColumns;
    const int64_t state_size = p.headdim * p.dstate;
    const int64_t state_index = (batch * p.nheads + head) * state_size + static_cast<int64_t>(row0) * dstate;

    // A later segment starts from what the carry kernel has left in the place of the one before.
    const float* from = segment == 0 ? walk.first : nullptr;
    if (segment > 0 && !launch.ends_only) {
        from = walk.ends + (segment - 1) * p.batch * p.nheads * state_size;
    }
    float state[kColumns / 8][4];
    if (from != nullptr) {
        load_state<kColumns>(state, from + state_index, row, rows, column, dstate, lane);
    } else {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            state[j][0] = state[j][1] = state[j][2] = state[j][3] = 0.0f;
        }
    }

    float product = 1.0f;
    StepInputs<kSteps> inputs;  // of this warp's chunk of the next kDecayChunks
    if (warp < kDecayChunks && first_chunk + warp < last_chunk) {
        const int64_t chunk = from_end ? chunks - 1 - first_chunk - warp : first_chunk + warp;
        load_steps<kSteps>(inputs, size, seq_idx, chunk * kSteps, steps_in<kSteps>(seqlen, chunk), lane);
    }
    for (int64_t i = first_chunk - 1; i < last_chunk; ++i) {
        if (i + 1 < last_chunk) {  // the next chunk's tiles are on their way while this one is computed
            const int64_t chunk = from_end ? chunks - 2 - i : i + 1;
            const int64_t first = chunk * kSteps;
            const int valid = steps_in<kSteps>(seqlen, chunk);
            const int next = static_cast<int>((i + 1) % 2);
            load_tile<T, kSteps, kForwardRows, kStatesThreads>(x_tiles + next * kXTile, x + first * walk.x_len_stride,
                                                               walk.x_len_stride, valid, rows, walk.x_vectors);
            load_tile<T, kSteps, kStates, kStatesThreads>(B_tiles + next * kBTile, B + first * walk.B_len_stride,
                                                          walk.B_len_stride, valid, dstate, walk.B_vectors);
        }
        cp_async_commit_group();
        if (i < first_chunk) {
            continue;
        }
        const int phase = static_cast<int>((i - first_chunk) % kDecayChunks);
        if (phase == 0 && warp < kDecayChunks) {
            if (i + warp < last_chunk) {
                chunk_decays<kSteps>(decays[warp], inputs, size, A, lane);
            }
            if (i + kDecayChunks + warp < last_chunk) {
                const int64_t ahead = i + kDecayChunks + warp;
                const int64_t chunk = from_end ? chunks - 1 - ahead : ahead;
                load_steps<kSteps>(inputs, size, seq_idx, chunk * kSteps, steps_in<kSteps>(seqlen, chunk), lane);
            }
        }
        cp_async_wait_group<1>();
        __syncthreads();
        const int now = static_cast<int>(i % 2);
        const ChunkDecays<kSteps>& decay = decays[phase];
        if (walk.chunks != nullptr && !launch.ends_only) {
            const int64_t chunk = from_end ? chunks - 1 - i : i;
            T* const to = static_cast<T*>(walk.chunks) + ((batch * heads + slot) * chunks + chunk) * state_size +
                          static_cast<int64_t>(row0) * dstate;
            const bool vectors = dstate % 4 == 0;
#pragma unroll
            for (int j = 0; j < kColumns / 16; ++j) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int p_row = row + lane / 4 + 8 * half;
                    T* const at = p_row < rows ? to + static_cast<int64_t>(p_row) * dstate + column + 16 * j : nullptr;
                    store_row<T>(at, dstate - column - 16 * j, vectors,
                                 make_float2(state[2 * j][2 * half], state[2 * j][2 * half + 1]),
                                 make_float2(state[2 * j + 1][2 * half], state[2 * j + 1][2 * half + 1]), lane);
                }
            }
        }
        const float* const weight = from_end ? decay.entering : decay.adding;
        product *= decay.carry;
        update_state<T, kColumns, kStates, kSteps>(state, x_tiles + now * kXTile + row, B_tiles + now * kBTile + column, weight,
                                                   decay.carry, lane);
        __syncthreads();
    }

    if (launch.ends_only) {
        store_state<kColumns>(walk.ends + segment * p.batch * p.nheads * state_size + state_index, state, row, rows, column,
                              dstate, lane);
        if (threadIdx.x == 0 && row0 == 0) {
            walk.decays[(segment * p.batch + batch) * p.nheads + head] = product;
        }
    } else if (walk.last != nullptr && segment == launch.segments - 1) {
        store_state<kColumns>(walk.last + state_index, state, row, rows, column, dstate, lane);
    }
}

}  // namespace mamba
