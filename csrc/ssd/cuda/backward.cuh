// Backward: a block takes one chunk and walks heads of one group, so that dB and dC of the chunk are added up in registers
// and C B^T is computed once. The state before the chunk and the gradient of the state after it come from states.cuh.
//
// With dG_ts = L_ts dt_s (dout_t . x_s), L_ts = exp(cs_t - cs_s), G = C B^T, H the state before, dH' the gradient after:
//     dC_t = exp(cs_t) H^T dout_t + sum_s dG_ts B_s
//     dB_s = exp(cs_last - cs_s) dt_s dH'^T x_s + sum_t dG_ts C_t
//     dx_s = dt_s (exp(cs_last - cs_s) dH' B_s + sum_t L_ts G_ts dout_t) + D dout_s
// and the gradient of a_t = dt_t A sums, over the pairs r >= t > s, what each path from s to r carries: no large terms cancel.
#pragma once

#include "ssd/cuda/backward_chunk.cuh"

namespace mamba {

template <typename T, class Layout>
__global__ void __launch_bounds__(Layout::kThreads) ssd_backward_kernel(const MambaSsdBackward q, const BackwardLaunch launch) {
    static constexpr int kSteps = Layout::kSteps;
    constexpr int kStates = Layout::kStates;
    using Tiles = BackwardTiles<T, Layout>;
    using Warp = BackwardWarp<Layout>;
    const MambaSsd& p = q.forward;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    Tiles& shared = *reinterpret_cast<Tiles*>(memory);
    const Warp warp;
    const BackwardBlock<Layout> block(p, launch);
    const bool ahead = launch.ahead != 0;

    const T* const B = static_cast<const T*>(p.B) + block.batch * p.B_batch_stride + block.first * p.B_len_stride +
                       block.group * p.B_group_stride;
    const T* const C = static_cast<const T*>(p.C) + block.batch * p.C_batch_stride + block.first * p.C_len_stride +
                       block.group * p.C_group_stride;
    const int dstate = static_cast<int>(p.dstate);
    load_tile<T, kSteps, kStates, Layout::kThreads>(shared.B, B, p.B_len_stride, block.valid, dstate, launch.B_vectors);
    load_tile<T, kSteps, kStates, Layout::kThreads>(shared.C, C, p.C_len_stride, block.valid, dstate, launch.C_vectors);

    float G[Warp::kPairs][4];  // C B^T
    float dG[Warp::kPairs][4];
    float dB[Warp::kWide][4];
    float dC[Warp::kWide][4];
    set_to_zero(G);
    set_to_zero(dG);
    set_to_zero(dB);
    set_to_zero(dC);

    // Every second item two warps compute the decays of the next two; their inputs are loaded well before.
    const int32_t* const seq_idx = p.seq_idx == nullptr ? nullptr : p.seq_idx + block.batch * p.seqlen;
    StepInputs<kSteps> inputs;
    const int decays_of = warp.warp - kDecaysWarp;
    const bool for_decays = decays_of >= 0 && decays_of < kDecaysTogether;
    const auto load_inputs = [&](int number) {
        if (for_decays && number + decays_of < block.count) {
            const int64_t head = block.item(number + decays_of).head;
            load_steps<kSteps>(inputs, step_size(p, block.batch, 0, head), seq_idx, block.first, block.valid, warp.lane);
        }
    };
    load_inputs(0);
    const int distance = ahead ? 1 : 0;  // in items, by which tiles are loaded ahead
    for (int number = -distance; number < block.count; ++number) {
        if (number + distance < block.count) {
            load_item<T, Layout>(shared.item(number + distance, ahead), q, launch, block, block.item(number + distance));
        }
        cp_async_commit_group();
        if (number < 0) {
            continue;
        }
        const ChunkItem item = block.item(number);
        const BackwardDecays<kSteps>& now = shared.decays[number % kDecaysKept];
        const ItemTiles<T, Layout> tiles = shared.item(number, ahead);
        if (number % kDecaysTogether == 0) {
            if (for_decays && number + decays_of < block.count) {
                const int64_t head = block.item(number + decays_of).head;
                chunk_decays<kSteps>(shared.decays[(number + decays_of) % kDecaysKept], inputs,
                                     step_size(p, block.batch, 0, head), head_A(p, head), warp.lane);
            }
            load_inputs(number + kDecaysTogether);
        }
        if (ahead) {
            cp_async_wait_group<1>();
        } else {
            cp_async_wait_group<0>();
        }
        __syncthreads();
        if (number == 0) {
            multiply_CB(G, shared, warp);
        }
        take_pairs(dG, G, shared, tiles, now, warp);
        take_state_before(dC, shared, tiles, now, warp);
        __syncthreads();  // M is complete; H has been read

        float du[Warp::kInputs][4];  // gradient of dt_s x_s
        if (!ahead) {
            load_state_after<T, Layout>(tiles, p, launch, block, item);
            cp_async_commit_group();
        }
        multiply_outputs(du, shared, tiles, warp);
        if (!ahead) {
            cp_async_wait_group<0>();
            __syncthreads();
        }
        take_state_after(du, dB, shared, tiles, now, warp);
        multiply_states(shared, tiles, launch, block, item, warp);
        store_chunk_dx(q, launch, block, item, du, tiles, now, warp);
        if (launch.dD != nullptr) {
            sum_dD(shared, tiles);
        }
        __syncthreads();

        if (launch.dD != nullptr && warp.warp == 1) {
            store_chunk_dD(p, launch, block, item, shared, warp.lane);
        }
        if (warp.warp == 0) {  // while the others go on to the next head
            const int64_t part = item.tile * p.batch + block.batch;
            const int64_t at = (part * launch.chunks + block.chunk) * p.nheads + item.head;
            store_step_gradients<kSteps>(launch.ddt + (part * p.nheads + item.head) * p.seqlen + block.first, launch.dA + at,
                                         launch.ddt_bias + at, shared.sums, now, head_A(p, item.head), block.valid, warp.lane);
        }
    }
    __syncthreads();
    finish_chunk(dB, dC, dG, shared, p, launch, block, warp);
}

}  // namespace mamba
