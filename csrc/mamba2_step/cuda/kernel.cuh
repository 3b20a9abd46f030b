// One decode step of a Mamba-2 layer on the GPU: convolution, state, output and gated norm.
//
// A block takes some rows of the state of one group's heads, of one batch entry:
//
//     all threads    loads begin: convolution of x and of B and C, a row each; then three tiles of states a warp -> ring
//                    B and C, and each row's decay, dt x, D x, gate -> shared memory
//     -------------- __syncthreads; cluster_arrive_relaxed: this block has read the window of B and C
//     each warp      tile by tile: wait for the ring, h = decay h + dt x B, store, y += C h; the next tile begins
//     -------------- __syncthreads
//     all threads    sum of squares of the block's rows; cluster_wait: all blocks have read the window
//                    the block's share of the window is shifted; the sum goes to the other blocks (st.async)
//     -------------- mbarrier `all_sent`: every block's sum is here
//     all threads    norm and gate, out
//
// Without a cluster finish.cuh does what comes behind the second __syncthreads.
#pragma once

#include "common/ptx_cluster.cuh"
#include "mamba2_step/cuda/inputs.cuh"
#include "mamba2_step/cuda/states.cuh"

namespace mamba {

// The convolution and the rows' own values, into shared memory; meanwhile the first tiles of states are on their way. All loads
// begin first, so that one memory latency covers them: those that all else waits for, then the states.
template <class Block, class States>
__device__ __forceinline__ void begin_mamba2_step(const Block& block, States& states) {
    const int thread = static_cast<int>(threadIdx.x), dstate = static_cast<int>(block.p.dstate);
    ConvStepBits BC_bits, x_bits;
    HeadRowBits row_bits;
    if (thread < 2 * dstate) {
        BC_bits = block.load_BC(thread);
    }
    if (thread < block.count) {
        x_bits = block.load_x(thread);
        row_bits = block.load_row(thread);
    }
#pragma unroll 1
    for (int tile = 0; tile < kStepDepth; ++tile) {
        states.load_tile(tile < states.tiles);
    }
    if (thread < 2 * dstate) {
        block.shared.BC[thread] = conv_step(block.p, BC_bits);
    }
    if (thread < block.count) {
        block.finish_row(thread, x_bits, row_bits);
    }
    for (int n = thread + kStepThreads; n < 2 * dstate; n += kStepThreads) {
        block.shared.BC[n] = conv_step(block.p, block.load_BC(n));
    }
    for (int row = thread + kStepThreads; row < block.count; row += kStepThreads) {
        block.finish_row(row, block.load_x(row), block.load_row(row));
    }
}

// y = rounded y, gated where the gate comes first; the warp's sum of its squares goes to shared memory.
template <class Block>
__device__ __forceinline__ void square_mamba2_rows(const Block& block) {
    const int thread = static_cast<int>(threadIdx.x);
    float sum = 0.0f;
    for (int row = thread; row < block.count; row += kStepThreads) {
        float value = rounded(block.shared.y[row], block.p.dtype);
        value = block.p.norm_before_gate ? value : value * block.shared.gate[row];
        block.shared.y[row] = value;
        sum = fmaf(value, value, sum);
    }
    sum = sum_over_warp(sum);
    if (thread % 32 == 0) {
        block.shared.sums[thread / 32] = sum;
    }
    __syncthreads();
}

// 1 / rms of the group's channels, whose rows the cluster's blocks share.
template <class Block>
__device__ __forceinline__ float rstd_of_group(const Block& block, uint64_t* all_sent, bool shares) {
    const uint32_t blocks = block.layout.parts.divisor;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kStepWarps; ++w) {
        sum += block.shared.sums[w];
    }
    if (shares) {
        if (threadIdx.x < blocks) {
            st_async_cluster(block.shared.cluster_sums + block.part, all_sent, threadIdx.x, sum);
        }
        mbarrier_wait_cluster(all_sent);
        sum = 0.0f;
        for (uint32_t i = 0; i < blocks; ++i) {
            sum += block.shared.cluster_sums[i];
        }
    }
    return rsqrtf(sum / static_cast<float>(block.layout.group_heads * block.layout.headdim.divisor) + block.p.norm_eps);
}

// What needs all blocks of a group: the convolution's state of B and C, and the norm.
template <class Block>
__device__ __forceinline__ void finish_mamba2_step(const Block& block, uint64_t* all_sent, bool shares) {
    const auto& p = block.p;
    const int thread = static_cast<int>(threadIdx.x), dstate = static_cast<int>(p.dstate);
    const bool norm = p.norm_weight != nullptr;
    // This block's share of the channels of B and C.
    const int share = static_cast<int>(block.layout.parts.divisor);
    int n = thread * share + static_cast<int>(block.part);
    ConvStepBits window;
    if (n < 2 * dstate) {
        block.load_window(n, window);
    }
    if (norm) {
        square_mamba2_rows(block);
    }
    if (shares) {
        cluster_wait();
    }
    while (n < 2 * dstate) {
        store_conv_state(p, block.batch, block.channel_of_BC(n), window);
        n += kStepThreads * share;
        if (n < 2 * dstate) {
            block.load_window(n, window);
        }
    }
    if (!norm) {
        return;
    }
    const float rstd = rstd_of_group(block, all_sent, shares);
    for (int row = thread; row < block.count; row += kStepThreads) {
        float value = block.shared.y[row] * rstd * block.shared.weight[row];
        value = p.norm_before_gate ? value * block.shared.gate[row] : value;
        store_from_float(p.out, block.out() + row, p.dtype, value);
    }
}

// The group's other blocks compute the convolution of B and C as well: so nobody may shift these channels' window before all
// have read it.
template <class Rows, class Params>
__global__ void __launch_bounds__(kStepThreads, 4) mamba2_step_kernel(const Params p, const Mamba2StepLayout layout) {
    using Ring = StateRing<Rows, kStepDepth>;
    MAMBA_DYNAMIC_SHARED(16, unsigned char, memory);
    __shared__ uint64_t all_sent;  // the sums of the cluster's blocks
    const Mamba2StepShared shared(memory + kStepWarps * Ring::kWarpBytes, layout.rows, static_cast<int>(p.dstate));
    const Mamba2StepBlock<Params> block(p, layout, shared);
    Mamba2StepStates<Rows, Params> states(block, memory);
    if (layout.ahead) {  // the kernel before may still change them
        states.prefetch();
    }
    const bool shares = layout.together && layout.parts.divisor > 1;
    if (shares && threadIdx.x == 0) {
        mbarrier_init_cluster(&all_sent);
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    begin_mamba2_step(block, states);
    __syncthreads();
    if (shares) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx_cluster(&all_sent, layout.parts.divisor * static_cast<uint32_t>(sizeof(float)));
        }
        cluster_arrive_relaxed();  // the convolution's state of B and C was read
    }
    states.advance_all();
    __syncthreads();
    if (!layout.together || p.norm_weight == nullptr) {
        const bool gate = p.gate && p.norm_weight == nullptr;
        for (int row = static_cast<int>(threadIdx.x); row < block.count; row += kStepThreads) {
            store_from_float(p.out, block.out() + row, p.dtype, gate ? shared.y[row] * shared.gate[row] : shared.y[row]);
        }
    }
    if (layout.together) {
        finish_mamba2_step(block, &all_sent, shares);
    }
}

}  // namespace mamba
