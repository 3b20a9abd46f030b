// The CUDA backward scan. tile.cuh explains the layout.
//
// A block walks the length backwards in tiles of MAMBA_SCAN_CHECKPOINT steps. From the checkpoint before a tile it runs the
// states forward once, keeping one every kSub steps; then, sub-tile by sub-tile from the end, it runs kSub steps forward again
// with states and decays in registers, and back over them:
//   g_t = C_t dy_t + a_{t+1} g_{t+1}          the gradient of h_t
//   du_t = dt_t sum_n(B g) + D dy_t           ddt_t = sum_n(A a_t h_{t-1} g) + u_t sum_n(B g)
//   dB_t = sum_d(dt u g)    dC_t = sum_d(dy h)    dA = sum_t(dt a_t h_{t-1} g)
// with a_t = exp(dt_t A) and dy = dout silu(z). Where the length is split into segments, a first launch finds what every
// segment passes back (a_t g_t of its first step), as in the forward scan.
#pragma once

#include "selective_scan/cuda/backward_carry.cuh"
#include "selective_scan/cuda/backward_elements.cuh"
#include "selective_scan/cuda/backward_tile.cuh"

namespace mamba {

// kSliced: dstate is larger than the layout's slice; w then waits in shared memory and dA, dB, dC of constants in their
// outputs between slices.
template <typename T, class Layout, int kSub, int kBlocks, bool kSliced>
__global__ void __launch_bounds__(Layout::kThreads, kBlocks)
    selective_scan_backward_kernel(const MambaSelectiveScanBackward q, bool aligned, bool atomic) {
    using Shared = BackwardShared<T, Layout, kSub>;
    static_assert(Layout::kTile == MAMBA_SCAN_CHECKPOINT, "a tile starts at a checkpoint");
    MAMBA_DYNAMIC_SHARED(16, float4, raw_shared);
    Shared& shared = *reinterpret_cast<Shared*>(raw_shared);
    float* waiting_w = reinterpret_cast<float*>(raw_shared) + sizeof(Shared) / sizeof(float);  // (slices, kStates, kThreads)

    const MambaSelectiveScan& p = q.forward;
    const ScanBlock block = scan_block(p, Layout::kChannels, 0);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int64_t seqlen = p.seqlen;
    const int slices = kSliced ? static_cast<int>(ceil_div(p.dstate, Layout::kSlice)) : 1;
    const bool need_y = p.z != nullptr || p.out != nullptr;

    const int scan_row = warp * Layout::kWarpChannels + lane / Layout::kLanes;
    const int k = lane % Layout::kLanes;
    const bool scan_valid = scan_row < block.channels;
    const int64_t scan_channel = block.first_channel + (scan_valid ? scan_row : 0);
    const int64_t state_row = (block.batch * p.dim + scan_channel) * p.dstate;
    const int64_t part = block.segment * p.batch + block.batch;
    const int64_t part_row = (part * p.dim + scan_channel) * p.dstate;
    BackwardThread<Layout> thread;
    const BackwardRows<T, Layout> rows = backward_rows<T, Layout>(q, block);
    const MatrixRows<T, Layout> matrix_rows(p, block);
    float bias_sum[Layout::kPasses];
    float D_sum[Layout::kPasses];
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        bias_sum[pass] = 0.0f;
        D_sum[pass] = 0.0f;
    }
    const int64_t sum_slot = q.slots > 1 ? block.index : 0;
    const int64_t sum_base = ((sum_slot * p.batch + block.batch) * p.ngroups + block.group) * p.dstate * seqlen;
    const SumFlush<Layout, Shared> flush(sum_base, seqlen);
    const int own = scan_row * Layout::kRow;
    const int matrix_row = k * Layout::kRow;
    const int32_t* seq_idx = p.seq_idx != nullptr ? p.seq_idx + block.batch * seqlen : nullptr;
    const bool general = !p.variable_B || !p.variable_C || seq_idx != nullptr;
    if (general && seq_idx == nullptr) {
        for (int i = threadIdx.x; i < Layout::kTile; i += Layout::kThreads) {
            shared.resets[i] = 0;
        }
    }

