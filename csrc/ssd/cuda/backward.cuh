// Backward: a block takes one chunk and walks heads of one group, so that dB and dC of the chunk are added up in registers
// and C B^T is computed once. The state before the chunk and the gradient of the state after it come from states.cuh.
//
// With dG_ts = L_ts dt_s (dout_t . x_s), L_ts = exp(cs_t - cs_s), G = C B^T, H the state before, dH' the gradient after:
//     dC_t = exp(cs_t) H^T dout_t + sum_s dG_ts B_s
//     dB_s = exp(cs_last - cs_s) dt_s dH'^T x_s + sum_t dG_ts C_t
//     dx_s = dt_s (exp(cs_last - cs_s) dH' B_s + sum_t L_ts G_ts dout_t) + D dout_s
// and the gradient of a_t = dt_t A sums, over the pairs r >= t > s, what each path from s to r carries: no large terms cancel.
#pragma once

#include "ssd/cuda/backward_tile.cuh"

namespace mamba {

template <typename T, class Layout>
__global__ void __launch_bounds__(Layout::kThreads) ssd_backward_kernel(const MambaSsdBackward q, const BackwardLaunch launch) {
    constexpr int kSteps = Layout::kSteps;
    constexpr int kStates = Layout::kStates;
    constexpr int kRows = Layout::kRows;
    constexpr int kStride = kStates + kTilePad;
    constexpr int kXStride = kRows + kTilePad;
    constexpr int kMStride = kSteps + kTilePad;
    using Pairs = WarpTile<Layout, kSteps>;  // steps x steps
    using Wide = WarpTile<Layout, kStates>;  // steps x states
    using Inputs = WarpTile<Layout, kRows>;  // steps x headdim
    const MambaSsd& p = q.forward;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, shared);
    T* const B_tile = reinterpret_cast<T*>(shared);
    T* const C_tile = B_tile + kSteps * kStride;
    T* const items_tiles = C_tile + kSteps * kStride;
    const bool is_ahead = launch.ahead != 0;
    T* const M_tile = items_tiles + item_elements<Layout>(is_ahead);
    BackwardDecays<kSteps>* const decays = reinterpret_cast<BackwardDecays<kSteps>*>(M_tile + kSteps * kMStride);
    BackwardSums<Layout>& sums = *reinterpret_cast<BackwardSums<Layout>*>(decays + kDecaysKept);

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int above = warp % Pairs::kAbove;  // which 16 steps, as rows of an output
    const int beside = warp / Pairs::kAbove;
    const int step0 = 16 * above;
    // Where there are more warps than columns, those that begin beyond the last one have nothing to multiply.
    const int pair0 = 16 * Pairs::kWide * beside;    // first column of this warp, steps
    const int state0 = 16 * Wide::kWide * beside;    // states
    const int input0 = 16 * Inputs::kWide * beside;  // headdim

    int64_t block = blockIdx.x;
    const int64_t split = block % launch.splits;
    block /= launch.splits;
    const int64_t group = block % p.ngroups;
    block /= p.ngroups;
    const int64_t chunk = block % launch.chunks;
    const int64_t batch = block / launch.chunks;

    const int64_t first = chunk * kSteps;
    const int valid = steps_in<kSteps>(p.seqlen, chunk);
    const int dstate = static_cast<int>(p.dstate);
    const int32_t* const seq_idx = p.seq_idx == nullptr ? nullptr : p.seq_idx + batch * p.seqlen;
    const int64_t state_size = p.headdim * p.dstate;
    const int64_t heads = launch.group_heads * p.ngroups;
    const int row_tiles = static_cast<int>(launch.row_tiles);
    const int64_t items = launch.group_heads * launch.row_tiles;  // a head and a part of its headdim
    const int first_item = static_cast<int>(items * split / launch.splits);
    const int last_item = static_cast<int>(items * (split + 1) / launch.splits);
    const int64_t group_head = group * (p.nheads / p.ngroups) + launch.first_head;

