// The forward scan of any call on any GPU: a block walks the chunks of 64 rows of one head's state, which stays in registers;
// four warps take 16 rows each. chunks.cuh has the formulas. A chunk:
//
//      q, k, v -> shared memory (asynchronous copies); the steps' values
//      ---- barrier: values; each warp sums up the angles of its quarter of the steps
//      ---- barrier: sums and copies; each warp rotates its steps' rows of q and k; x = mimo_v v
//      ---- barrier: q, k, x; M = (q k^T) weighted, 16 x 16 tiles shared out
//      ---- barrier: M; y = H q^T + M x
//      ---- barrier: q and M have been read, y takes their place; H' = carry H + x^T k
//      ---- barrier: y; D, norm, gate, projection -> out
//      ---- barrier: all is free
//
// Without results (launch.results) q, M and y are left out.
#pragma once

#include "mamba3/cuda/forward/general_tile.cuh"
#include "mamba3/cuda/forward/state.cuh"

namespace mamba {

// A block's chunk.
template <typename T>
struct Mamba3ForwardChunk {
    int64_t first, slot;  // first: step of the row
    int steps;

    __device__ __forceinline__ Mamba3ForwardChunk(const Mamba3Block& block, const Mamba3Chunks& chunks, int number)
        : first(block.first_step(chunks) + number * chunks.steps), slot(block.slot + number) {
        const int64_t left = block.range.begin + block.range.seqlen - first;
        steps = static_cast<int>(left < chunks.steps ? left : chunks.steps);
    }
};

// Begins to copy a chunk's rows of q, k and v.
template <typename T, class Layout>
__device__ __forceinline__ void begin_chunk_copies(const MambaMamba3& p, const Mamba3ForwardLaunch& launch,
                                                   const Mamba3Block& block, const Mamba3ForwardChunk<T>& chunk,
                                                   Mamba3ForwardShared<T, Layout>& shared, T* v_tile) {
    constexpr int kRows = Layout::kRows, kStates = Layout::kStates;
    const Mamba3RankRows rank_rows(launch.ranks_log2);
    const int dstate = static_cast<int>(p.dstate);
    if (launch.results != 0) {
        const Mamba3Matrix<T> q = {static_cast<const T*>(p.q) + block.range.row * p.q_batch_stride +
                                       chunk.first * p.q_len_stride + launch.q_rank * p.q_rank_stride +
                                       block.group * p.q_group_stride,
                                   p.q_len_stride, p.q_rank_stride};
        load_rank_rows<T, kRows, kStates>(shared.scores.q, q, rank_rows, kRows, static_cast<int>(p.rank) - launch.q_rank,
                                          chunk.steps, dstate, launch.q_vectors != 0);
    }
    const Mamba3Matrix<T> k = {static_cast<const T*>(p.k) + block.range.row * p.k_batch_stride + chunk.first * p.k_len_stride +
                                   launch.k_rank * p.k_rank_stride + block.group * p.k_group_stride,
                               p.k_len_stride, p.k_rank_stride};
    load_rank_rows<T, kRows, kStates>(shared.k, k, rank_rows, kRows, static_cast<int>(p.rank) - launch.k_rank, chunk.steps,
                                      dstate, launch.k_vectors != 0);
    const Mamba3Matrix<T> v = {static_cast<const T*>(p.v) + block.range.row * p.v_batch_stride + chunk.first * p.v_len_stride +
                                   block.head * p.v_head_stride + block.row0,
                               p.v_len_stride, 0};
    load_rank_rows<T, kRows, kMamba3StateRows>(v_tile, v, Mamba3RankRows(0), static_cast<int>(launch.chunks.steps), 1,
                                               chunk.steps, block.columns, launch.v_vectors != 0);
    cp_async_commit_group();
}

// When the steps' values are there: the rows of q and k, rotated, and those of x.
template <typename T, class Layout>
__device__ __forceinline__ void finish_chunk_copies(const MambaMamba3& p, const Mamba3ForwardLaunch& launch,
                                                    const Mamba3Block& block, const Mamba3ForwardChunk<T>& chunk,
                                                    Mamba3ForwardShared<T, Layout>& shared, const T* v_tile, int warp,
                                                    int lane) {
    constexpr int kStates = Layout::kStates;
    const Mamba3Chunks& chunks = launch.chunks;
    Mamba3Turning turning;
    turning.speeds = chunks.speeds + mamba3_speeds_index(p, block.range.row, chunk.first, block.head);
    turning.speeds_stride = static_cast<int>((p.angles_of_heads != 0 ? p.nheads : 1) * p.nangles);
    turning.turns = chunks.turns + mamba3_turns_index(p, chunk.slot, block.head);
    turning.dt = shared.values.dt;
    turning.keep = shared.values.keep;
    turning.start = shared.values.start;
    turning.steps = chunk.steps;
    turning.quarter = (static_cast<int>(chunks.steps) + kMamba3Warps - 1) / kMamba3Warps;
    turning.packed = p.seq_idx != nullptr;
    turning.dstate = static_cast<int>(p.dstate);
    turning.angles = static_cast<int>(p.nangles);
    turning.pairwise = p.pairwise != 0;
    const bool words = launch.words != 0 && turning.quarter % 4 == 0;
    if (words) {
        sum_turns<T, kStates, 4>(shared.turn_sums, turning, warp, lane);
    } else {
        sum_turns<T, kStates, 1>(shared.turn_sums, turning, warp, lane);
    }
    cp_async_wait_group<0>();
    __syncthreads();
    const float* const q_bias = p.q_bias + (block.head * p.rank + launch.q_rank) * p.dstate;
    const float* const k_bias = p.k_bias + (block.head * p.rank + launch.k_rank) * p.dstate;
    const Mamba3RankRows rank_rows(launch.ranks_log2);
    const int q_ranks = static_cast<int>(p.rank) - launch.q_rank, k_ranks = static_cast<int>(p.rank) - launch.k_rank;
    if (words) {
        rotate_rows<T, kStates, true, 4>(shared.scores.q, shared.k, shared.turn_sums, turning, q_bias, k_bias, rank_rows.ranks,
                                         q_ranks, k_ranks, launch.results != 0, warp, lane);
    } else {
        rotate_rows<T, kStates, false, 1>(shared.scores.q, shared.k, shared.turn_sums, turning, q_bias, k_bias, rank_rows.ranks,
                                          q_ranks, k_ranks, launch.results != 0, warp, lane);
    }
    if (v_tile != shared.x) {
        const float* const weight =
            p.mimo_v != nullptr ? p.mimo_v + (block.head * p.rank + launch.k_rank) * p.headdim + block.row0 : nullptr;
        project_rows<T>(shared.x, v_tile, rank_rows, Layout::kRows, weight, p.headdim, k_ranks, chunk.steps, block.columns);
    }
    __syncthreads();
}

// The chunk's rows of y, to shared memory, the warp's 16 columns of each; from the state before the chunk.
template <typename T, class Layout>
__device__ __forceinline__ void find_rows(Mamba3ForwardShared<T, Layout>& shared, const float (&state)[Layout::kStates / 8][4],
                                          int ranks, int warp, int lane) {
    constexpr int kStates = Layout::kStates, kTiles = Layout::kRows / 16, kPitch = PaddedTile<kStates>::kPitch;
    using Mix = Mamba3MixTiles<Layout::kRows>;
    const int row = 16 * warp;
    mix_rows<T, Layout>(shared.scores.M, shared.scores.q, shared.k, shared.values, ranks, warp, lane);
    __syncthreads();
    float y[kTiles][2][4] = {};  // all rows, this warp's 16 columns
#pragma unroll
    for (int k16 = 0; k16 < kStates / 16; ++k16) {  // exp(cs_t) H q_t
        Operand<T> b;
        b_from_accumulators<T>(b, state[2 * k16], state[2 * k16 + 1]);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            Operand<T> a;
            load_a<T>(a, shared.scores.q + 16 * i * kPitch + 16 * k16, kPitch, lane);
            multiply_add<T>(y[i][0], a, b, 0);
            multiply_add<T>(y[i][1], a, b, 1);
        }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const float above = shared.values.entering[16 * i + lane / 4], below = shared.values.entering[16 * i + lane / 4 + 8];
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
        load_b_transposed<T>(b, shared.x + 16 * k16 * kMamba3XPitch + row, kMamba3XPitch, lane);
#pragma unroll
        for (int i = k16; i < kTiles; ++i) {
            Operand<T> a;
            load_a<T>(a, shared.scores.M + Mix::offset(i, k16), Mix::kPitch, lane);
            multiply_add<T>(y[i][0], a, b, 0);
            multiply_add<T>(y[i][1], a, b, 1);
        }
    }
    __syncthreads();  // q and M have been read
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float* const at = shared.y + (16 * i + lane / 4) * kMamba3YPitch + row + 8 * j + lane % 4 * 2;
            *reinterpret_cast<float2*>(at) = make_float2(y[i][j][0], y[i][j][1]);
            *reinterpret_cast<float2*>(at + 8 * kMamba3YPitch) = make_float2(y[i][j][2], y[i][j][3]);
        }
    }
}

