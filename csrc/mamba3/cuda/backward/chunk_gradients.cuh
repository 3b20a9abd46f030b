// A chunk's gradients: a block walks heads of one group, so that those of q and k are added up in registers. The state before
// the chunk and the gradient of the state after it come from backward_states.cuh, the gradient of the rows from
// backward_rows.cuh.
//
// With W_ts the weight of pair_weight, G_ts = q_t . k_s, R_ts = dy_t . x_s, H the state before, dH' the gradient after:
//     dq_t = entering_t H^T dy_t + sum_s W_ts R_ts k_s
//     dk_s = adding_s dH'^T x_s + sum_t W_ts R_ts q_t
//     dx_s = adding_s dH' k_s + sum_t W_ts G_ts dy_t + D dy_s
// which, turned back, are those of the group's rows and of the biases. An angle's gradient at a step sums a db - b da over the
// rows of all later steps; finish.cuh adds what later chunks have.
#pragma once

#include "mamba3/cuda/backward/pairs.cuh"

namespace mamba {

template <typename T, class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 1)
    mamba3_backward_kernel(const MambaMamba3Backward q, const Mamba3BackwardLaunch launch) {
    if (!runs_here<Tiles>()) {
        __trap();
        return;
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    constexpr int kRows = Tiles::kRows;
    constexpr int kStates = Tiles::kStates;
    constexpr int kInner = Tiles::kInner;
    constexpr int kThreads = Tiles::kThreads;
    using Shared = Mamba3ChunkShared<T, Tiles>;
    constexpr int kPitch = Shared::kPitch;
    constexpr int kInnerPitch = Shared::kInnerPitch;
    constexpr int kRowsPitch = Shared::kRowsPitch;
    constexpr int kPairs = Shared::kPairs;
    using Pairs = WarpTile<Tiles, kRows>;    // rows x rows
    using Wide = WarpTile<Tiles, kStates>;   // rows x states
    using Inputs = WarpTile<Tiles, kInner>;  // rows x headdim
    constexpr float kPi = 3.14159265f;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    float* const dq_tile = reinterpret_cast<float*>(shared.q);
    float* const dk_tile = reinterpret_cast<float*>(shared.state);
    float* const dx_tile = reinterpret_cast<float*>(shared.weights);
    const MambaMamba3& p = q.forward;
    const Mamba3BackwardWorkspace& w = launch.plan.workspace;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int above = warp % Pairs::kAbove;  // which 16 rows of an output
    const int beside = warp / Pairs::kAbove;
    const int step0 = 16 * above;
    // Where there are more warps than columns, those that begin behind the last one have nothing to multiply.
    const int pair0 = 16 * Pairs::kWide * beside;
    const int state0 = 16 * Wide::kWide * beside;
    const int input0 = 16 * Inputs::kWide * beside;
    const int row_of_lane = step0 + lane / 4;

    int64_t block = blockIdx.x;
    const int64_t split = block % launch.plan.splits;
    block /= launch.plan.splits;
    const int64_t group = block % p.ngroups;
    const int64_t slot = block / p.ngroups;
    const int64_t slots = launch.chunks.slots;
    const Mamba3Chunk chunk = find_chunk(p, launch.chunks, slot);
    const int rank = static_cast<int>(p.rank), dstate = static_cast<int>(p.dstate), angles = static_cast<int>(p.nangles);
    const int rows = chunk.steps * rank;
    const int64_t heads = launch.group_heads * p.ngroups, row_tiles = launch.plan.row_tiles;
    const int64_t all_steps = p.batch * p.seqlen, first_step = chunk.row * p.seqlen + chunk.first;
    const int64_t items = launch.group_heads * row_tiles;  // a head and a part of its headdim
    const int first_item = static_cast<int>(items * split / launch.plan.splits);
    const int last_item = static_cast<int>(items * (split + 1) / launch.plan.splits);
    const TurnShare share = share_turns<kThreads>(p, chunk.steps);
    const bool turns = share.lane < angles;

    float dQ[2 * Wide::kWide][4], dK[2 * Wide::kWide][4];  // over heads
    set_to_zero(dQ);
    set_to_zero(dK);
    for (int item = first_item; item < last_item; ++item) {
        const int64_t tile = item % row_tiles;
        const int64_t launch_head = group * launch.group_heads + item / row_tiles;
        const int64_t head = head_of_launch(p, launch, launch_head);
        const int row0 = static_cast<int>(tile) * kInner;
        const int columns = static_cast<int>(p.headdim) - row0;  // may be more than kInner
        float* const bias_sums[2] = {
            launch.at<float>(w.bias) + ((tile * slots + slot) * p.nheads + head) * rank * dstate,
            launch.at<float>(w.bias) + (((row_tiles + tile) * slots + slot) * p.nheads + head) * rank * dstate};
        float* const mimo_v = launch.at<float>(w.mimo_v) + (slot * p.nheads + head) * rank * p.headdim + row0;
        if (chunk.steps == 0) {  // an empty slot, whose sums are read too
            for (int i = threadIdx.x; i < rank * dstate; i += kThreads) {
                bias_sums[0][i] = bias_sums[1][i] = 0.0f;
            }
            for (int i = threadIdx.x; i < rank * kInner && p.mimo_v != nullptr; i += kThreads) {
                if (i % kInner < columns) {
                    mimo_v[i / kInner * p.headdim + i % kInner] = 0.0f;
                }
            }
            continue;
        }
        const ChunkSteps<kRows>& steps = shared.steps[(item - first_item) % 2];

        // Tiles.
        const int64_t state_at = ((slot * heads + launch_head) * p.headdim + row0) * dstate;
        load_dy<T, kRows, kInner, kThreads>(p, launch, chunk, launch_head, row0, shared.dy);
        load_x<T, kRows, kInner, kThreads>(p, launch, chunk, head, row0, shared.x);
        load_tile<T, kInner, kStates, kThreads>(shared.state, launch.at<const T>(w.states) + state_at, dstate, columns, dstate,
                                                launch.state_vectors);
        load_tile<T, kInner, kStates, kThreads>(shared.dstate, launch.at<const T>(w.dstates) + state_at, dstate, columns,
                                                dstate, launch.state_vectors);
        cp_async_commit_group();
        load_chunk_steps<kRows>(shared.steps[(item - first_item) % 2], p, launch.chunks, slot, head);
        if (item == first_item || p.angles_of_heads != 0) {
            const TurnSpeeds from = speeds_of(p, launch, chunk, head);
            for (int i = threadIdx.x; i < chunk.steps * angles; i += kThreads) {
                shared.speeds[i / angles * kPairs + i % angles] = from.first[i / angles * from.stride + i % angles];
            }
            __syncthreads();
        }
        const TurnSpeeds speeds = {shared.speeds, kPairs};
        const TurnSource<T> sources[2] = {q_source<T>(p, launch, chunk, head, group, shared.q),
                                          k_source<T>(p, launch, chunk, head, group, shared.k)};
        turn_tiles<T, Tiles, 2>(p, launch, chunk, slot, head, steps, sources, speeds, shared.turned, shared.turns);
        cp_async_wait_group<0>();
        __syncthreads();

        // Pairs of rows.
        if (pair0 < kRows) {
            float G[2 * Pairs::kWide][4], R[2 * Pairs::kWide][4];
            set_to_zero(G);
            set_to_zero(R);
            multiply<T, Pairs::kWide, kStates / 16, false, true>(G, shared.q + step0 * kPitch, kPitch,
                                                                 shared.k + pair0 * kPitch, kPitch, lane);
            multiply<T, Pairs::kWide, kInner / 16, false, true>(R, shared.dy + step0 * kInnerPitch, kInnerPitch,
                                                                shared.x + pair0 * kInnerPitch, kInnerPitch, lane);
            float column_sum[2 * Pairs::kWide][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int t = row_of_lane + 8 * half;
                const PairRow row = pair_row(steps, t, rank);
                float row_sum = 0.0f, own_sum = 0.0f;
#pragma unroll
                for (int j = 0; j < 2 * Pairs::kWide; ++j) {
                    const int s = pair0 + 8 * j + lane % 4 * 2;
                    float weight[2], slope[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const PairWeight pair = pair_weight(steps, row, s + i, rank);
                        const float product = G[j][2 * half + i], x_dy = R[j][2 * half + i];
                        const float earlier = pair.decay * product * x_dy;
                        weight[i] = pair.weight * product;
                        slope[i] = pair.weight * x_dy;
                        row_sum = fmaf(earlier, steps.scale[s + i], row_sum);
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

        // The entering and the leaving state.
        float dq[2 * Wide::kWide][4], dk[2 * Wide::kWide][4];
        set_to_zero(dq);
        set_to_zero(dk);
        {
            multiply<T, Wide::kWide, kInner / 16, false, false>(dq, shared.dy + step0 * kInnerPitch, kInnerPitch,
                                                                shared.state + state0, kPitch, lane);
            multiply<T, Wide::kWide, kInner / 16, false, false>(dk, shared.x + step0 * kInnerPitch, kInnerPitch,
                                                                shared.dstate + state0, kPitch, lane);
            const float2 from = dot_and_scale<T, Wide::kWide>(dq, steps.entering[row_of_lane], steps.entering[row_of_lane + 8],
                                                              shared.q + step0 * kPitch + state0, kPitch, lane);
            const float2 to = dot_and_scale<T, Wide::kWide>(dk, steps.adding[row_of_lane], steps.adding[row_of_lane + 8],
                                                            shared.k + step0 * kPitch + state0, kPitch, lane);
            if (lane % 4 == 0) {
                shared.sums.from_state[beside][row_of_lane] = steps.entering[row_of_lane] * from.x;
                shared.sums.from_state[beside][row_of_lane + 8] = steps.entering[row_of_lane + 8] * from.y;
                shared.sums.to_state[beside][row_of_lane] = steps.leaving[row_of_lane] * to.x;
                shared.sums.to_state[beside][row_of_lane + 8] = steps.leaving[row_of_lane + 8] * to.y;
            }
            float product = 0.0f;
            for (int i = threadIdx.x; i < kInner * kPairs; i += kThreads) {
                const int at = i / kPairs * kPitch + i % kPairs * 2;
                const float2 a = load_pair<T>(shared.state + at), b = load_pair<T>(shared.dstate + at);
                product = fmaf(a.x, b.x, fmaf(a.y, b.y, product));
            }
            product = add_over_column(add_over_row(product));
            if (lane == 0) {
                shared.sums.state_product[warp] = product;
            }
        }
        float dx[2 * Inputs::kWide][4];
        set_to_zero(dx);
        if (input0 < kInner) {
            multiply<T, Inputs::kWide, kStates / 16, false, true>(dx, shared.k + step0 * kPitch, kPitch,
                                                                  shared.dstate + input0 * kPitch, kPitch, lane);
            const float top = steps.adding[row_of_lane], bottom = steps.adding[row_of_lane + 8];
            const float D = p.D != nullptr ? p.D[head] : 0.0f;
#pragma unroll
            for (int j = 0; j < 2 * Inputs::kWide; ++j) {
                const T* const at = shared.dy + row_of_lane * kInnerPitch + input0 + 8 * j + lane % 4 * 2;
                const float2 upper = load_pair<T>(at), lower = load_pair<T>(at + 8 * kInnerPitch);
                dx[j][0] = fmaf(top, dx[j][0], D * upper.x);
                dx[j][1] = fmaf(top, dx[j][1], D * upper.y);
                dx[j][2] = fmaf(bottom, dx[j][2], D * lower.x);
                dx[j][3] = fmaf(bottom, dx[j][3], D * lower.y);
            }
        }
        __syncthreads();  // weights and slopes are complete

        multiply<T, Wide::kWide, kRows / 16, false, false>(dq, shared.slopes + step0 * kRowsPitch, kRowsPitch,
                                                           shared.k + state0, kPitch, lane);
        multiply<T, Wide::kWide, kRows / 16, true, false>(dk, shared.slopes + step0, kRowsPitch, shared.q + state0, kPitch,
                                                          lane);
        if (input0 < kInner) {
            multiply<T, Inputs::kWide, kRows / 16, true, false>(dx, shared.weights + step0, kRowsPitch, shared.dy + input0,
                                                                kInnerPitch, lane);
        }

        if (chunk.last && tile == 0 && q.dfinal_k != nullptr) {
#pragma unroll
            for (int j = 0; j < 2 * Wide::kWide; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int r = row_of_lane + i / 2 * 8 - (rows - rank), column = state0 + 8 * j + lane % 4 * 2 + i % 2;
                    if (r >= 0 && r < rank && column < dstate) {
                        dk[j][i] +=
                            q.dfinal_k[((chunk.sequence * rank + r) * p.nheads + head) * dstate + element_of_column(p, column)];
                    }
                }
            }
        }
        // Gradients of turns; then dq and dk are turned back.
#pragma unroll
        for (int j = 0; j < 2 * Wide::kWide; ++j) {
            const int pair = state0 / 2 + 4 * j + lane % 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row_of_lane + 8 * half;
                float* const one[2] = {&dq[j][2 * half], &dk[j][2 * half]};
                if (pair < angles) {
                    const float2 a = load_pair<T>(shared.q + row * kPitch + 2 * pair);
                    const float2 b = load_pair<T>(shared.k + row * kPitch + 2 * pair);
                    const float dturn = (a.x * one[0][1] - a.y * one[0][0]) + (b.x * one[1][1] - b.y * one[1][0]);
                    shared.dturns[row * kPairs + pair] = dturn;
                    const float2 turned = shared.turned[row / rank * kPairs + pair];
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        const float x = one[m][0], y = one[m][1];
                        one[m][0] = x * turned.x + y * turned.y;
                        one[m][1] = y * turned.x - x * turned.y;
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    dQ[j][2 * half + i] += one[0][i];
                    dK[j][2 * half + i] += one[1][i];
                }
            }
        }
        __syncthreads();  // q, k, states and weights have been read
        store_rows<Wide::kWide>(dq_tile + step0 * kPitch + state0, kPitch, dq, lane);
        store_rows<Wide::kWide>(dk_tile + step0 * kPitch + state0, kPitch, dk, lane);
        if (input0 < kInner) {
            store_rows<Inputs::kWide>(dx_tile + step0 * kInnerPitch + input0, kInnerPitch, dx, lane);
        }
        if (turns) {
            float sum = 0.0f;
            for (int t = share.end - 1; t >= share.begin; --t) {
                for (int row = t * rank; row < (t + 1) * rank; ++row) {
                    sum += shared.dturns[row * kPairs + share.lane];
                }
                sum = steps.run[t * rank] == t * rank ? 0.0f : sum;
            }
            shared.later[threadIdx.x] = sum;
        }
        __syncthreads();

        for (int i = threadIdx.x; i < 2 * rank * dstate; i += kThreads) {
            const int m = i >= rank * dstate ? 1 : 0, r = i / dstate - m * rank, column = i % dstate;
            const float* const from = (m == 0 ? dq_tile : dk_tile) + r * kPitch + column;
            float sum = 0.0f;
#pragma unroll 8
            for (int t = 0; t < chunk.steps; ++t) {
                sum += from[t * rank * kPitch];
            }
            bias_sums[m][r * dstate + element_of_column(p, column)] = sum;
        }
        {
            T* const dv = static_cast<T*>(q.dv) + first_step * q.dv_step_stride + head * p.headdim + row0;
            const float* const weight = p.mimo_v != nullptr ? p.mimo_v + head * rank * p.headdim + row0 : nullptr;
            for (int i = threadIdx.x; i < chunk.steps * kInner; i += kThreads) {
                const int t = i / kInner, column = i % kInner;
                if (column < columns) {
                    float sum = 0.0f;
                    for (int r = 0; r < rank; ++r) {
                        const float value = dx_tile[(t * rank + r) * kInnerPitch + column];
                        sum = weight != nullptr ? fmaf(value, weight[r * p.headdim + column], sum) : sum + value;
                    }
                    if (chunk.last && t == chunk.steps - 1 && q.dfinal_v != nullptr) {
                        sum += q.dfinal_v[(chunk.sequence * p.nheads + head) * p.headdim + row0 + column];
                    }
                    dv[t * q.dv_step_stride + column] = from_float<T>(sum);
                }
            }
            const T* const v = static_cast<const T*>(p.v) + chunk.row * p.v_batch_stride + chunk.first * p.v_len_stride +
                               head * p.v_head_stride + row0;
            for (int i = threadIdx.x; i < rank * kInner && weight != nullptr; i += kThreads) {
                const int r = i / kInner, column = i % kInner;
                if (column < columns) {
                    float sum = 0.0f;
                    for (int t = 0; t < chunk.steps; ++t) {
                        sum =
                            fmaf(dx_tile[(t * rank + r) * kInnerPitch + column], to_float(v[t * p.v_len_stride + column]), sum);
                    }
                    mimo_v[r * p.headdim + column] = sum;
                }
            }
        }
        if (turns) {
            float behind = 0.0f;
            for (int part = share.parts - 1; part > share.part; --part) {
                const float sum = shared.later[part * share.lanes + share.lane];
                behind = shared.turns.restarts[part] != 0 ? sum : behind + sum;
            }
            for (int t = share.end - 1; t >= share.begin; --t) {
                for (int row = t * rank; row < (t + 1) * rank; ++row) {
                    behind += shared.dturns[row * kPairs + share.lane];
                }
                const float speed = shared.speeds[t * kPairs + share.lane];
                const float value = (1.0f - 4.0f * speed * speed) * kPi * steps.dt[t * rank] * behind;
                if (p.angles_of_heads != 0) {
                    launch.at<float>(w.dangles)[((tile * all_steps + first_step + t) * p.nheads + head) * angles + share.lane] =
                        value;
                } else {
                    float& total = shared.dangles[t * kPairs + share.lane];
                    total = item == first_item ? value : total + value;
                }
                shared.dturns[t * rank * kPairs + share.lane] = behind;
                if (t == 0) {
                    launch.at<float>(w.angle_totals)[((tile * slots + slot) * p.nheads + head) * angles + share.lane] =
                        steps.run[0] < 0 ? behind : 0.0f;
                }
                behind = steps.run[t * rank] == t * rank ? 0.0f : behind;
            }
        }
        __syncthreads();
        for (int t = warp; t < chunk.steps; t += Tiles::kWarps) {
            float sum = 0.0f;
            for (int i = lane; i < angles; i += 32) {
                sum = fmaf(shared.speeds[t * kPairs + i], shared.dturns[t * rank * kPairs + i], sum);
            }
            sum = add_over_column(add_over_row(sum));
            if (lane == 0) {
                shared.sums.angles[t] = 2.0f * kPi * sum;
            }
        }
        __syncthreads();
        if (warp == 0) {  // while the others go on to the next head
            store_step_terms<Tiles>(launch.at<float4>(w.step_terms) + (tile * all_steps + first_step) * p.nheads + head,
                                    p.nheads, shared.sums, steps, chunk.steps, rank, lane);
        }
    }
    if (chunk.steps == 0) {
        return;
    }

    const int64_t all_rows = all_steps * rank, row_stride = p.ngroups * dstate;
    const int64_t at = (split * all_rows + first_step * rank + step0) * row_stride + group * dstate + state0;
    const bool add = launch.first_head > 0;
    store_sum<Wide::kWide>(launch.at<float>(w.dq) + at, row_stride, dQ, rows - step0, dstate - state0, add, lane);
    store_sum<Wide::kWide>(launch.at<float>(w.dk) + at, row_stride, dK, rows - step0, dstate - state0, add, lane);
    if (turns && p.angles_of_heads == 0) {
        float* const dangles = launch.at<float>(w.dangles) + ((split * p.ngroups + group) * all_steps + first_step) * angles;
        for (int t = share.begin; t < share.end; ++t) {
            float& total = dangles[t * angles + share.lane];
            const float value = shared.dangles[t * kPairs + share.lane];
            total = add ? total + value : value;
        }
    }
}

}  // namespace mamba