    load_tile<T, kSteps, kStates, Layout::kThreads>(
        B_tile, static_cast<const T*>(p.B) + batch * p.B_batch_stride + first * p.B_len_stride + group * p.B_group_stride,
        p.B_len_stride, valid, dstate, launch.B_vectors);
    load_tile<T, kSteps, kStates, Layout::kThreads>(
        C_tile, static_cast<const T*>(p.C) + batch * p.C_batch_stride + first * p.C_len_stride + group * p.C_group_stride,
        p.C_len_stride, valid, dstate, launch.C_vectors);

    float G[2 * Pairs::kWide][4];  // C B^T
    float dG[2 * Pairs::kWide][4];
    float dB[2 * Wide::kWide][4];
    float dC[2 * Wide::kWide][4];
    set_to_zero(G);
    set_to_zero(dG);
    set_to_zero(dB);
    set_to_zero(dC);

    const int64_t first_state = (batch * heads + group * launch.group_heads) * launch.chunks + chunk;  // of the first head
    StepInputs<kSteps> inputs;  // of one of the next kDecaysTogether items
    const int ahead = warp - kDecaysWarp;
    const bool for_decays = ahead >= 0 && ahead < kDecaysTogether;
    if (for_decays && first_item + ahead < last_item) {
        const int64_t head = group_head + (first_item + ahead) / row_tiles;
        load_steps<kSteps>(inputs, step_size(p, batch, 0, head), seq_idx, first, valid, lane);
    }
    if (is_ahead && first_item < last_item) {
        const int row0 = first_item % row_tiles * kRows;
        const int64_t head = first_item / row_tiles;
        load_item<T, Layout>(items_tiles, q, launch, batch, first, valid, group_head + head, row0,
                             (first_state + head * launch.chunks) * state_size + row0 * p.dstate);
    }
    for (int item = first_item; item < last_item; ++item) {
        const int number = item - first_item;
        const int64_t head = group_head + item / row_tiles;
        const int64_t tile = item % row_tiles;
        const int row0 = static_cast<int>(tile) * kRows;
        const int rows = static_cast<int>(p.headdim) - row0;  // may be more than kRows
        const int64_t state_index = (first_state + item / row_tiles * launch.chunks) * state_size + row0 * p.dstate;
        const T* const state = static_cast<const T*>(launch.states) + state_index;
        const T* const dstate_after = static_cast<const T*>(launch.dstates) + state_index;
        const float A = head_A(p, head);
        const BackwardDecays<kSteps>& now = decays[number % kDecaysKept];
        T* const x_tile = items_tiles + (is_ahead ? number % 2 : 0) * ItemTiles<Layout>::kElementsAhead;
        T* const dout_tile = x_tile + kSteps * kXStride;
        T* const H_tile = dout_tile + kSteps * kXStride;
        T* const dH_tile = is_ahead ? H_tile + kRows * kStride : H_tile;

        if (!is_ahead) {
            load_item<T, Layout>(x_tile, q, launch, batch, first, valid, head, row0, state_index);
        }
        cp_async_commit_group();
        if (for_decays && number % kDecaysTogether == 0) {
            if (item + ahead < last_item) {
                const int64_t its_head = group_head + (item + ahead) / row_tiles;
                chunk_decays<kSteps>(decays[(number + ahead) % kDecaysKept], inputs, step_size(p, batch, 0, its_head),
                                     head_A(p, its_head), lane);
            }
            if (item + kDecaysTogether + ahead < last_item) {
                const int64_t its_head = group_head + (item + kDecaysTogether + ahead) / row_tiles;
                load_steps<kSteps>(inputs, step_size(p, batch, 0, its_head), seq_idx, first, valid, lane);
            }
        }
        cp_async_wait_group<0>();
        __syncthreads();
        if (is_ahead && item + 1 < last_item) {
            const int next_row0 = (item + 1) % row_tiles * kRows;
            const int64_t next = (item + 1) / row_tiles;
            load_item<T, Layout>(items_tiles + (number + 1) % 2 * ItemTiles<Layout>::kElementsAhead, q, launch, batch, first,
                                 valid, group_head + next, next_row0,
                                 (first_state + next * launch.chunks) * state_size + next_row0 * p.dstate);
        }

        if (item == first_item && pair0 < kSteps) {
            multiply<T, Pairs::kWide, kStates / 16, false, true>(G, C_tile + step0 * kStride, kStride, B_tile + pair0 * kStride,
                                                                 kStride, lane);
        }

        // Pairs of steps: f, dG and M.
        {
            float R[2 * Pairs::kWide][4];  // dout_t . x_s
            set_to_zero(R);
            if (pair0 < kSteps) {
                multiply<T, Pairs::kWide, kRows / 16, false, true>(R, dout_tile + step0 * kXStride, kXStride,
                                                                   x_tile + pair0 * kXStride, kXStride, lane);
            }
            float2 row_sum = make_float2(0.0f, 0.0f);
            const int t0 = step0 + lane / 4;
            const float cs_above = now.log2_decay[t0];
            const float cs_below = now.log2_decay[t0 + 8];
            const float rest_above = now.log2_rest[t0];
            const float rest_below = now.log2_rest[t0 + 8];
            const int start_above = now.run_start[t0];
            const int start_below = now.run_start[t0 + 8];
#pragma unroll
            for (int j = 0; j < 2 * Pairs::kWide; ++j) {
                const int s = pair0 + 8 * j + lane % 4 * 2;
                if (pair0 + 8 * j < kSteps) {
                    float M[4];
                    float column_sum[2] = {0.0f, 0.0f};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int t = t0 + i / 2 * 8;
                        const int column = s + i % 2;
                        const float cs = i < 2 ? cs_above : cs_below;
                        const bool counts = column <= t && column >= (i < 2 ? start_above : start_below);
                        const float rest = (i < 2 ? rest_above : rest_below) - now.log2_rest[column];
                        const float decay = counts ? exp2_fast((cs - now.log2_decay[column]) + rest) : 0.0f;
                        const float dt = now.dt[column];
                        M[i] = decay * G[j][i];
                        const float f = M[i] * R[j][i];
                        dG[j][i] = fmaf(decay * dt, R[j][i], dG[j][i]);
                        // A step's own pair takes no decay. With strong decay it is the largest, and would hide the others.
                        const float earlier = column < t ? f : 0.0f;
                        if (column == t) {
                            sums.own_pair[t] = f;
                        }
                        column_sum[i % 2] += earlier;
                        if (i < 2) {
                            row_sum.x = fmaf(dt, earlier, row_sum.x);
                        } else {
                            row_sum.y = fmaf(dt, earlier, row_sum.y);
                        }
                    }
                    store_pair<T>(M_tile + t0 * kMStride + s, M[0], M[1]);
                    store_pair<T>(M_tile + (t0 + 8) * kMStride + s, M[2], M[3]);
                    column_sum[0] = add_over_column(column_sum[0]);
                    column_sum[1] = add_over_column(column_sum[1]);
                    if (lane < 4) {
                        sums.column_pairs[above][s] = column_sum[0];
                        sums.column_pairs[above][s + 1] = column_sum[1];
                    }
                }
            }
            row_sum.x = add_over_row(row_sum.x);
            row_sum.y = add_over_row(row_sum.y);
            if (lane % 4 == 0) {
                sums.row_pairs[beside][t0] = row_sum.x;
                sums.row_pairs[beside][t0 + 8] = row_sum.y;
            }
        }

