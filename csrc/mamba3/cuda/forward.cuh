// The forward scan: a block walks the chunks of 64 rows of one head's state, which stays in registers; four warps take 16 rows
// each. chunks.cuh has the formulas.
#pragma once

#include "mamba3/cuda/forward_tile.cuh"

namespace mamba {

// kResults: out and the final state; else a segment's state at its end from zero, and its decay.
template <typename T, class Layout, bool kResults>
__global__ void __launch_bounds__(kMamba3Threads, mamba3_forward_blocks<Layout>())
    mamba3_forward_kernel(const MambaMamba3 p, const Mamba3ForwardLaunch launch) {
    constexpr int kRows = Layout::kRows;
    constexpr int kStates = Layout::kStates;
    constexpr int kTiles = kRows / 16;
    constexpr int kPitch = PaddedTile<kStates>::kPitch;
    using Tiles = Mamba3ForwardTiles<T, Layout>;
    using Mix = Mamba3MixTiles<kRows>;
    using Values = Mamba3RowValues<kRows>;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, mamba3_shared);
    T* const q_tile = reinterpret_cast<T*>(mamba3_shared);
    T* const M_tile = reinterpret_cast<T*>(mamba3_shared + Tiles::kMatrix);
    float* const y_tile = reinterpret_cast<float*>(mamba3_shared);
    T* const k_tile = reinterpret_cast<T*>(mamba3_shared + Tiles::kFirst);
    T* const x_tile = k_tile + kRows * kPitch;
    using Sum = typename Mamba3TurnSum<T>::Value;
    Sum* const turn_sums = reinterpret_cast<Sum*>(x_tile + kRows * kMamba3XPitch);
    Values& values = *reinterpret_cast<Values*>(turn_sums + kMamba3TurnSums<kStates>);
    [[maybe_unused]] const bool plain =
        p.rank == 1 && p.norm_weight == nullptr && p.mimo_v == nullptr && p.mimo_z == nullptr && p.mimo_out == nullptr;
    const bool projects = p.rank > 1 || p.mimo_v != nullptr;  // x is not v
    T* const v_tile = projects ? reinterpret_cast<T*>(&values + 1) : x_tile;

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row = 16 * warp;
    const int dstate = static_cast<int>(p.dstate);
    const Mamba3Chunks& chunks = launch.chunks;

    const uint32_t row_tiles = static_cast<uint32_t>(ceil_div(p.headdim, kMamba3StateRows));
    uint32_t index = blockIdx.x;
    const int row0 = static_cast<int>(index % row_tiles) * kMamba3StateRows;
    const int columns = static_cast<int>(p.headdim) - row0;  // of v, from row0 on; may be more than 64
    index /= row_tiles;
    const int64_t head = index % static_cast<uint32_t>(p.nheads);
    const int64_t group = head / (p.nheads / p.ngroups);
    index /= static_cast<uint32_t>(p.nheads);
    const int64_t segment = index % static_cast<uint32_t>(launch.segments);
    const int64_t sequence = index / static_cast<uint32_t>(launch.segments);
    const Mamba3Sequence range = mamba3_sequence(p, sequence);
    const int64_t all_chunks = ceil_div(range.seqlen, chunks.steps);
    const int64_t first_chunk = segment * launch.chunks_a_segment;
    const int64_t behind = first_chunk + launch.chunks_a_segment;
    const int64_t last_chunk = behind < all_chunks && p.cu_seqlens == nullptr ? behind : all_chunks;

    const Mamba3RankRows rank_rows(launch.ranks_log2);
    const int ranks = rank_rows.ranks;
    const int q_ranks = static_cast<int>(p.rank) - launch.q_rank, k_ranks = static_cast<int>(p.rank) - launch.k_rank;
    const int64_t state_size = p.headdim * p.dstate;
    const int64_t state_index = (sequence * p.nheads + head) * state_size + static_cast<int64_t>(row0) * p.dstate;
    const int64_t ends_row = p.sequences * p.nheads * state_size;
    const bool has_initial = segment == 0 && p.ssm_state != nullptr;

    float state[kStates / 8][4];
    const float* from = has_initial && launch.k_rank == 0 ? p.ssm_state : nullptr;
    if (segment > 0) {
        from = kResults ? launch.ends + (segment - 1) * ends_row : nullptr;
    }
    if (from != nullptr) {
        load_state<kStates>(state, from + state_index, row, columns, 0, dstate, lane);
    } else {
#pragma unroll
        for (int j = 0; j < kStates / 8; ++j) {
            state[j][0] = state[j][1] = state[j][2] = state[j][3] = 0.0f;
        }
    }
    if (has_initial && all_chunks > 0) {
        add_step_before<kStates>(state, p, sequence, range, head, launch.k_rank, ranks, row0, row, columns, lane);
    }