    for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const int n = slice * Layout::kSlice + s * Layout::kLanes + k;
            const bool valid = scan_valid && n < p.dstate;
            thread.w[s] = valid && q.dlast_state != nullptr ? q.dlast_state[state_row + n] : 0.0f;
            thread.dA[s] = 0.0f;
            thread.constant_dB[s] = 0.0f;
            thread.constant_dC[s] = 0.0f;
        }
        const int later = static_cast<int>(p.segments - 1 - block.segment);
        const int first_state = slice * Layout::kSlice + k;
        if (later > 0) {
            wait_for_previous_kernel();
            pass_through_segments<Layout>(p, thread.w, p.segments - 1, -1, later, state_row + first_state,
                                          scan_valid ? static_cast<int>(p.dstate) - first_state : 0);
        }
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const int n = first_state + s * Layout::kLanes;
            const bool valid = scan_valid && n < p.dstate;
            if (kSliced) {
                waiting_w[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x] = thread.w[s];
                if (valid) {
                    q.dA[part_row + n] = 0.0f;
                    if (!p.variable_B) {
                        q.dB[part_row + n] = 0.0f;
                    }
                    if (!p.variable_C) {
                        q.dC[part_row + n] = 0.0f;
                    }
                }
            }
        }
    }

    const int64_t checkpoints = seqlen > 0 ? (seqlen - 1) / MAMBA_SCAN_CHECKPOINT : 0;
    const int64_t last_tile = ceil_div(block.end, Layout::kTile) - 1;
    for (int64_t tile = last_tile; tile >= block.begin / Layout::kTile; --tile) {
        const int64_t first_step = tile * Layout::kTile;
        const int steps = static_cast<int>(block.end - first_step < Layout::kTile ? block.end - first_step : Layout::kTile);
        const int subs = (steps + kSub - 1) / kSub;  // see forward.cuh: not by ceil_div
        BackwardInputs<T, Layout> in;
        StagedTile<T, Layout> B_staged, C_staged;
        if (aligned) {
            fetch_inputs<T, Layout, true>(in, rows, first_step, steps, p.z != nullptr);
            fetch_BC<T, Layout, true>(B_staged, C_staged, p, matrix_rows, 0, first_step, steps);
        } else {
            fetch_inputs<T, Layout, false>(in, rows, first_step, steps, p.z != nullptr);
            fetch_BC<T, Layout, false>(B_staged, C_staged, p, matrix_rows, 0, first_step, steps);
        }

        for (int slice = 0; slice < slices; ++slice) {
            const int first_state = slice * Layout::kSlice;
            const int states =
                static_cast<int>(p.dstate - first_state < Layout::kSlice ? p.dstate - first_state : Layout::kSlice);
            float h[Layout::kStates];
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                const int n = first_state + s * Layout::kLanes + k;
                const bool valid = scan_valid && n < p.dstate;
                const int64_t parameter = scan_channel * p.dstate + n;
                if (kSliced || tile == last_tile) {
                    thread.A[s] = valid ? p.A[parameter] * kLog2e : 0.0f;
                    thread.constant_B[s] = valid && !p.variable_B ? static_cast<const float*>(p.B)[parameter] : 0.0f;
                    thread.constant_C[s] = valid && !p.variable_C ? static_cast<const float*>(p.C)[parameter] : 0.0f;
                }
                if (kSliced) {
                    thread.w[s] = waiting_w[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x];
                }
                const float* from = p.initial_state != nullptr ? p.initial_state + state_row : nullptr;
                if (tile > 0) {
                    from = p.checkpoints + ((block.batch * checkpoints + tile - 1) * p.dim + scan_channel) * p.dstate;
                }
                h[s] = valid && from != nullptr ? from[n] : 0.0f;
                if (tile > 1 && valid) {
                    prefetch_to_L2(from - p.dim * p.dstate + n);
                }
            }
            if (slice == 0) {
                stage_time_and_gradient<T, Layout>(shared.dt, shared.dy, in, rows, p, steps);
                stage_input<T, Layout>(shared.x, shared.dt, in, rows);
                if (first_step > block.begin) {
                    prefetch_inputs<T, Layout>(rows, first_step - Layout::kTile, p.z != nullptr);
                }
            }
            __syncthreads();  // B, C and the sums of the last sub-tile have been read
            shared.BC.put(B_staged, C_staged);
            if (seq_idx != nullptr) {
                stage_resets(shared.resets, Layout::kTile, seq_idx, first_step, seqlen);
            }
            __syncthreads();
            if (kSliced && slice + 1 < slices) {
                if (aligned) {
                    fetch_BC<T, Layout, true>(B_staged, C_staged, p, matrix_rows, first_state + Layout::kSlice, first_step,
                                              steps);
                } else {
                    fetch_BC<T, Layout, false>(B_staged, C_staged, p, matrix_rows, first_state + Layout::kSlice, first_step,
                                               steps);
                }
            }

            // The state before each sub-tile: h_sub holds those of sub-tiles 1, 2, ...; h_start that of sub-tile 0.
            float h_start[Layout::kStates];
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                h_start[s] = h[s];
            }
            for (int sub = 0; sub < subs - 1; ++sub) {
                if (general) {
                    advance_sub_tile<Layout, Shared, true>(thread, h, shared, own, matrix_row, sub * kSub, p.variable_B);
                } else {
                    advance_sub_tile<Layout, Shared, false>(thread, h, shared, own, matrix_row, sub * kSub, true);
                }
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    shared.h_sub[(sub * Layout::kStates + s) * Layout::kThreads + threadIdx.x] = h[s];
                }
            }

            for (int sub = subs - 1; sub >= 0; --sub) {
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    h[s] =
                        sub > 0 ? shared.h_sub[((sub - 1) * Layout::kStates + s) * Layout::kThreads + threadIdx.x] : h_start[s];
                }
                const int buffer = sub % 2 * Shared::kSums;
                const int sum_row = buffer + (warp * Layout::kSlice + k) * Shared::kSumRow;
                if (general) {
                    backward_sub_tile<Layout, Shared, true>(thread, h, shared, own, matrix_row, sum_row, sub * kSub,
                                                            p.variable_B, p.variable_C, need_y, slice > 0);
                } else {
                    backward_sub_tile<Layout, Shared, false>(thread, h, shared, own, matrix_row, sum_row, sub * kSub, true,
                                                             true, need_y, slice > 0);
                }
                __syncthreads();
                const int sub_steps = steps - sub * kSub;
                const int64_t offset = first_state * seqlen + first_step + sub * kSub;
                if (p.variable_B) {
                    flush(shared.dB + buffer, q.dB + offset, states, sub_steps, seqlen, atomic);
                }
                if (p.variable_C) {
                    flush(shared.dC + buffer, q.dC + offset, states, sub_steps, seqlen, atomic);
                }
            }

            if (kSliced) {
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    const int n = first_state + s * Layout::kLanes + k;
                    waiting_w[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x] = thread.w[s];
                    if (scan_valid && n < p.dstate) {  // no other thread's: atomic because nothing waits for it
                        atomicAdd(q.dA + part_row + n, thread.dA[s]);
                        if (!p.variable_B) {
                            atomicAdd(q.dB + part_row + n, thread.constant_dB[s]);
                        }
                        if (!p.variable_C) {
                            atomicAdd(q.dC + part_row + n, thread.constant_dC[s]);
                        }
                    }
                    thread.dA[s] = 0.0f;
                    thread.constant_dB[s] = 0.0f;
                    thread.constant_dC[s] = 0.0f;
                }
            }
        }

        if (aligned) {
            fetch_inputs<T, Layout, true>(in, rows, first_step, steps, p.z != nullptr);
        } else {
            fetch_inputs<T, Layout, false>(in, rows, first_step, steps, p.z != nullptr);
        }
        __syncwarp();  // the sums of other lanes are in
        store_gradients<T, Layout, Shared>(q, shared, in, rows, block, first_step, steps, aligned, bias_sum, D_sum);
        __syncwarp();  // the rows have been read before the next tile overwrites them
    }

    for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const int n = slice * Layout::kSlice + s * Layout::kLanes + k;
            if (!scan_valid || n >= p.dstate) {
                continue;
            }
            if (q.dinitial_state != nullptr && block.segment == 0) {
                const float w =
                    kSliced ? waiting_w[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x] : thread.w[s];
                q.dinitial_state[state_row + n] = w;
            }
            if (!kSliced) {
                q.dA[part_row + n] = thread.dA[s];
                if (!p.variable_B) {
                    q.dB[part_row + n] = thread.constant_dB[s];
                }
                if (!p.variable_C) {
                    q.dC[part_row + n] = thread.constant_dC[s];
                }
            }
        }
    }
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
#pragma unroll
        for (int bit = Layout::kRowLanes / 2; bit > 0; bit /= 2) {
            bias_sum[pass] += __shfl_xor_sync(0xffffffffu, bias_sum[pass], bit);
            D_sum[pass] += __shfl_xor_sync(0xffffffffu, D_sum[pass], bit);
        }
        if (rows.step == 0 && rows.tile_row[pass] < block.channels) {
            const int64_t at = part * p.dim + rows.channel[pass];
            if (q.ddelta_bias != nullptr) {
                q.ddelta_bias[at] = bias_sum[pass];
            }
            if (q.dD != nullptr) {
                q.dD[at] = D_sum[pass];
            }
        }
    }
}