// From the rows of y to the output, or to the rows that wait for mamba3_finish_kernel.
template <typename T, class Layout>
__device__ __forceinline__ void store_chunk(const MambaMamba3& p, const Mamba3ForwardLaunch& launch, const Mamba3Block& block,
                                            const Mamba3ForwardChunk<T>& chunk, const Mamba3ForwardShared<T, Layout>& shared,
                                            const T* v_tile) {
    Mamba3FinishTile<T> tile;
    tile.y = shared.y;
    tile.v = v_tile;
    tile.v_pitch = kMamba3XPitch;
    tile.first = chunk.first;
    tile.steps = chunk.steps;
    tile.ranks = 1 << launch.ranks_log2;
    tile.q_rank = launch.q_rank;
    tile.with_D = launch.k_rank == 0;
    if (launch.rows != nullptr) {
        store_scan_rows<T>(p, block, tile, launch.rows, launch.adds != 0);
    } else {
        finish_chunk<T>(p, block, tile, launch.vectors);
    }
}

template <int kStates>
__device__ __forceinline__ void load_first_state(float (&state)[kStates / 8][4], const MambaMamba3& p,
                                                 const Mamba3ForwardLaunch& launch, const Mamba3Block& block, int row,
                                                 int lane) {
    const int dstate = static_cast<int>(p.dstate);
    const bool has_initial = block.segment == 0 && p.ssm_state != nullptr;
    const float* from = has_initial && launch.k_rank == 0 ? p.ssm_state + block.state_index(p) : nullptr;
    if (block.segment > 0) {
        from = launch.results != 0 ? block.end_of(p, launch, block.segment - 1) : nullptr;
    }
    if (from != nullptr) {
        load_state<kStates>(state, from, row, block.columns, 0, dstate, lane);
    } else {
        set_to_zero(state);
    }
    if (has_initial && block.chunks > 0) {
        const int ranks = 1 << launch.ranks_log2, left = static_cast<int>(p.rank) - launch.k_rank;
        add_pairs_before<true>(state, p, block, launch.k_rank, ranks < left ? ranks : left, row, lane);
    }
}