    const int64_t first_slot = mamba3_slot(p, chunks, sequence, range.begin);
    const Mamba3FinishHead finish_head = {head, row0, columns, range.row};
    float carried = 1.0f;
    for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
        const int64_t first = range.begin + chunk * chunks.steps;  // step of the row
        const int64_t left = range.begin + range.seqlen - first;
        const int steps = static_cast<int>(left < chunks.steps ? left : chunks.steps);
        const int64_t slot = first_slot + chunk;
        const Mamba3RowLoads<kRows> row_loads(chunks, mamba3_values(chunks, p.nheads, slot, head, kMamba3High), rank_rows);
        if (kResults) {
            const Mamba3Matrix<T> q = {static_cast<const T*>(p.q) + range.row * p.q_batch_stride + first * p.q_len_stride +
                                           launch.q_rank * p.q_rank_stride + group * p.q_group_stride,
                                       p.q_len_stride, p.q_rank_stride};
            load_rank_rows<T, kRows, kStates>(q_tile, q, rank_rows, kRows, q_ranks, steps, dstate, launch.q_vectors != 0);
        }
        const Mamba3Matrix<T> k = {static_cast<const T*>(p.k) + range.row * p.k_batch_stride + first * p.k_len_stride +
                                       launch.k_rank * p.k_rank_stride + group * p.k_group_stride,
                                   p.k_len_stride, p.k_rank_stride};
        load_rank_rows<T, kRows, kStates>(k_tile, k, rank_rows, kRows, k_ranks, steps, dstate, launch.k_vectors != 0);
        const T* const v =
            static_cast<const T*>(p.v) + range.row * p.v_batch_stride + first * p.v_len_stride + head * p.v_head_stride + row0;
        if (projects) {
            const Mamba3Matrix<T> rows = {v, p.v_len_stride, 0};
            load_rank_rows<T, kRows, kMamba3StateRows>(v_tile, rows, Mamba3RankRows(0), static_cast<int>(chunks.steps), 1,
                                                       steps, columns, launch.v_vectors != 0);
        } else {
            load_tile<T, kRows, kMamba3StateRows, kMamba3Threads>(v_tile, v, p.v_len_stride, steps, columns,
                                                                  launch.v_vectors != 0);
        }
        cp_async_commit_group();
        row_loads.store(values, rank_rows);
        __syncthreads();

        Mamba3Turning turning;
        turning.speeds = chunks.speeds + mamba3_speeds_index(p, range.row, first, head);
        turning.speeds_stride = static_cast<int>((p.angles_of_heads != 0 ? p.nheads : 1) * p.nangles);
        turning.turns = chunks.turns + mamba3_turns_index(p, slot, head);
        turning.dt = values.dt;
        turning.keep = values.keep;
        turning.start = values.start;
        turning.steps = steps;
        turning.quarter = (static_cast<int>(chunks.steps) + kMamba3Warps - 1) / kMamba3Warps;
        turning.packed = p.seq_idx != nullptr;
        turning.dstate = dstate;
        turning.angles = static_cast<int>(p.nangles);
        turning.pairwise = p.pairwise != 0;
        const float* const q_bias = p.q_bias + (head * p.rank + launch.q_rank) * p.dstate;
        const float* const k_bias = p.k_bias + (head * p.rank + launch.k_rank) * p.dstate;
        const bool words = launch.words != 0 && turning.quarter % 4 == 0;
        if (words && turning.pairwise) {
            sum_turns<T, kStates, kMamba3Neighbours, 4>(turn_sums, turning, warp, lane);
        } else if (words) {
            sum_turns<T, kStates, kMamba3Halves, 4>(turn_sums, turning, warp, lane);
        } else {
            sum_turns<T, kStates, kMamba3Elements, 1>(turn_sums, turning, warp, lane);
        }
        cp_async_wait_group<0>();
        __syncthreads();
        if (words && turning.pairwise) {
            turn_rows<T, kStates, kMamba3Neighbours, kResults, 4>(q_tile, k_tile, turn_sums, turning, q_bias, k_bias, ranks,
                                                                  q_ranks, k_ranks, warp, lane);
        } else if (words) {
            turn_rows<T, kStates, kMamba3Halves, kResults, 4>(q_tile, k_tile, turn_sums, turning, q_bias, k_bias, ranks,
                                                              q_ranks, k_ranks, warp, lane);
        } else {
            turn_rows<T, kStates, kMamba3Elements, kResults, 1>(q_tile, k_tile, turn_sums, turning, q_bias, k_bias, ranks,
                                                                q_ranks, k_ranks, warp, lane);
        }
        if (projects) {
            const float* const weight =
                p.mimo_v != nullptr ? p.mimo_v + (head * p.rank + launch.k_rank) * p.headdim + row0 : nullptr;
            project_rows<T>(x_tile, v_tile, rank_rows, kRows, weight, p.headdim, k_ranks, steps, columns);
        }
        __syncthreads();

