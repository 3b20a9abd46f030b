// A chunk's gradients: a block walks heads of one group, so that those of q and k are added up in registers. The state before
// the chunk and the gradient of the state after it come from states.cuh, the gradient of the rows from rows.cuh.
//
// With W_ts the weight of pair_weight, G_ts = q_t . k_s, R_ts = dy_t . x_s, H the state before, dH' the gradient after:
//     dq_t = entering_t H^T dy_t + sum_s W_ts R_ts k_s
//     dk_s = adding_s dH'^T x_s + sum_t W_ts R_ts q_t
//     dx_s = adding_s dH' k_s + sum_t W_ts G_ts dy_t + D dy_s
// which, rotated back, are those of the group's rows and of the biases. An angle's gradient at a step sums a db - b da over the
// rows of all later steps: finish_angles.cuh adds them up.
#pragma once

#include "mamba3/cuda/backward/chunk_shared.cuh"
#include "mamba3/cuda/backward/pairs.cuh"

namespace mamba {

// A block's chunk and heads, and what a thread does with an item: a head, or kInner rows of its headdim.
template <typename T, class Tiles>
struct Mamba3ChunkGradients {
    static constexpr int kRows = Tiles::kRows, kStates = Tiles::kStates, kInner = Tiles::kInner;
    static constexpr int kThreads = Tiles::kThreads;
    using Shared = Mamba3ChunkShared<T, Tiles>;
    static constexpr int kPitch = Shared::kPitch, kInnerPitch = Shared::kInnerPitch, kRowsPitch = Shared::kRowsPitch;
    static constexpr int kPairs = Shared::kPairs;
    using Pairs = WarpTile<Tiles, kRows>;    // rows x rows
    using Wide = WarpTile<Tiles, kStates>;   // rows x states
    using Inputs = WarpTile<Tiles, kInner>;  // rows x headdim
    using Matrix = float[2 * Wide::kWide][4];
    using InputMatrix = float[2 * Inputs::kWide][4];

    const MambaMamba3Backward& q;
    const MambaMamba3& p;
    const Mamba3BackwardLaunch& launch;
    const Mamba3BackwardWorkspace& w;
    Shared& shared;
    const int lane, warp;
    const int above, beside;                 // a warp's 16 rows of an output, and its part of the columns
    const int step0, pair0, state0, input0;  // its first row and columns; more warps than columns: those behind have none
    const int row_of_lane;
    const int rank, dstate, angles;
    int64_t split, group, slot, slots, row_tiles, first_step;
    Mamba3Chunk chunk;
    int first_item, last_item;
    // Of the present item.
    int64_t tile, launch_head, head;
    int row0, columns;  // of headdim; columns may be more than kInner
    int parity;

    __device__ __forceinline__ Mamba3ChunkGradients(const MambaMamba3Backward& q_, const Mamba3BackwardLaunch& launch_,
                                                    Shared& shared_)
        : q(q_),
          p(q_.forward),
          launch(launch_),
          w(launch_.plan.workspace),
          shared(shared_),
          lane(threadIdx.x % 32),
          warp(threadIdx.x / 32),
          above(warp % Pairs::kAbove),
          beside(warp / Pairs::kAbove),
          step0(16 * above),
          pair0(16 * Pairs::kWide * beside),
          state0(16 * Wide::kWide * beside),
          input0(16 * Inputs::kWide * beside),
          row_of_lane(step0 + lane / 4),
          rank(static_cast<int>(p.rank)),
          dstate(static_cast<int>(p.dstate)),
          angles(static_cast<int>(p.nangles)),
          slots(launch.chunks.slots),
          row_tiles(launch.plan.row_tiles) {
        const int64_t splits = launch.plan.splits, heads = launch.group_heads;
        split = blockIdx.x % splits;
        group = blockIdx.x / splits % p.ngroups;
        slot = blockIdx.x / splits / p.ngroups;
        chunk = find_chunk(p, launch.chunks, slot);
        first_step = chunk.row * p.seqlen + chunk.first;
        first_item = static_cast<int>(heads * split / splits * row_tiles);
        last_item = static_cast<int>(heads * (split + 1) / splits * row_tiles);
    }
    __device__ __forceinline__ void go_to(int item) {
        tile = item % row_tiles;
        launch_head = group * launch.group_heads + item / row_tiles;
        head = head_of_launch(p, launch, launch_head);
        row0 = static_cast<int>(tile) * kInner;
        columns = static_cast<int>(p.headdim) - row0;
        parity = (item - first_item) % 2;
    }
    __device__ __forceinline__ const ChunkSteps<kRows>& steps() const { return shared.steps[parity]; }
    __device__ __forceinline__ bool begins_run(int step) const { return steps().run[step * rank] == step * rank; }
    __device__ __forceinline__ float* bias_sums(int of_k) const {
        return launch.at<float>(w.bias) + (((of_k * row_tiles + tile) * slots + slot) * p.nheads + head) * rank * dstate;
    }
    __device__ __forceinline__ float* mimo_v_sums() const {
        return launch.at<float>(w.mimo_v) + (slot * p.nheads + head) * rank * p.headdim + row0;
    }