template <int kStates>
__device__ __forceinline__ void store_last_state(float (&state)[kStates / 8][4], const MambaMamba3& p,
                                                 const Mamba3ForwardLaunch& launch, const Mamba3Block& block, float carried,
                                                 int row, int lane) {
    const int dstate = static_cast<int>(p.dstate);
    if (launch.results == 0) {
        store_state<kStates>(block.end_of(p, launch, block.segment), state, row, block.columns, 0, dstate, lane);
        block.store_decay(p, launch, carried);
    } else if (p.final_ssm != nullptr && block.segment == launch.segments - 1 && launch.q_rank == 0) {
        float* const to = p.final_ssm + block.state_index(p);
        if (launch.adds != 0) {
            float others[kStates / 8][4];
            load_state<kStates>(others, to, row, block.columns, 0, dstate, lane);
#pragma unroll
            for (int j = 0; j < kStates / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    state[j][i] += others[j][i];
                }
            }
        }
        store_state<kStates>(to, state, row, block.columns, 0, dstate, lane);
    }
}

template <typename T, class Layout>
__global__ void __launch_bounds__(kMamba3Threads, mamba3_forward_blocks<Layout>())
    mamba3_forward_kernel(const MambaMamba3 p, const Mamba3ForwardLaunch launch) {
    constexpr int kRows = Layout::kRows, kStates = Layout::kStates;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    auto& shared = *reinterpret_cast<Mamba3ForwardShared<T, Layout>*>(memory);
    T* const v_tile = shared.v(p.rank > 1 || p.mimo_v != nullptr);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = 16 * warp;
    const Mamba3Block block(p, launch);
    const Mamba3RankRows rank_rows(launch.ranks_log2);
    float state[kStates / 8][4];
    load_first_state<kStates>(state, p, launch, block, row, lane);
    float carried = 1.0f;
    for (int i = 0; i < block.chunks; ++i) {
        const Mamba3ForwardChunk<T> chunk(block, launch.chunks, i);
        const float* const values = mamba3_values(launch.chunks, p.nheads, chunk.slot, block.head, kMamba3High);
        const Mamba3RowLoads<kRows> row_loads(launch.chunks, values, rank_rows);
        begin_chunk_copies(p, launch, block, chunk, shared, v_tile);
        row_loads.store(shared.values, rank_rows);
        __syncthreads();
        finish_chunk_copies(p, launch, block, chunk, shared, v_tile, warp, lane);
        if (launch.results != 0) {
            find_rows(shared, state, rank_rows.ranks, warp, lane);
        }
        if (launch.results == 0 || i + 1 < block.chunks || p.final_ssm != nullptr) {
            carried *= shared.values.carry;
            update_state<T, kStates, kStates, kRows>(state, shared.x + row, shared.k, shared.values.adding, shared.values.carry,
                                                     lane);
        }
        __syncthreads();
        if (launch.results != 0) {
            store_chunk(p, launch, block, chunk, shared, v_tile);
            __syncthreads();
        }
    }
    store_last_state<kStates>(state, p, launch, block, carried, row, lane);
}

}  // namespace mamba
