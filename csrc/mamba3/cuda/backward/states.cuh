// The state walked along a sequence's chunks: forward, for the state before each, and from the end, for the gradient of the
// state after each (the same sums with q for k and dy for x).
#pragma once

#include "mamba3/cuda/backward/chunk.cuh"

namespace mamba {

constexpr int kMamba3StatesThreads = 256;

template <typename T, int kStates, int kRows>
struct Mamba3StatesShared {
    T x[2][kRows * (kForwardRows + kTilePad)];
    T matrix[2][kRows * (kStates + kTilePad)];
    ChunkSteps<kRows> steps[2];
};

// Adds to rows `row` and `row` + 8 of a state what the step before a sequence leaves in them for its first step.
template <int kGroups>
__device__ __forceinline__ void add_step_before(float (&state)[kGroups][4], const MambaMamba3& p, const SequenceRange& sequence,
                                                int64_t sequence_index, int64_t head, int row, int first_column) {
    const float nu = weight_of_step_before(p, sequence, head);
#pragma unroll 1
    for (int64_t r = 0; r < p.rank; ++r) {
        const float* const k = p.k_state + ((sequence_index * p.rank + r) * p.nheads + head) * p.dstate;
        float x[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t own = row + 8 * half;
            x[half] = own < p.headdim ? nu * p.v_state[(sequence_index * p.nheads + head) * p.headdim + own] : 0.0f;
            if (p.mimo_v != nullptr && own < p.headdim) {
                x[half] *= p.mimo_v[(head * p.rank + r) * p.headdim + own];
            }
        }
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = first_column + 8 * j + i;
                const float entry = column < p.dstate ? k[element_of_column(p, column)] : 0.0f;
                state[j][i] = fmaf(x[0], entry, state[j][i]);
                state[j][2 + i] = fmaf(x[1], entry, state[j][2 + i]);
            }
        }
    }
}

// A block takes kForwardRows rows of the state of one sequence and head; eight warps, 16 rows and half of the states each.
template <typename T, int kStates, int kRows>
__global__ void __launch_bounds__(kMamba3StatesThreads, kStates > 128 ? 1 : 2)
    mamba3_states_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch, const bool from_end) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    constexpr int kColumns = kStates / 2;  // of a warp
    using Shared = Mamba3StatesShared<T, kStates, kRows>;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t row_tiles = ceil_div(p.headdim, kForwardRows), heads = launch.group_heads * p.ngroups;
    const int row0 = static_cast<int>(blockIdx.x % row_tiles) * kForwardRows;
    const int64_t launch_head = blockIdx.x / row_tiles % heads, sequence_index = blockIdx.x / row_tiles / heads;
    const int64_t head = head_of_launch(p, launch, launch_head), index = sequence_index * p.nheads + head;
    const SequenceRange sequence = sequence_range(p, sequence_index);
    const int64_t chunks = ceil_div(sequence.seqlen, launch.chunks.steps);
    const int64_t first_slot = slot_of_sequence(p, launch.chunks.steps, sequence_index, sequence.begin);
    const int rows = static_cast<int>(p.headdim) - row0;  // may be more than kForwardRows
    const int dstate = static_cast<int>(p.dstate);
    const int row = 16 * (warp % 4), column = warp / 4 * kColumns;
    const int lane_row = row + lane / 4, lane_column = column + lane % 4 * 2;
    const int64_t state_index = (index * p.headdim + row0) * dstate;

    float state[kColumns / 8][4];
    const float* const given = from_end ? q.dfinal_ssm : chunks > 0 ? p.ssm_state : nullptr;
    // Calls function(accumulator, index of its element in (U, H, P, N)).
    const auto for_each = [&](const auto& function) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int own_row = lane_row + i / 2 * 8, own_column = lane_column + 8 * j + i % 2;
                if (own_row < rows && own_column < dstate) {
                    function(state[j][i], state_index + own_row * dstate + element_of_column(p, own_column));
                }
            }
        }
    };
    set_to_zero(state);
    if (given != nullptr) {
        for_each([&](float& value, int64_t at) { value = given[at]; });
        if (!from_end) {
            add_step_before(state, p, sequence, sequence_index, head, row0 + lane_row, lane_column);
        }
    }

    for (int64_t i = -1; i < chunks; ++i) {
        if (i + 1 < chunks) {  // the next chunk's tiles are copied while this one's are multiplied
            const int64_t slot = first_slot + (from_end ? chunks - 2 - i : i + 1);
            const Mamba3Chunk chunk = find_chunk(p, launch.chunks, slot);
            const int next = static_cast<int>((i + 1) % 2);
            if (from_end) {
                load_dy<T, kRows, kForwardRows, kMamba3StatesThreads>(p, launch, chunk, launch_head, row0, shared.x[next]);
            } else {
                load_x<T, kRows, kForwardRows, kMamba3StatesThreads>(p, launch, chunk, head, row0, shared.x[next]);
            }
            load_rotated<T, kRows, kStates, kMamba3StatesThreads>(p, launch, from_end ? w.q : w.k, chunk, slot, launch_head,
                                                                  shared.matrix[next]);
            cp_async_commit_group();
            load_chunk_steps<kRows>(shared.steps[next], p, launch.chunks, slot, head);
        }
        if (i >= 0) {
            const int now = static_cast<int>(i % 2);
            const int64_t slot = first_slot + (from_end ? chunks - 1 - i : i);
            T* const to =
                launch.at<T>(from_end ? w.dstates : w.states) + ((slot * heads + launch_head) * p.headdim + row0) * dstate;
#pragma unroll
            for (int j = 0; j < kColumns / 16; ++j) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int own_row = lane_row + 8 * half;
                    T* const at = own_row < rows ? to + static_cast<int64_t>(own_row) * dstate + column + 16 * j : nullptr;
                    store_row<T>(at, dstate - column - 16 * j, dstate % 4 == 0,
                                 make_float2(state[2 * j][2 * half], state[2 * j][2 * half + 1]),
                                 make_float2(state[2 * j + 1][2 * half], state[2 * j + 1][2 * half + 1]), lane);
                }
            }
            const ChunkSteps<kRows>& steps = shared.steps[now];
            update_state<T, kColumns, kStates, kRows>(state, shared.x[now] + row, shared.matrix[now] + column,
                                                      from_end ? steps.entering : steps.adding, steps.carry, lane);
        }
        cp_async_wait_group<0>();
        __syncthreads();
    }
    if (from_end && q.dssm_state != nullptr) {
        for_each([&](float& value, int64_t at) { q.dssm_state[at] = value; });
    }
}

}  // namespace mamba