    // An empty slot's sums are read too.
    __device__ __forceinline__ void store_zeros() const {
        for (int i = threadIdx.x; i < rank * dstate; i += kThreads) {
            bias_sums(0)[i] = bias_sums(1)[i] = 0.0f;
        }
        for (int i = threadIdx.x; i < rank * kInner && p.mimo_v != nullptr; i += kThreads) {
            if (i % kInner < columns) {
                mimo_v_sums()[i / kInner * p.headdim + i % kInner] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ void load_tiles() const {
        const int64_t heads = launch.group_heads * p.ngroups,
                      state_at = ((slot * heads + launch_head) * p.headdim + row0) * dstate;
        load_dy<T, kRows, kInner, kThreads>(p, launch, chunk, launch_head, row0, shared.dy);
        load_x<T, kRows, kInner, kThreads>(p, launch, chunk, head, row0, shared.x);
        load_tile<T, kInner, kStates, kThreads>(shared.state, launch.at<const T>(w.states) + state_at, dstate, columns, dstate,
                                                launch.state_vectors);
        load_tile<T, kInner, kStates, kThreads>(shared.dstate, launch.at<const T>(w.dstates) + state_at, dstate, columns,
                                                dstate, launch.state_vectors);
        load_rotated<T, kRows, kStates, kThreads>(p, launch, w.q, chunk, slot, launch_head, shared.q);
        load_rotated<T, kRows, kStates, kThreads>(p, launch, w.k, chunk, slot, launch_head, shared.k);
        cp_async_commit_group();
        load_chunk_steps<kRows>(shared.steps[parity], p, launch.chunks, slot, head);
        cp_async_wait_group<0>();
        __syncthreads();
    }

    // Pairs of rows (t, s): W G and W R as tiles, and their sums by row and by column.
    __device__ __forceinline__ void mix_pairs() const {
        if (pair0 >= kRows) {
            return;
        }
        float G[2 * Pairs::kWide][4], R[2 * Pairs::kWide][4];
        set_to_zero(G);
        set_to_zero(R);
        multiply<T, Pairs::kWide, kStates / 16, false, true>(G, shared.q + step0 * kPitch, kPitch, shared.k + pair0 * kPitch,
                                                             kPitch, lane);
        multiply<T, Pairs::kWide, kInner / 16, false, true>(R, shared.dy + step0 * kInnerPitch, kInnerPitch,
                                                            shared.x + pair0 * kInnerPitch, kInnerPitch, lane);
        float column_sum[2 * Pairs::kWide][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = row_of_lane + 8 * half;
            const PairRow row = pair_row(steps(), t, rank);
            float row_sum = 0.0f, own_sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 2 * Pairs::kWide; ++j) {
                const int s = pair0 + 8 * j + lane % 4 * 2;
                float weight[2], slope[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const PairWeight pair = pair_weight(steps(), row, s + i, rank);
                    const float product = G[j][2 * half + i], x_dy = R[j][2 * half + i];
                    const float earlier = pair.decay * product * x_dy;
                    weight[i] = pair.weight * product;
                    slope[i] = pair.weight * x_dy;
                    row_sum = fmaf(earlier, steps().scale[s + i], row_sum);
                    own_sum = pair.own ? fmaf(product, x_dy, own_sum) : own_sum;
                    column_sum[j][i] = half == 0 ? earlier : column_sum[j][i] + earlier;
                }
                store_pair<T>(shared.weights + t * kRowsPitch + s, weight[0], weight[1]);
                store_pair<T>(shared.slopes + t * kRowsPitch + s, slope[0], slope[1]);
            }
            row_sum = add_over_row(row_sum);
            own_sum = add_over_row(own_sum);
            if (lane % 4 == 0) {
                shared.sums.row_pairs[beside][t] = row_sum;
                shared.sums.own_pairs[beside][t] = own_sum;
            }
        }
#pragma unroll
        for (int j = 0; j < 2 * Pairs::kWide; ++j) {
            const float first = add_over_column(column_sum[j][0]), second = add_over_column(column_sum[j][1]);
            if (lane < 4) {
                shared.sums.column_pairs[above][pair0 + 8 * j + lane * 2] = first;
                shared.sums.column_pairs[above][pair0 + 8 * j + lane * 2 + 1] = second;
            }
        }
    }

    // What the entering and the leaving state have in dq, dk and dx, and D dy.
    __device__ __forceinline__ void multiply_states(Matrix& dq, Matrix& dk, InputMatrix& dx) const {
        set_to_zero(dq);
        set_to_zero(dk);
        set_to_zero(dx);
        const int r = row_of_lane;
        multiply<T, Wide::kWide, kInner / 16, false, false>(dq, shared.dy + step0 * kInnerPitch, kInnerPitch,
                                                            shared.state + state0, kPitch, lane);
        multiply<T, Wide::kWide, kInner / 16, false, false>(dk, shared.x + step0 * kInnerPitch, kInnerPitch,
                                                            shared.dstate + state0, kPitch, lane);
        const float2 from = dot_and_scale<T, Wide::kWide>(dq, steps().entering[r], steps().entering[r + 8],
                                                          shared.q + step0 * kPitch + state0, kPitch, lane);
        const float2 to = dot_and_scale<T, Wide::kWide>(dk, steps().adding[r], steps().adding[r + 8],
                                                        shared.k + step0 * kPitch + state0, kPitch, lane);
        if (lane % 4 == 0) {
            shared.sums.from_state[beside][r] = steps().entering[r] * from.x;
            shared.sums.from_state[beside][r + 8] = steps().entering[r + 8] * from.y;
            shared.sums.to_state[beside][r] = steps().leaving[r] * to.x;
            shared.sums.to_state[beside][r + 8] = steps().leaving[r + 8] * to.y;
        }
        float product = 0.0f;
        for (int i = threadIdx.x; i < kInner * kPairs; i += kThreads) {
            const int at = i / kPairs * kPitch + i % kPairs * 2;
            const float2 a = load_pair<T>(shared.state + at), b = load_pair<T>(shared.dstate + at);
            product = fmaf(a.x, b.x, fmaf(a.y, b.y, product));
        }
        product = add_over_warp(product);
        if (lane == 0) {
            shared.sums.state_product[warp] = product;
        }
        if (input0 < kInner) {
            multiply<T, Inputs::kWide, kStates / 16, false, true>(dx, shared.k + step0 * kPitch, kPitch,
                                                                  shared.dstate + input0 * kPitch, kPitch, lane);
            const float top = steps().adding[r], bottom = steps().adding[r + 8], D = p.D != nullptr ? p.D[head] : 0.0f;
#pragma unroll
            for (int j = 0; j < 2 * Inputs::kWide; ++j) {
                const T* const at = shared.dy + r * kInnerPitch + input0 + 8 * j + lane % 4 * 2;
                const float2 upper = load_pair<T>(at), lower = load_pair<T>(at + 8 * kInnerPitch);
                dx[j][0] = fmaf(top, dx[j][0], D * upper.x);
                dx[j][1] = fmaf(top, dx[j][1], D * upper.y);
                dx[j][2] = fmaf(bottom, dx[j][2], D * lower.x);
                dx[j][3] = fmaf(bottom, dx[j][3], D * lower.y);
            }
        }
    }

    // What pairs have in them, from the tiles of mix_pairs, and the gradient of the sequence's final k.
    __device__ __forceinline__ void multiply_pairs(Matrix& dq, Matrix& dk, InputMatrix& dx) const {
        multiply<T, Wide::kWide, kRows / 16, false, false>(dq, shared.slopes + step0 * kRowsPitch, kRowsPitch,
                                                           shared.k + state0, kPitch, lane);
        multiply<T, Wide::kWide, kRows / 16, true, false>(dk, shared.slopes + step0, kRowsPitch, shared.q + state0, kPitch,
                                                          lane);
        if (input0 < kInner) {
            multiply<T, Inputs::kWide, kRows / 16, true, false>(dx, shared.weights + step0, kRowsPitch, shared.dy + input0,
                                                                kInnerPitch, lane);
        }
        if (!chunk.last || tile != 0 || q.dfinal_k == nullptr) {
            return;
        }
        const float* const final_k = q.dfinal_k + (chunk.sequence * rank * p.nheads + head) * dstate;
#pragma unroll
        for (int j = 0; j < 2 * Wide::kWide; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = row_of_lane + i / 2 * 8 - (chunk.steps - 1) * rank,
                          column = state0 + 8 * j + lane % 4 * 2 + i % 2;
                if (r >= 0 && r < rank && column < dstate) {
                    dk[j][i] += final_k[r * p.nheads * dstate + element_of_column(p, column)];
                }
            }
        }
    }

    // The angles' part of dq and dk, which are then rotated back and added to the sums over heads.
    __device__ __forceinline__ void rotate_back(Matrix& dq, Matrix& dk, Matrix& dQ, Matrix& dK) const {
        const float2* const cos_sins = launch.at<const float2>(w.cos_sin) + cos_sin_index(p, launch, slot, launch_head);
        const int rows = chunk.steps * rank;
#pragma unroll
        for (int j = 0; j < 2 * Wide::kWide; ++j) {
            const int pair = state0 / 2 + 4 * j + lane % 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row_of_lane + 8 * half;
                float* const one[2] = {&dq[j][2 * half], &dk[j][2 * half]};
                if (pair < angles) {
                    const float2 cos_sin = row < rows ? cos_sins[row / rank * angles + pair] : make_float2(1.0f, 0.0f);
                    const float2 a = load_pair<T>(shared.q + row * kPitch + 2 * pair);
                    const float2 b = load_pair<T>(shared.k + row * kPitch + 2 * pair);
                    shared.dturns[row * kPairs + pair] =
                        (a.x * one[0][1] - a.y * one[0][0]) + (b.x * one[1][1] - b.y * one[1][0]);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        const float x = one[m][0], y = one[m][1];
                        one[m][0] = x * cos_sin.x + y * cos_sin.y;
                        one[m][1] = y * cos_sin.x - x * cos_sin.y;
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    dQ[j][2 * half + i] += one[0][i];
                    dK[j][2 * half + i] += one[1][i];
                }
            }
        }
    }