        if constexpr (kResults) {
            mix_rows<T, Layout>(M_tile, q_tile, k_tile, values, ranks, warp, lane);
            __syncthreads();
            float y[kTiles][2][4];  // all rows, this warp's 16 columns
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    y[i][j][0] = y[i][j][1] = y[i][j][2] = y[i][j][3] = 0.0f;
                }
            }
#pragma unroll
            for (int k16 = 0; k16 < kStates / 16; ++k16) {  // exp(cs_t) H q_t
                Operand<T> b;
                b_from_accumulators<T>(b, state[2 * k16], state[2 * k16 + 1]);
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    Operand<T> a;
                    load_a<T>(a, q_tile + 16 * i * kPitch + 16 * k16, kPitch, lane);
                    multiply_add<T>(y[i][0], a, b, 0);
                    multiply_add<T>(y[i][1], a, b, 1);
                }
            }
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                const float above = values.entering[16 * i + lane / 4], below = values.entering[16 * i + lane / 4 + 8];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    y[i][j][0] *= above;
                    y[i][j][1] *= above;
                    y[i][j][2] *= below;
                    y[i][j][3] *= below;
                }
            }
#pragma unroll
            for (int k16 = 0; k16 < kTiles; ++k16) {  // M x
                Operand<T> b;
                load_b_transposed<T>(b, x_tile + 16 * k16 * kMamba3XPitch + row, kMamba3XPitch, lane);
#pragma unroll
                for (int i = k16; i < kTiles; ++i) {
                    Operand<T> a;
                    load_a<T>(a, M_tile + Mix::offset(i, k16), Mix::kPitch, lane);
                    multiply_add<T>(y[i][0], a, b, 0);
                    multiply_add<T>(y[i][1], a, b, 1);
                }
            }
            __syncthreads();  // q and M have been read
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float* const at = y_tile + (16 * i + lane / 4) * kMamba3YPitch + row + 8 * j + lane % 4 * 2;
                    *reinterpret_cast<float2*>(at) = make_float2(y[i][j][0], y[i][j][1]);
                    *reinterpret_cast<float2*>(at + 8 * kMamba3YPitch) = make_float2(y[i][j][2], y[i][j][3]);
                }
            }
        }
        if (!kResults || chunk + 1 < last_chunk || p.final_ssm != nullptr) {
            carried *= values.carry;
            update_state<T, kStates, kStates, kRows>(state, x_tile + row, k_tile, values.adding, values.carry, lane);
        }
        __syncthreads();
        if constexpr (kResults) {
            Mamba3FinishTile<T> tile;
            tile.y = y_tile;
            tile.v = v_tile;
            tile.v_pitch = kMamba3XPitch;
            tile.first = first;
            tile.steps = steps;
            tile.ranks = ranks;
            tile.q_rank = launch.q_rank;
            tile.with_D = launch.k_rank == 0;
            if (launch.rows != nullptr) {
                store_scan_rows<T>(p, finish_head, tile, launch.rows, launch.adds != 0);
            } else if (launch.vectors.all != 0 && columns >= kMamba3StateRows) {
                if (plain) {
                    finish_plain_chunk<T>(p, finish_head, tile);
                } else {
                    finish_chunk<T, true>(p, finish_head, tile, launch.vectors);
                }
            } else {
                finish_chunk<T, false>(p, finish_head, tile, launch.vectors);
            }
            __syncthreads();
        }
    }

    if (!kResults) {
        store_state<kStates>(launch.ends + segment * ends_row + state_index, state, row, columns, 0, dstate, lane);
        if (threadIdx.x == 0 && row0 == 0) {
            launch.decays[(segment * p.sequences + sequence) * p.nheads + head] = carried;
        }
    } else if (p.final_ssm != nullptr && segment == launch.segments - 1 && launch.q_rank == 0) {
        float* const to = p.final_ssm + state_index;
        if (launch.adds != 0) {
            float others[kStates / 8][4];
            load_state<kStates>(others, to, row, columns, 0, dstate, lane);
#pragma unroll
            for (int j = 0; j < kStates / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    state[j][i] += others[j][i];
                }
            }
        }
        store_state<kStates>(to, state, row, columns, 0, dstate, lane);
    }
}

// ends[i] = the state at the end of segment i, from its own state from zero and the one before it.
constexpr int kMamba3CarryStateThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kMamba3CarryStateThreads)
    mamba3_carry_states_kernel(const MambaMamba3 p, int64_t segments, float* ends, const float* decays) {
    const int64_t size = p.headdim * p.dstate;
    const int64_t rows = p.sequences * p.nheads;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kMamba3CarryStateThreads + threadIdx.x;
    griddepcontrol_wait();
    if (index >= rows * size) {
        return;
    }
    float state = ends[index];
    for (int64_t segment = 1; segment + 1 < segments; ++segment) {
        float& end = ends[segment * rows * size + index];
        state = fmaf(decays[segment * rows + index / size], state, end);
        end = state;
    }
}

}  // namespace mamba