        // What the state before the chunk gives.
        {
            float product[2 * Wide::kWide][4];  // H^T dout_t
            set_to_zero(product);
            multiply<T, Wide::kWide, kRows / 16, false, false>(product, dout_tile + step0 * kXStride, kXStride, H_tile + state0,
                                                               kStride, lane);
            const float above_factor = now.entering[step0 + lane / 4];
            const float below_factor = now.entering[step0 + lane / 4 + 8];
            const float2 dot = accumulate<T, Wide::kWide>(dC, product, above_factor, below_factor,
                                                          C_tile + step0 * kStride + state0, kStride, lane);
            if (lane % 4 == 0) {
                sums.from_state[beside][step0 + lane / 4] = above_factor * dot.x;
                sums.from_state[beside][step0 + lane / 4 + 8] = below_factor * dot.y;
            }
        }
        __syncthreads();  // M is complete; H has been read

        if (!is_ahead) {
            load_tile<T, kRows, kStates, Layout::kThreads>(dH_tile, dstate_after, p.dstate, rows, dstate, launch.state_vectors);
            cp_async_commit_group();
        }
        float du[2 * Inputs::kWide][4];  // gradient of dt_s x_s
        set_to_zero(du);
        if (input0 < kRows) {
            multiply<T, Inputs::kWide, kSteps / 16, true, false>(du, M_tile + step0, kMStride, dout_tile + input0, kXStride,
                                                                 lane);
        }
        if (!is_ahead) {
            cp_async_wait_group<0>();
            __syncthreads();
        }