    // The chunk's sums for biases and mimo_v, and dv, from the tiles of dq, dk and dx.
    __device__ __forceinline__ void sum_parameters() const {
        for (int i = threadIdx.x; i < 2 * rank * dstate; i += kThreads) {
            const int m = i >= rank * dstate ? 1 : 0, r = i / dstate - m * rank, column = i % dstate;
            const float* const from = (m == 0 ? shared.dq_tile() : shared.dk_tile()) + r * kPitch + column;
            float sum = 0.0f;
#pragma unroll 8
            for (int t = 0; t < chunk.steps; ++t) {
                sum += from[t * rank * kPitch];
            }
            bias_sums(m)[r * dstate + element_of_column(p, column)] = sum;
        }
        T* const dv = static_cast<T*>(q.dv) + first_step * q.dv_step_stride + head * p.headdim + row0;
        const float* const weight = p.mimo_v != nullptr ? p.mimo_v + head * rank * p.headdim + row0 : nullptr;
        const float* const dfinal_v =
            chunk.last && q.dfinal_v != nullptr ? q.dfinal_v + (chunk.sequence * p.nheads + head) * p.headdim + row0 : nullptr;
        for (int i = threadIdx.x; i < chunk.steps * kInner; i += kThreads) {
            const int t = i / kInner, column = i % kInner;
            if (column < columns) {
                float sum = dfinal_v != nullptr && t == chunk.steps - 1 ? dfinal_v[column] : 0.0f;
                for (int r = 0; r < rank; ++r) {
                    const float value = shared.dx_tile()[(t * rank + r) * kInnerPitch + column];
                    sum = weight != nullptr ? fmaf(value, weight[r * p.headdim + column], sum) : sum + value;
                }
                dv[t * q.dv_step_stride + column] = from_float<T>(sum);
            }
        }
        const T* const v = static_cast<const T*>(p.v) + chunk.row * p.v_batch_stride + chunk.first * p.v_len_stride +
                           head * p.v_head_stride + row0;
        for (int i = threadIdx.x; i < rank * kInner && weight != nullptr; i += kThreads) {
            const int r = i / kInner, column = i % kInner;
            if (column < columns) {
                const float* const from = shared.dx_tile() + r * kInnerPitch + column;
                float sum = 0.0f;
                for (int t = 0; t < chunk.steps; ++t) {
                    sum = fmaf(from[t * rank * kInnerPitch], to_float(v[t * p.v_len_stride + column]), sum);
                }
                mimo_v_sums()[r * p.headdim + column] = sum;
            }
        }
    }

