// The first launch of a CUDA backward scan whose length is split into segments.
#pragma once

#include "selective_scan/cuda/backward_elements.cuh"

namespace mamba {

// Fills the workspace for all segments but the first: a_t g_t of the segment's first step if nothing came from later ones.
template <typename T, class Layout, bool kSliced>
__global__ void __launch_bounds__(Layout::kThreads)
    selective_scan_backward_carry_kernel(const MambaSelectiveScanBackward q, bool aligned) {
    __shared__ __align__(16) MatrixTile<T, Layout> BC;
    __shared__ __align__(16) float dt_tile[Layout::kChannels * Layout::kRow];
    __shared__ __align__(16) float dy_tile[Layout::kChannels * Layout::kRow];
    __shared__ int resets[Layout::kTile];
    MAMBA_DYNAMIC_SHARED(4, float, waiting_w);  // (slices, kStates, kThreads), sliced only

    let_next_kernel_start();
    const MambaSelectiveScan& p = q.forward;
    const ScanBlock block = scan_block(p, Layout::kChannels, 1);
    const BackwardRows<T, Layout> rows = backward_rows<T, Layout>(q, block);
    const MatrixRows<T, Layout> matrix_rows(p, block);
    const int lane = threadIdx.x % 32;
    const int scan_row = threadIdx.x / 32 * Layout::kWarpChannels + lane / Layout::kLanes;
    const int k = lane % Layout::kLanes;
    const int own = scan_row * Layout::kRow;
    const bool scan_valid = scan_row < block.channels;
    const int64_t scan_channel = block.first_channel + (scan_valid ? scan_row : 0);
    const int64_t state_row = (block.batch * p.dim + scan_channel) * p.dstate;
    const int slices = kSliced ? static_cast<int>(ceil_div(p.dstate, Layout::kSlice)) : 1;
    const int32_t* seq_idx = p.seq_idx != nullptr ? p.seq_idx + block.batch * p.seqlen : nullptr;
    float A[Layout::kStates], w[Layout::kStates], constant_C[Layout::kStates];
#pragma unroll
    for (int s = 0; s < Layout::kStates; ++s) {
        w[s] = 0.0f;
    }
    if (kSliced) {
        for (int i = threadIdx.x; i < slices * Layout::kStates * Layout::kThreads; i += Layout::kThreads) {
            waiting_w[i] = 0.0f;
        }
    }
    float dt_sum = 0.0f;
    bool restarted = false;

    for (int64_t tile = ceil_div(block.end, Layout::kTile) - 1; tile >= block.begin / Layout::kTile; --tile) {
        const int64_t first_step = tile * Layout::kTile;
        const int steps = static_cast<int>(block.end - first_step < Layout::kTile ? block.end - first_step : Layout::kTile);
        BackwardInputs<T, Layout> in;
        StagedTile<T, Layout> B_staged, C_staged;
        if (aligned) {
            fetch_inputs<T, Layout, true>(in, rows, first_step, steps, p.z != nullptr);
            fetch_BC<T, Layout, true>(B_staged, C_staged, p, matrix_rows, 0, first_step, steps, false, true);
        } else {
            fetch_inputs<T, Layout, false>(in, rows, first_step, steps, p.z != nullptr);
            fetch_BC<T, Layout, false>(B_staged, C_staged, p, matrix_rows, 0, first_step, steps, false, true);
        }
        stage_time_and_gradient<T, Layout>(dt_tile, dy_tile, in, rows, p, steps);
        if (first_step > block.begin) {
            prefetch_inputs<T, Layout>(rows, first_step - Layout::kTile, p.z != nullptr);
        }
        for (int slice = 0; slice < slices; ++slice) {
            const int first_state = slice * Layout::kSlice;
            __syncthreads();  // B and C have been read
            BC.put_one(C_staged);
            if (seq_idx != nullptr) {
                stage_resets(resets, Layout::kTile, seq_idx, first_step, p.seqlen);
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
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                const int n = first_state + s * Layout::kLanes + k;
                const bool valid = scan_valid && n < p.dstate;
                const int64_t parameter = scan_channel * p.dstate + n;
                A[s] = valid ? p.A[parameter] * kLog2e : 0.0f;
                constant_C[s] = valid && !p.variable_C ? static_cast<const float*>(p.C)[parameter] : 0.0f;
                if (kSliced) {
                    w[s] = waiting_w[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x];
                }
            }
#pragma unroll 2
            for (int step = Layout::kTile - 4; step >= 0; step -= 4) {
                const Steps4 dt = read4(dt_tile + own + step);
                const Steps4 dy = read4(dy_tile + own + step);
                if (slice == 0) {
                    dt_sum += (dt.at[0] + dt.at[1]) + (dt.at[2] + dt.at[3]);
                }
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    Steps4 C = BC.read_one((s * Layout::kLanes + k) * Layout::kRow + step);
                    C = p.variable_C ? C : same4(constant_C[s]);
#pragma unroll
                    for (int j = 3; j >= 0; --j) {
                        w[s] = exp2_fast(dt.at[j] * A[s]) * fmaf(C.at[j], dy.at[j], w[s]);
                        if (seq_idx != nullptr) {
                            w[s] = resets[step + j] ? 0.0f : w[s];
                            restarted |= resets[step + j] != 0;
                        }
                    }
                }
            }
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                const int n = first_state + s * Layout::kLanes + k;
                if (kSliced) {
                    waiting_w[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x] = w[s];
                }
                if (first_step == block.begin && scan_valid && n < p.dstate) {
                    const int64_t at = workspace_at(p, block.segment, state_row + n);
                    p.workspace[at] = w[s];
                    p.workspace[at + p.batch * p.dim * p.dstate] = restarted ? -1.0f : exp2_fast(A[s] * dt_sum);
                }
            }
        }
        __syncwarp();  // the rows have been read before the next tile overwrites them
    }
}

}  // namespace mamba