template <typename T, class Layout, int kSub, int kBlocks, bool kSliced>
cudaError_t launch_backward_layout(const MambaSelectiveScanBackward& q, bool aligned) {
    const MambaSelectiveScan& p = q.forward;
    const auto kernel = selective_scan_backward_kernel<T, Layout, kSub, kBlocks, kSliced>;
    size_t shared_bytes = sizeof(BackwardShared<T, Layout, kSub>);
    if (kSliced) {
        const int64_t slices = ceil_div(p.dstate, Layout::kSlice);
        shared_bytes += static_cast<size_t>(slices) * Layout::kStates * Layout::kThreads * sizeof(float);
    }
    static_assert(sizeof(BackwardShared<T, Layout, kSub>) +
                          (kSliced ? MAMBA_MAX_DSTATE / Layout::kLanes * Layout::kThreads * sizeof(float) : 0) <=
                      kBackwardShared,
                  "kBackwardShared must cover every layout");
    if (shared_bytes > 48 * 1024) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
        if (error != cudaSuccess) {
            return error;
        }
    }
    const unsigned blocks = static_cast<unsigned>(scan_grid(p, Layout::kChannels, p.segments));
    const bool atomic = q.slots == 1 && p.dim / p.ngroups > Layout::kChannels;
    if (p.segments > 1) {
        const int64_t slices = ceil_div(p.dstate, Layout::kSlice);
        const size_t waiting_bytes =
            kSliced ? static_cast<size_t>(slices) * Layout::kStates * Layout::kThreads * sizeof(float) : 0;
        const auto carry_kernel = selective_scan_backward_carry_kernel<T, Layout, kSliced>;
        const unsigned carry_blocks = static_cast<unsigned>(scan_grid(p, Layout::kChannels, p.segments - 1));
        const cudaError_t error =
            launch_kernel(carry_kernel, carry_blocks, Layout::kThreads, waiting_bytes, p.run.stream, q, aligned);
        if (error != cudaSuccess) {
            return error;
        }
        return launch_overlapping(kernel, blocks, Layout::kThreads, shared_bytes, p.run.stream, q, aligned, atomic);
    }
    return launch_kernel(kernel, blocks, Layout::kThreads, shared_bytes, p.run.stream, q, aligned, atomic);
}

template <typename T>
cudaError_t launch_scan_backward(const MambaSelectiveScanBackward& q, bool aligned, bool small) {
    const int64_t dstate = q.forward.dstate;
    static_assert(sizeof(BackwardShared<float, Backward16, 16>) <= kSmallestShared &&
                      sizeof(BackwardShared<float, Backward32Small, 8>) +
                              MAMBA_MAX_DSTATE / Backward32Small::kLanes * Backward32Small::kThreads * sizeof(float) <=
                          kSmallestShared,
                  "the layouts for small GPUs must fit them");
    if (dstate <= Backward8::kSlice && !small) {
        return launch_backward_layout<T, Backward8, 16, 2, false>(q, aligned);
    }
    if (dstate <= Backward16::kSlice) {
        return launch_backward_layout<T, Backward16, 16, 3, false>(q, aligned);
    }
    if (small) {
        return launch_backward_layout<T, Backward32Small, 8, 4, true>(q, aligned);
    }
    if (dstate <= Backward32::kSlice) {
        return launch_backward_layout<T, Backward32, 8, 2, false>(q, aligned);
    }
    return launch_backward_layout<T, Backward32, 8, 2, true>(q, aligned);
}

}  // namespace mamba