    // What each step's rows give to its angles, to memory. A thread takes an angle, the last warps first: sum_parameters gives
    // the first ones more.
    __device__ __forceinline__ void store_dturns() const {
        const int angle = kThreads - 1 - static_cast<int>(threadIdx.x);
        if (angle >= angles) {
            return;
        }
        const int64_t index = slot * p.nheads + head, pitch = mamba3_dturns_pitch(p);
        float* const to = launch.at<float>(w.dturns) + index * launch.chunks.steps * pitch + angle;
        float* const total = launch.at<float>(w.angle_totals) + index * angles + angle;
        float first_run = 0.0f;  // of the run that began before the chunk
        for (int t = chunk.steps - 1; t >= 0; --t) {
            float sum = 0.0f;
            for (int row = t * rank; row < (t + 1) * rank; ++row) {
                sum += shared.dturns[row * kPairs + angle];
            }
            to[t * pitch] = tile > 0 ? to[t * pitch] + sum : sum;
            first_run = begins_run(t) ? 0.0f : first_run + sum;
        }
        *total = tile > 0 ? *total + first_run : first_run;
    }

    __device__ __forceinline__ void store_terms() const {
        const int64_t at = (tile * p.batch * p.seqlen + first_step) * p.nheads + head;
        store_step_terms<Tiles>(launch.at<float4>(w.step_terms) + at, p.nheads, shared.sums, steps(), chunk.steps, rank, lane);
    }
    __device__ __forceinline__ void store_matrices(const Matrix& dQ, const Matrix& dK) const {
        const int64_t row_stride = p.ngroups * dstate, all_rows = p.batch * p.seqlen * rank;
        const int64_t at = (split * all_rows + first_step * rank + step0) * row_stride + group * dstate + state0;
        const int rows = chunk.steps * rank - step0;
        const bool adds = launch.first_head > 0;
        store_sum<Wide::kWide>(launch.at<float>(w.dq_parts) + at, row_stride, dQ, rows, dstate - state0, adds, lane);
        store_sum<Wide::kWide>(launch.at<float>(w.dk_parts) + at, row_stride, dK, rows, dstate - state0, adds, lane);
    }
};

template <typename T, class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 1)
    mamba3_backward_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    using Gradients = Mamba3ChunkGradients<T, Tiles>;
    using Shared = typename Gradients::Shared;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    Gradients block(q, launch, shared);
    typename Gradients::Matrix dQ, dK;  // over heads
    set_to_zero(dQ);
    set_to_zero(dK);
    for (int item = block.first_item; item < block.last_item; ++item) {
        block.go_to(item);
        if (block.chunk.steps == 0) {
            block.store_zeros();
            continue;
        }
        block.load_tiles();
        block.mix_pairs();
        typename Gradients::Matrix dq, dk;
        typename Gradients::InputMatrix dx;
        block.multiply_states(dq, dk, dx);
        __syncthreads();  // the tiles of pairs are complete
        block.multiply_pairs(dq, dk, dx);
        block.rotate_back(dq, dk, dQ, dK);
        __syncthreads();  // q, k, states and pairs have been read
        store_rows<Gradients::Wide::kWide>(shared.dq_tile() + block.step0 * Gradients::kPitch + block.state0, Gradients::kPitch,
                                           dq, block.lane);
        store_rows<Gradients::Wide::kWide>(shared.dk_tile() + block.step0 * Gradients::kPitch + block.state0, Gradients::kPitch,
                                           dk, block.lane);
        if (block.input0 < Gradients::kInner) {
            store_rows<Gradients::Inputs::kWide>(shared.dx_tile() + block.step0 * Gradients::kInnerPitch + block.input0,
                                                 Gradients::kInnerPitch, dx, block.lane);
        }
        __syncthreads();
        block.sum_parameters();
        block.store_dturns();
        __syncthreads();
        if (block.warp == 0) {  // while the others go on to the next head
            block.store_terms();
        }
    }
    if (block.chunk.steps > 0) {
        block.store_matrices(dQ, dK);
    }
}

}  // namespace mamba
