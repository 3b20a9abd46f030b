// The state walked along a sequence's chunks: forward, for the state before each, and from the end, for the gradient of the
// state after each (the same sums with q for k and dy for x).
#pragma once

#include "mamba3/cuda/backward/rotate.cuh"

namespace mamba {

template <typename T, class Tiles>
struct Mamba3StatesShared {
    T x[2][Tiles::kRows * (kForwardRows + kTilePad)];
    T matrix[2][Tiles::kRows * (Tiles::kStates + kTilePad)];
    ChunkSteps<Tiles::kRows> steps[2];
    PartSumsOfTurns<Tiles::kThreads> turns;
};

// An element of the state that enters a sequence: what is given, and the part of the step before that its first step adds.
__device__ __forceinline__ float entering_state(const MambaMamba3& p, int64_t sequence, int64_t head, float nu, int64_t row,
                                                int64_t element) {
    const int64_t index = sequence * p.nheads + head;
    float added = 0.0f;
    for (int64_t r = 0; r < p.rank; ++r) {
        const float v = p.v_state[index * p.headdim + row];
        const float k = p.k_state[((sequence * p.rank + r) * p.nheads + head) * p.dstate + element];
        added = fmaf(p.mimo_v != nullptr ? v * p.mimo_v[(head * p.rank + r) * p.headdim + row] : v, k, added);
    }
    return fmaf(nu, added, p.ssm_state[(index * p.headdim + row) * p.dstate + element]);
}

// A block takes kForwardRows rows of the state of one sequence and head; eight warps, 16 rows and half of the states each.
template <typename T, class Tiles, bool kFromEnd>
__global__ void __launch_bounds__(Tiles::kThreads, kMamba3BlocksTogether<Tiles>)
    mamba3_states_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    if (!runs_here<Tiles>()) {
        __trap();
        return;
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    constexpr int kRows = Tiles::kRows;
    constexpr int kStates = Tiles::kStates;
    constexpr int kColumns = kStates / 2;  // of a warp
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    Mamba3StatesShared<T, Tiles>& shared = *reinterpret_cast<Mamba3StatesShared<T, Tiles>*>(memory);
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int64_t row_tiles = ceil_div(p.headdim, kForwardRows);
    const int64_t heads = launch.group_heads * p.ngroups;
    int64_t block = blockIdx.x;
    const int row0 = static_cast<int>(block % row_tiles) * kForwardRows;
    block /= row_tiles;
    const int64_t launch_head = block % heads;
    const int64_t sequence_index = block / heads;
    const int64_t group = launch_head / launch.group_heads;
    const int64_t head = head_of_launch(p, launch, launch_head);
    const Mamba3Sequence sequence = mamba3_sequence(p, sequence_index);
    const int64_t chunks = ceil_div(sequence.seqlen, launch.chunks.steps);
    const int64_t first_slot = mamba3_slot(p, launch.chunks, sequence_index, sequence.begin);
    const int rows = static_cast<int>(p.headdim) - row0;  // may be more than kForwardRows
    const int dstate = static_cast<int>(p.dstate);
    const int row = 16 * (warp % 4);
    const int column = warp / 4 * kColumns;
    const int64_t index = sequence_index * p.nheads + head;

    float state[kColumns / 8][4];
    const bool given = kFromEnd ? q.dfinal_ssm != nullptr : p.ssm_state != nullptr && chunks > 0;
    const float nu = !kFromEnd && given ? weight_of_step_before(p, sequence, head) : 0.0f;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own_row = row + lane / 4 + i / 2 * 8;
            const int own_column = column + 8 * j + lane % 4 * 2 + i % 2;
            state[j][i] = 0.0f;
            if (given && own_row < rows && own_column < dstate) {
                const int element = element_of_column(p, own_column);
                state[j][i] = kFromEnd ? q.dfinal_ssm[(index * p.headdim + row0 + own_row) * dstate + element]
                                       : entering_state(p, sequence_index, head, nu, row0 + own_row, element);
            }
        }
    }

    for (int64_t i = -1; i < chunks; ++i) {
        if (i + 1 < chunks) {  // the next chunk's tiles are made while others compute this one
            const int64_t slot = first_slot + (kFromEnd ? chunks - 2 - i : i + 1);
            const Mamba3Chunk chunk = find_chunk(p, launch.chunks, slot);
            const int next = static_cast<int>((i + 1) % 2);
            if constexpr (kFromEnd) {
                load_dy<T, kRows, kForwardRows, Tiles::kThreads>(p, launch, chunk, launch_head, row0, shared.x[next]);
            } else {
                load_x<T, kRows, kForwardRows, Tiles::kThreads>(p, launch, chunk, head, row0, shared.x[next]);
            }
            cp_async_commit_group();
            load_chunk_steps<kRows>(shared.steps[next], p, launch.chunks, slot, head);
            const TurnSource<T> sources[1] = {kFromEnd ? q_source<T>(p, launch, chunk, head, group, shared.matrix[next])
                                                       : k_source<T>(p, launch, chunk, head, group, shared.matrix[next])};
            turn_tiles<T, Tiles, 1>(p, launch, chunk, slot, head, shared.steps[next], sources,
                                    speeds_of(p, launch, chunk, head), nullptr, shared.turns);
        }
        if (i >= 0) {
            const int now = static_cast<int>(i % 2);
            const int64_t slot = first_slot + (kFromEnd ? chunks - 1 - i : i);
            T* const to =
                launch.at<T>(kFromEnd ? w.dstates : w.states) + ((slot * heads + launch_head) * p.headdim + row0) * dstate;
#pragma unroll
            for (int j = 0; j < kColumns / 16; ++j) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int own_row = row + lane / 4 + 8 * half;
                    T* const at = own_row < rows ? to + static_cast<int64_t>(own_row) * dstate + column + 16 * j : nullptr;
                    store_row<T>(at, dstate - column - 16 * j, dstate % 4 == 0,
                                 make_float2(state[2 * j][2 * half], state[2 * j][2 * half + 1]),
                                 make_float2(state[2 * j + 1][2 * half], state[2 * j + 1][2 * half + 1]), lane);
                }
            }
            const ChunkSteps<kRows>& steps = shared.steps[now];
            update_state<T, kColumns, kStates, kRows>(state, shared.x[now] + row, shared.matrix[now] + column,
                                                      kFromEnd ? steps.entering : steps.adding, steps.carry, lane);
        }
        cp_async_wait_group<0>();
        __syncthreads();
    }

    if (kFromEnd && q.dssm_state != nullptr) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int own_row = row + lane / 4 + i / 2 * 8;
                const int own_column = column + 8 * j + lane % 4 * 2 + i % 2;
                if (own_row < rows && own_column < dstate) {
                    q.dssm_state[(index * p.headdim + row0 + own_row) * dstate + element_of_column(p, own_column)] =
                        state[j][i];
                }
            }
        }
    }
}

}  // namespace mamba
