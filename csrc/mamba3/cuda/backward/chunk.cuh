// What the kernels of Mamba-3's backward scan share: where chunks lie, the weights of their steps, tiles of x and dy.
//
// A chunk's rows are its steps times the rank: row t R + r is row r of step t. The columns of a tile of q, k or a state lie so
// that an angle turns two neighbours (element_of_column): products do not mind the order, and a thread's accumulators hold
// pairs.
#pragma once

#include "mamba3/backward_plan.h"
#include "mamba3/cuda/chunks.cuh"
#include "ssd/cuda/backward_tile.cuh"

namespace mamba {

// ---- chunks ----------------------------------------------------------------------------------------------------------

struct Mamba3Chunk {
    int64_t sequence, row;
    int64_t first;  // step of the row
    int64_t index;  // in the sequence
    int steps;      // 0: an empty slot
    bool last;      // of its sequence
};

__device__ __forceinline__ Mamba3Chunk find_chunk(const MambaMamba3& p, const Mamba3Chunks& chunks, int64_t slot) {
    const Mamba3SlotChunk found = mamba3_chunk_of_slot(p, chunks, slot);
    return {found.sequence_index,       found.sequence.row, found.sequence.begin + found.first,
            found.first / chunks.steps, found.steps,        found.first + chunks.steps >= found.sequence.seqlen};
}

// ---- the weights of a chunk's steps, by row --------------------------------------------------------------------------

// kStates: dstate is at most that. kRows: of a chunk, steps times rank. kInner: of headdim that a block takes.
template <int kStates_, int kRows_, int kInner_>
struct Mamba3BackwardTiles {
    static constexpr int kStates = kStates_;
    static constexpr int kRows = kRows_;
    static constexpr int kInner = kInner_;
    static constexpr int kSteps = kRows_;  // for WarpTile, whose rows these are
    static constexpr int kWarps = 8;
    static constexpr int kThreads = 32 * kWarps;
    static_assert(kRows >= kMamba3MostCudaRank, "a chunk has a step");
};

// In shared memory, see Mamba3StepArray.
template <int kRows>
struct alignas(16) ChunkSteps {
    float high[kRows], low[kRows], gamma[kRows], scale[kRows], entering[kRows], leaving[kRows];
    float adding[kRows];  // leaving scale
    int run[kRows];       // first row of the row's run in this chunk, -1 for a run that began before it
    float carry;          // decay over the whole chunk, 0 with a restart
};

// What the backward kernels have in common.
struct Mamba3BackwardLaunch {
    Mamba3BackwardPlan plan;
    Mamba3Chunks chunks;
    int64_t first_head;   // of those in each group that this launch takes
    int64_t group_heads;  // how many of each group it takes
    char* memory;
    int32_t v_vectors, dv_vectors, dy_vectors, state_vectors;  // whether rows lie at multiples of 16 bytes