        // What goes into the state after the chunk.
        {
            float product[2 * Inputs::kWide][4];  // dH' B_s
            set_to_zero(product);
            if (input0 < kRows) {
                multiply<T, Inputs::kWide, kStates / 16, false, true>(product, B_tile + step0 * kStride, kStride,
                                                                      dH_tile + input0 * kStride, kStride, lane);
            }
            const float leaving_above = now.leaving[step0 + lane / 4];
            const float leaving_below = now.leaving[step0 + lane / 4 + 8];
#pragma unroll
            for (int j = 0; j < 2 * Inputs::kWide; ++j) {
                du[j][0] = fmaf(leaving_above, product[j][0], du[j][0]);
                du[j][1] = fmaf(leaving_above, product[j][1], du[j][1]);
                du[j][2] = fmaf(leaving_below, product[j][2], du[j][2]);
                du[j][3] = fmaf(leaving_below, product[j][3], du[j][3]);
            }
        }
        {
            float product[2 * Wide::kWide][4];  // dH'^T x_s
            set_to_zero(product);
            multiply<T, Wide::kWide, kRows / 16, false, false>(product, x_tile + step0 * kXStride, kXStride, dH_tile + state0,
                                                               kStride, lane);
            const float2 dot =
                accumulate<T, Wide::kWide>(dB, product, now.adding[step0 + lane / 4], now.adding[step0 + lane / 4 + 8],
                                           B_tile + step0 * kStride + state0, kStride, lane);
            if (lane % 4 == 0) {
                sums.to_state[beside][step0 + lane / 4] = now.leaving[step0 + lane / 4] * dot.x;
                sums.to_state[beside][step0 + lane / 4 + 8] = now.leaving[step0 + lane / 4 + 8] * dot.y;
            }
        }
        {
            float product = 0.0f;  // H . dH'
            constexpr int kVector = 16 / sizeof(T);
            constexpr int kRowVectors = kStates / kVector;
#pragma unroll
            for (int i = threadIdx.x; i < kRows * kRowVectors; i += Layout::kThreads) {
                const int row = i / kRowVectors;
                const int column = i % kRowVectors * kVector;
                if (row < rows && column < dstate) {
                    product = dot_16<T>(state + static_cast<int64_t>(row) * p.dstate + column, dH_tile + row * kStride + column,
                                        launch.state_vectors ? kVector : dstate - column, launch.state_vectors, product);
                }
            }
            product = add_over_column(add_over_row(product));
            if (lane == 0) {
                sums.state_product[warp] = product;
            }
        }

