// What the kernels of Mamba-3's backward scan share: where chunks lie, the weights of their steps, tiles of x and dy.
//
// A chunk's rows are its steps times the rank: row t R + r is row r of step t. The columns of a tile of q, k or a state lie so
// that an angle turns two neighbours (element_of_column): products do not mind the order, and a thread's accumulators hold
// pairs.
#pragma once

#include "mamba3/backward_plan.h"
#include "mamba3/cuda/chunks.cuh"
#include "ssd/cuda/chunk_tile.cuh"

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
    Mamba3Chunk chunk;
    chunk.sequence = 0;
    if (p.cu_seqlens == nullptr) {
        chunk.sequence = slot / ceil_div(p.seqlen, chunks.steps);
    } else {  // the last one whose slots begin here or earlier
        int64_t end = p.sequences;
        while (end - chunk.sequence > 1) {
            const int64_t middle = (chunk.sequence + end) / 2;
            (mamba3_slot(p, chunks, middle, mamba3_sequence(p, middle).begin) <= slot ? chunk.sequence : end) = middle;
        }
    }
    const Mamba3Sequence sequence = mamba3_sequence(p, chunk.sequence);
    chunk.index = slot - mamba3_slot(p, chunks, chunk.sequence, sequence.begin);
    const int64_t left = sequence.seqlen - chunk.index * chunks.steps;
    chunk.row = sequence.row;
    chunk.first = sequence.begin + chunk.index * chunks.steps;
    chunk.steps = chunk.index < 0 || left <= 0 ? 0 : static_cast<int>(left < chunks.steps ? left : chunks.steps);
    chunk.last = left <= chunks.steps;
    return chunk;
}

// ---- the weights of a chunk's steps, by row --------------------------------------------------------------------------

// In shared memory, see Mamba3StepArray.
template <int kRows>
struct alignas(16) ChunkSteps {
    float high[kRows], low[kRows], gamma[kRows], scale[kRows], entering[kRows], leaving[kRows], dt[kRows];
    float adding[kRows];  // leaving scale
    int run[kRows];       // first row of the row's run in this chunk, -1 for a run that began before it
    float carry;          // decay over the whole chunk, 0 with a restart
};

// Blocks of a multiprocessor that a kernel's registers should leave room for.
template <class Tiles>
constexpr int kMamba3BlocksTogether = Tiles::kStates > 128 ? 1 : 2;

// Whether a GPU that this code is compiled for can meet a layout. Machine code for 9.0a runs on GPUs of 9.0 alone, which have
// room for the layouts with more than 16 columns of headdim: the plan takes no other there. The emulator is every GPU.
template <class Tiles>
__device__ constexpr bool runs_here() {
#if defined(__CUDACC__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
    return Tiles::kInner > 16;
#else
    return true;
#endif
}

// What the backward kernels have in common.
struct Mamba3BackwardLaunch {
    Mamba3BackwardPlan plan;
    Mamba3Chunks chunks;
    int64_t first_head;   // of those in each group that this launch takes
    int64_t group_heads;  // how many of each group it takes
    char* memory;
    int32_t q_pairs, k_pairs, v_vectors, dv_vectors, dy_vectors, state_vectors;
    int32_t row_vectors;  // rows of v, z, dout, dz and dy, and the projections', lie at multiples of 16 bytes

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
        to.dt[row] = at[kMamba3Dt * chunks.pitch];
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

// The head of a launch's head.
__device__ __forceinline__ int64_t head_of_launch(const MambaMamba3& p, const Mamba3BackwardLaunch& launch,
                                                  int64_t launch_head) {
    return launch_head / launch.group_heads * (p.nheads / p.ngroups) + launch.first_head + launch_head % launch.group_heads;
}

// What of the step before a sequence is in its first state: (1 - lambda) dt of the sequence's first step.
__device__ __forceinline__ float weight_of_step_before(const MambaMamba3& p, const Mamba3Sequence& sequence, int64_t head) {
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
template <typename... Parameters>
cudaError_t launch_mamba3(void (*kernel)(Parameters...), int64_t blocks, unsigned beside, int threads, int shared,
                          const MambaMamba3Backward& q, const Mamba3BackwardLaunch& launch) {
    if (blocks == 0) {
        return cudaSuccess;
    }
    const cudaError_t error = allow_shared(kernel, shared);
    return error != cudaSuccess ? error
                                : launch_programmatic_dependent(kernel, Grid(blocks, beside), dim3(threads),
                                                                static_cast<size_t>(shared), q.forward.run.stream, q, launch);
}

}  // namespace mamba