    template <typename Value>
    MAMBA_HOST_DEVICE Value* at(int64_t offset) const {
        return reinterpret_cast<Value*>(memory + offset);
    }
};

// values: a chunk's arrays.
template <int kRows>
__device__ __forceinline__ void load_chunk_steps(ChunkSteps<kRows>& to, const float* values, const Mamba3Chunks& chunks,
                                                 int64_t of_rank) {
    const int row = static_cast<int>(threadIdx.x), rank = static_cast<int>(of_rank), steps = static_cast<int>(chunks.steps);
    if (row < kRows) {
        const bool exists = row / rank < steps;
        const int step = exists ? row / rank : steps - 1;
        const float* const at = values + step;
        const float scale = exists ? at[kMamba3Scale * chunks.pitch] : 0.0f;
        const float leaving = exists ? at[kMamba3Leaving * chunks.pitch] : 0.0f;
        const int start = __float_as_int(at[kMamba3Start * chunks.pitch]);
        to.high[row] = at[kMamba3High * chunks.pitch];
        to.low[row] = at[kMamba3Low * chunks.pitch];
        to.gamma[row] = exists ? at[kMamba3Gamma * chunks.pitch] : 0.0f;
        to.scale[row] = scale;
        to.entering[row] = at[kMamba3Entering * chunks.pitch];
        to.leaving[row] = leaving;
        to.adding[row] = leaving * scale;
        to.run[row] = start < 0 ? -1 : start * rank;
        if (row == kRows - 1) {
            to.carry = values[kMamba3Entering * chunks.pitch + steps - 1];
        }
    }
}
template <int kRows>
__device__ __forceinline__ void load_chunk_steps(ChunkSteps<kRows>& to, const MambaMamba3& p, const Mamba3Chunks& chunks,
                                                 int64_t slot, int64_t head) {
    load_chunk_steps<kRows>(to, mamba3_values(chunks, p.nheads, slot, head, kMamba3High), chunks, p.rank);
}

// Which element of q or k lies in a tile's column.
__device__ __forceinline__ int element_of_column(const MambaMamba3& p, int column) {
    if (p.pairwise != 0) {
        return column;
    }
    const int half = static_cast<int>(p.dstate / 2);
    return column < 2 * half ? column / 2 + column % 2 * half : column;
}

// ---- rows of headdim -------------------------------------------------------------------------------------------------

// A tile of rows x = mimo_v v, of `columns` from row0 on; zeros behind them and behind the chunk's steps.
template <typename T, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void load_x(const MambaMamba3& p, const Mamba3BackwardLaunch& launch, const Mamba3Chunk& chunk,
                                       int64_t head, int row0, T* tile) {
    const T* const v = static_cast<const T*>(p.v) + chunk.row * p.v_batch_stride + chunk.first * p.v_len_stride +
                       head * p.v_head_stride + row0;
    const int columns = static_cast<int>(p.headdim) - row0, rank = static_cast<int>(p.rank);
    if (rank == 1 && p.mimo_v == nullptr) {
        load_tile<T, kRows, kColumns, kThreads>(tile, v, p.v_len_stride, chunk.steps, columns, launch.v_vectors);
        return;
    }
    constexpr int kPitch = kColumns + kTilePad;
    const float* const weight = p.mimo_v != nullptr ? p.mimo_v + head * rank * p.headdim + row0 : nullptr;
#pragma unroll 4
    for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
        const int row = i / kColumns, column = i % kColumns;
        float value = 0.0f;
        if (row < chunk.steps * rank && column < columns) {
            value = to_float(v[row / rank * p.v_len_stride + column]);
            value = weight != nullptr ? value * weight[row % rank * p.headdim + column] : value;
        }
        tile[row * kPitch + column] = from_float<T>(value);
    }
}

// The chunk's rows of the gradient of the scan's rows, in the workspace.
template <typename T>
__device__ __forceinline__ T* dy_rows(const MambaMamba3& p, const Mamba3BackwardLaunch& launch, const Mamba3Chunk& chunk,
                                      int64_t launch_head, int64_t* row_stride) {
    *row_stride = launch.group_heads * p.ngroups * p.headdim;
    return launch.at<T>(launch.plan.workspace.dy) + (chunk.row * p.seqlen + chunk.first) * p.rank * *row_stride +
           launch_head * p.headdim;
}

template <typename T, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void load_dy(const MambaMamba3& p, const Mamba3BackwardLaunch& launch, const Mamba3Chunk& chunk,
                                        int64_t launch_head, int row0, T* tile) {
    int64_t row_stride;
    const T* const rows = dy_rows<T>(p, launch, chunk, launch_head, &row_stride);
    load_tile<T, kRows, kColumns, kThreads>(tile, rows + row0, row_stride, chunk.steps * static_cast<int>(p.rank),
                                            static_cast<int>(p.headdim) - row0, launch.dy_vectors);
}