        // dx and dD.
        {
            const float D_of_head = p.D != nullptr && p.D_dim_stride == 0 ? p.D[head * p.D_head_stride] : 0.0f;
            T* const dx = static_cast<T*>(q.dx) + batch * q.dx_batch_stride + first * q.dx_len_stride +
                          head * q.dx_head_stride + row0 + input0;
#pragma unroll
            for (int j = 0; j < Inputs::kWide; ++j) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int s = step0 + lane / 4 + 8 * half;
                    const float dt = now.dt[s];
                    float2 pairs[2];
#pragma unroll
                    for (int side = 0; side < 2; ++side) {
                        const int column = input0 + 16 * j + 8 * side + lane % 4 * 2;
                        float D0 = D_of_head;
                        float D1 = D_of_head;
                        if (p.D != nullptr && p.D_dim_stride != 0) {
                            const float* const D = p.D + head * p.D_head_stride;
                            D0 = column < rows ? D[(row0 + column) * p.D_dim_stride] : 0.0f;
                            D1 = column + 1 < rows ? D[(row0 + column + 1) * p.D_dim_stride] : 0.0f;
                        }
                        float2 skip = make_float2(0.0f, 0.0f);
                        if (column < kRows) {
                            skip = load_pair<T>(dout_tile + s * kXStride + column);
                        }
                        pairs[side].x = fmaf(dt, du[2 * j + side][2 * half], D0 * skip.x);
                        pairs[side].y = fmaf(dt, du[2 * j + side][2 * half + 1], D1 * skip.y);
                    }
                    const int column = input0 + 16 * j;
                    const bool exists = s < valid && column < kRows && column < rows;
                    store_row<T>(exists ? dx + s * q.dx_len_stride + 16 * j : nullptr, rows - column, launch.dx_vectors,
                                 pairs[0], pairs[1], lane);
                }
            }
            if (launch.dD != nullptr) {
                const int column = threadIdx.x % kRows;
                const int part = threadIdx.x / kRows;
                constexpr int kPartSteps = kSteps / BackwardSums<Layout>::kParts;
                float sum = 0.0f;
#pragma unroll
                for (int s = part * kPartSteps; s < (part + 1) * kPartSteps; ++s) {
                    sum = fmaf(to_float(x_tile[s * kXStride + column]), to_float(dout_tile[s * kXStride + column]), sum);
                }
                sums.skip[part][column] = sum;
            }
        }
        __syncthreads();

        if (launch.dD != nullptr && warp == 1) {
            for (int column = lane; column < kRows && column < rows; column += 32) {
                float sum = 0.0f;
#pragma unroll
                for (int part = 0; part < BackwardSums<Layout>::kParts; ++part) {
                    sum += sums.skip[part][column];
                }
                launch.dD[((batch * launch.chunks + chunk) * p.nheads + head) * p.headdim + row0 + column] = sum;
            }
        }
        // By one warp, while the others go on to the next head.
        if (warp == 0) {
            const int64_t at = ((tile * p.batch + batch) * launch.chunks + chunk) * p.nheads + head;
            float* const ddt = launch.ddt + ((tile * p.batch + batch) * p.nheads + head) * p.seqlen + first;
            store_step_gradients<kSteps>(ddt, launch.dA + at, launch.ddt_bias + at, sums, now, A, valid, lane);
        }
    }

    // Through the sum over heads of dG.
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 2 * Pairs::kWide; ++j) {
        const int s = pair0 + 8 * j + lane % 4 * 2;
        if (pair0 + 8 * j < kSteps) {
            store_pair<T>(M_tile + (step0 + lane / 4) * kMStride + s, dG[j][0], dG[j][1]);
            store_pair<T>(M_tile + (step0 + lane / 4 + 8) * kMStride + s, dG[j][2], dG[j][3]);
        }
    }
    __syncthreads();
    multiply<T, Wide::kWide, kSteps / 16, false, false>(dC, M_tile + step0 * kMStride, kMStride, B_tile + state0, kStride,
                                                        lane);
    multiply<T, Wide::kWide, kSteps / 16, true, false>(dB, M_tile + step0, kMStride, C_tile + state0, kStride, lane);
    const int64_t row_stride = p.ngroups * p.dstate;
    const int64_t at = ((split * p.batch + batch) * p.seqlen + first + step0) * row_stride + group * p.dstate + state0;
    const bool add = launch.first_head > 0;
    store_sum<Wide::kWide>(launch.dC + at, row_stride, dC, valid - step0, dstate - state0, add, lane);
    store_sum<Wide::kWide>(launch.dB + at, row_stride, dB, valid - step0, dstate - state0, add, lane);
}

}  // namespace mamba