// Where the rotated rows of a chunk of a launch's head begin in w.q and w.k, and the cosines and sines of its steps, (steps,
// S).
__device__ __forceinline__ int64_t rotated_rows(const MambaMamba3& p, const Mamba3BackwardLaunch& launch, int64_t slot,
                                                int64_t launch_head) {
    return (slot * launch.group_heads * p.ngroups + launch_head) * launch.chunks.steps * p.rank * p.dstate;
}
__device__ __forceinline__ int64_t cos_sin_index(const MambaMamba3& p, const Mamba3BackwardLaunch& launch, int64_t slot,
                                                 int64_t launch_head) {
    return (slot * launch.group_heads * p.ngroups + launch_head) * launch.chunks.steps * p.nangles;
}

// rows: w.q or w.k.
template <typename T, int kRows, int kStates, int kThreads>
__device__ __forceinline__ void load_rotated(const MambaMamba3& p, const Mamba3BackwardLaunch& launch, int64_t rows,
                                             const Mamba3Chunk& chunk, int64_t slot, int64_t launch_head, T* tile) {
    load_tile<T, kRows, kStates, kThreads>(tile, launch.at<const T>(rows) + rotated_rows(p, launch, slot, launch_head),
                                           p.dstate, chunk.steps * static_cast<int>(p.rank), static_cast<int>(p.dstate),
                                           launch.state_vectors);
}

// Where the speeds of the angles of a chunk's steps lie.
struct Mamba3Speeds {
    const float* first;
    int64_t stride;  // to the next step's
};
__device__ __forceinline__ Mamba3Speeds speeds_of(const MambaMamba3& p, const Mamba3BackwardLaunch& launch,
                                                  const Mamba3Chunk& chunk, int64_t head) {
    return {launch.chunks.speeds + mamba3_speeds_index(p, chunk.row, chunk.first, head),
            p.angles_of_heads != 0 ? p.nheads * p.nangles : p.nangles};
}

// The head of a launch's head.
__device__ __forceinline__ int64_t head_of_launch(const MambaMamba3& p, const Mamba3BackwardLaunch& launch,
                                                  int64_t launch_head) {
    return launch_head / launch.group_heads * (p.nheads / p.ngroups) + launch.first_head + launch_head % launch.group_heads;
}

// What of the step before a sequence is in its first state: (1 - lambda) dt of the sequence's first step.
__device__ __forceinline__ float weight_of_step_before(const MambaMamba3& p, const SequenceRange& sequence, int64_t head) {
    const float dt = load_as_float(
        p.dt, sequence.row * p.dt_batch_stride + sequence.begin * p.dt_len_stride + head * p.dt_head_stride, p.dt_dtype);
    const float trap = load_as_float(
        p.trap, sequence.row * p.trap_batch_stride + sequence.begin * p.trap_len_stride + head * p.trap_head_stride,
        p.trap_dtype);
    return sigmoid(-trap) * dt;
}

// ---- host ------------------------------------------------------------------------------------------------------------

inline Mamba3BackwardLaunch mamba3_backward_launch(const MambaMamba3Backward& q, const Mamba3BackwardPlan& plan) {
    Mamba3BackwardLaunch launch = {};
    launch.plan = plan;
    launch.chunks = plan.chunks.place(q.forward.workspace);
    launch.memory = static_cast<char*>(q.forward.workspace);
    return launch;
}

// Launches a kernel of Mamba-3's backward scan, if it has blocks.
template <typename... Parameters, typename... Others>
cudaError_t launch_mamba3(void (*kernel)(Parameters...), int64_t blocks, unsigned beside, int threads, int shared,
                          const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch, Others... others) {
    if (blocks == 0) {
        return cudaSuccess;
    }
    const cudaError_t error = allow_shared(kernel, shared);
    return error != cudaSuccess
               ? error
               : launch_programmatic_dependent(kernel, Grid(blocks, beside), dim3(threads), static_cast<size_t>(shared),
                                               q.forward.run.stream, q, launch, others...);
}

}  // namespace mamba
