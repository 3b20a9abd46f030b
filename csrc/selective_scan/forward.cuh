// The CUDA forward scan. scan_tile.cuh explains the layout.
#pragma once

#include "selective_scan/scan_launch.cuh"
#include "selective_scan/scan_tile.cuh"

namespace mamba {

constexpr int kUnroll = 16;  // steps

// What one thread needs to run its states through a tile.
template <class Layout>
struct ForwardThread {
    float h[Layout::kStates];
    float A[Layout::kStates];           // times log2(e)
    float constant_B[Layout::kStates];  // where B, C do not vary over time
    float constant_C[Layout::kStates];
};

// Runs `steps` (a multiple of kUnroll) steps of one tile. y is added to where add_y, else written. kGeneral: B or C may be
// constant, and the state may restart; the common case pays for neither.
template <class Layout, bool kGeneral>
__device__ __forceinline__ void forward_tile(ForwardThread<Layout>& thread, const float* dt_row, const float* x_row,
                                             float* y_row, const float* B_tile, const float* C_tile, bool variable_B,
                                             bool variable_C, const int* resets, int steps, bool add_y) {
    const int lane = threadIdx.x % 32;
    const int k = lane % Layout::kLanes;
    // Unrolled far enough that the sums of one group of four steps overlap the work on the next: a thread has few neighbours
    // to hide its latencies when channels are few.
#pragma unroll kUnroll / 4
    for (int step = 0; step < steps; step += 4) {
        const Steps4 dt = read4(dt_row + step);
        const Steps4 x = read4(x_row + step);
        float y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const int row = (s * Layout::kLanes + k) * Layout::kRow + step;
            Steps4 B, C;
            if (kGeneral) {
                B = variable_B ? read4(B_tile + row) : same4(thread.constant_B[s]);
                C = variable_C ? read4(C_tile + row) : same4(thread.constant_C[s]);
            } else {
                B = read4(B_tile + row);
                C = read4(C_tile + row);
            }
            float h = thread.h[s];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (kGeneral) {
                    h = resets[step + j] ? 0.0f : h;
                }
                h = fmaf(exp2_fast(dt.at[j] * thread.A[s]), h, x.at[j] * B.at[j]);
                y[j] = fmaf(C.at[j], h, y[j]);
            }
            thread.h[s] = h;
        }
        const float sum = sum_over_states<Layout::kLanes>(y, lane);
        if (k < 4) {
            y_row[step + k] = add_y ? y_row[step + k] + sum : sum;
        }
    }
}

// kSliced: dstate is larger than the layout's slice; states then wait in shared memory between slices.
template <typename T, class Layout, bool kSliced>
__global__ void __launch_bounds__(Layout::kThreads)
    selective_scan_forward_kernel(const MambaSelectiveScan p, bool aligned_rows, bool aligned_BC) {
    __shared__ alignas(16) float B_tile[Layout::kSlice * Layout::kRow];
    __shared__ alignas(16) float C_tile[Layout::kSlice * Layout::kRow];
    __shared__ alignas(16) float dt_tile[Layout::kChannels * Layout::kRow];
    __shared__ alignas(16) float x_tile[Layout::kChannels * Layout::kRow];  // dt * u
    __shared__ alignas(16) float y_tile[Layout::kChannels * Layout::kRow];
    __shared__ int resets[Layout::kTile];
    extern __shared__ float waiting_h[];  // (slices, kStates, kThreads), sliced only

    const ScanBlock block = scan_block(p, Layout::kChannels);
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * Layout::kWarpChannels;  // the warp's first row in the channel tiles
    const int64_t seqlen = p.seqlen;
    const int slices = kSliced ? static_cast<int>((p.dstate + Layout::kSlice - 1) / Layout::kSlice) : 1;

    // The scan's own channel and states.
    const int scan_row = warp_row + lane / Layout::kLanes;
    const int k = lane % Layout::kLanes;
    const bool scan_valid = scan_row < block.channels;
    const int64_t scan_channel = block.first_channel + (scan_valid ? scan_row : 0);
    const int64_t state_row = (block.batch * p.dim + scan_channel) * p.dstate;
    ForwardThread<Layout> thread;

    // The element-wise part: kPasses rows, kVector steps each.
    const int element_step = lane % Layout::kRowLanes * Layout::kVector;
    const T* u_row[Layout::kPasses];
    const T* delta_row[Layout::kPasses];
    int64_t row_length[Layout::kPasses];  // 0 for a channel that does not exist
    float bias[Layout::kPasses];
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int row = warp_row + pass * Layout::kPassRows + lane / Layout::kRowLanes;
        const int64_t channel = block.first_channel + (row < block.channels ? row : 0);
        row_length[pass] = row < block.channels ? seqlen : 0;
        u_row[pass] = static_cast<const T*>(p.u) + block.batch * p.u_batch_stride + channel * p.u_dim_stride;
        delta_row[pass] = static_cast<const T*>(p.delta) + block.batch * p.delta_batch_stride + channel * p.delta_dim_stride;
        bias[pass] = p.delta_bias != nullptr ? p.delta_bias[channel] : 0.0f;
    }
    const T* B_base = static_cast<const T*>(p.B) + block.batch * p.B_batch_stride + block.group * p.B_group_stride;
    const T* C_base = static_cast<const T*>(p.C) + block.batch * p.C_batch_stride + block.group * p.C_group_stride;
    const int32_t* seq_idx = p.seq_idx != nullptr ? p.seq_idx + block.batch * seqlen : nullptr;
    const bool general = !p.variable_B || !p.variable_C || seq_idx != nullptr;
    if (general && seq_idx == nullptr) {
        for (int i = threadIdx.x; i < Layout::kTile; i += Layout::kThreads) {
            resets[i] = 0;
        }
    }

    for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const int n = slice * Layout::kSlice + s * Layout::kLanes + k;
            const bool valid = scan_valid && n < p.dstate;
            thread.h[s] = valid && p.initial_state != nullptr ? p.initial_state[state_row + n] : 0.0f;
            if (kSliced) {
                waiting_h[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x] = thread.h[s];
            }
        }
    }

    Packed<T, Layout::kVector> u[Layout::kPasses], delta[Layout::kPasses], z[Layout::kPasses];
    StagedTile<T, Layout> B_next, C_next;
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        u[pass] = load_steps<T, Layout::kVector>(u_row[pass], element_step, row_length[pass], aligned_rows);
        delta[pass] = load_steps<T, Layout::kVector>(delta_row[pass], element_step, row_length[pass], aligned_rows);
    }
    if (p.variable_B) {
        B_next.fetch(B_base, p.B_dstate_stride, 0, p.dstate, 0, seqlen, aligned_BC);
    }
    if (p.variable_C) {
        C_next.fetch(C_base, p.C_dstate_stride, 0, p.dstate, 0, seqlen, aligned_BC);
    }

    for (int64_t first_step = 0; first_step < seqlen; first_step += Layout::kTile) {
        const int64_t next_step = first_step + Layout::kTile;
        const int steps = static_cast<int>(seqlen - first_step < Layout::kTile ? seqlen - first_step : Layout::kTile);
        // dt and dt * u of the warp's own rows. Steps past the end get dt = 0 and x = 0, which leaves the state as it is.
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            const int row = (warp_row + pass * Layout::kPassRows + lane / Layout::kRowLanes) * Layout::kRow + element_step;
            float dt[Layout::kVector], x[Layout::kVector];
            unpack<T, Layout::kVector>(delta[pass], dt);
            unpack<T, Layout::kVector>(u[pass], x);
            time_steps(dt, bias[pass], p.delta_softplus, seqlen - first_step - element_step);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                x[i] *= dt[i];
            }
            write_row(dt_tile + row, dt);
            write_row(x_tile + row, x);
        }
        Packed<T, Layout::kVector> u_now[Layout::kPasses];
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            u_now[pass] = u[pass];
        }

        for (int slice = 0; slice < slices; ++slice) {
            __syncthreads();  // the last tile's readers are done
            if (p.variable_B) {
                B_next.put(B_tile);
            }
            if (p.variable_C) {
                C_next.put(C_tile);
            }
            if (seq_idx != nullptr) {
                stage_resets(resets, Layout::kTile, seq_idx, first_step, seqlen);
            }
            __syncthreads();
            // Fetch what comes next while this tile is computed.
            const bool last_slice = slice + 1 == slices;
            const int64_t fetch_step = last_slice ? next_step : first_step;
            const int64_t fetch_state = last_slice ? 0 : (slice + 1) * Layout::kSlice;
            if (fetch_step < seqlen) {
                if (p.variable_B) {
                    B_next.fetch(B_base, p.B_dstate_stride, fetch_state, p.dstate, fetch_step, seqlen, aligned_BC);
                }
                if (p.variable_C) {
                    C_next.fetch(C_base, p.C_dstate_stride, fetch_state, p.dstate, fetch_step, seqlen, aligned_BC);
                }
            }
            if (last_slice) {
#pragma unroll
                for (int pass = 0; pass < Layout::kPasses; ++pass) {
                    if (p.z != nullptr) {
                        const int row = warp_row + pass * Layout::kPassRows + lane / Layout::kRowLanes;
                        const int64_t channel = block.first_channel + (row < block.channels ? row : 0);
                        const T* z_row = static_cast<const T*>(p.z) + block.batch * p.z_batch_stride + channel * p.z_dim_stride;
                        z[pass] =
                            load_steps<T, Layout::kVector>(z_row, first_step + element_step, row_length[pass], aligned_rows);
                    }
                    u[pass] =
                        load_steps<T, Layout::kVector>(u_row[pass], next_step + element_step, row_length[pass], aligned_rows);
                    delta[pass] = load_steps<T, Layout::kVector>(delta_row[pass], next_step + element_step, row_length[pass],
                                                                 aligned_rows);
                }
            }
            if (first_step == 0 || kSliced) {
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    const int n = slice * Layout::kSlice + s * Layout::kLanes + k;
                    const bool valid = scan_valid && n < p.dstate;
                    const int64_t parameter = scan_channel * p.dstate + n;
                    thread.A[s] = valid ? p.A[parameter] * kLog2e : 0.0f;
                    thread.constant_B[s] = valid && !p.variable_B ? static_cast<const float*>(p.B)[parameter] : 0.0f;
                    thread.constant_C[s] = valid && !p.variable_C ? static_cast<const float*>(p.C)[parameter] : 0.0f;
                    if (kSliced) {
                        thread.h[s] = waiting_h[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x];
                    }
                }
            }

            const float* dt_row = dt_tile + scan_row * Layout::kRow;
            const float* x_row = x_tile + scan_row * Layout::kRow;
            float* y_row = y_tile + scan_row * Layout::kRow;
            const int rounded = (steps + kUnroll - 1) / kUnroll * kUnroll;
            if (general) {
                forward_tile<Layout, true>(thread, dt_row, x_row, y_row, B_tile, C_tile, p.variable_B, p.variable_C, resets,
                                           rounded, slice > 0);
            } else {
                forward_tile<Layout, false>(thread, dt_row, x_row, y_row, B_tile, C_tile, true, true, resets, rounded,
                                            slice > 0);
            }

            const bool checkpoint = p.checkpoints != nullptr && next_step % MAMBA_SCAN_CHECKPOINT == 0 && next_step < seqlen;
            const bool finish = p.last_state != nullptr && next_step >= seqlen;
            const int64_t count = (seqlen - 1) / MAMBA_SCAN_CHECKPOINT;
            const int64_t number = next_step / MAMBA_SCAN_CHECKPOINT - 1;
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                const int n = slice * Layout::kSlice + s * Layout::kLanes + k;
                if (checkpoint && scan_valid && n < p.dstate) {
                    p.checkpoints[((block.batch * count + number) * p.dim + scan_channel) * p.dstate + n] = thread.h[s];
                }
                if (finish && scan_valid && n < p.dstate) {
                    p.last_state[state_row + n] = thread.h[s];
                }
                if (kSliced) {
                    waiting_h[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x] = thread.h[s];
                }
            }
        }

        __syncwarp();
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            const int row = warp_row + pass * Layout::kPassRows + lane / Layout::kRowLanes;
            const int64_t channel = block.first_channel + (row < block.channels ? row : 0);
            const float D = p.D != nullptr ? p.D[channel] : 0.0f;
            float y[Layout::kVector], other[Layout::kVector];
            read_row(y, y_tile + row * Layout::kRow + element_step);
            if (p.D != nullptr) {
                unpack<T, Layout::kVector>(u_now[pass], other);
#pragma unroll
                for (int i = 0; i < Layout::kVector; ++i) {
                    y[i] = fmaf(D, other[i], y[i]);
                }
            }
            if (p.z != nullptr) {
                unpack<T, Layout::kVector>(z[pass], other);
#pragma unroll
                for (int i = 0; i < Layout::kVector; ++i) {
                    y[i] *= silu(other[i]);
                }
            }
            T* out_row = static_cast<T*>(p.out) + block.batch * p.out_batch_stride + channel * p.out_dim_stride;
            store_steps<T, Layout::kVector>(out_row, first_step + element_step, row_length[pass], aligned_rows, y);
        }
        __syncwarp();  // y and dt are read before the next tile overwrites them
    }

    if (seqlen == 0 && p.last_state != nullptr && scan_valid) {
        for (int n = k; n < p.dstate; n += Layout::kLanes) {
            p.last_state[state_row + n] = p.initial_state != nullptr ? p.initial_state[state_row + n] : 0.0f;
        }
    }
}

template <typename T, class Layout, bool kSliced>
cudaError_t launch_forward_layout(const MambaSelectiveScan& p, bool aligned_rows, bool aligned_BC) {
    const int64_t slices = (p.dstate + Layout::kSlice - 1) / Layout::kSlice;
    const size_t shared_bytes = kSliced ? static_cast<size_t>(slices) * Layout::kStates * Layout::kThreads * sizeof(float) : 0;
    const unsigned int blocks = static_cast<unsigned int>(scan_grid(p, Layout::kChannels));
    selective_scan_forward_kernel<T, Layout, kSliced>
        <<<blocks, Layout::kThreads, shared_bytes, static_cast<cudaStream_t>(p.run.stream)>>>(p, aligned_rows, aligned_BC);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch_selective_scan_forward(const MambaSelectiveScan& p, bool aligned_rows, bool aligned_BC) {
    // More lanes a channel give more threads, fewer give less overhead a state: take fewer once the GPU is full anyway.
    if (p.dstate <= 8) {
        return launch_forward_layout<T, ScanLayout<4, 2, 32, 4>, false>(p, aligned_rows, aligned_BC);
    }
    if (p.dstate <= 16) {
        return launch_forward_layout<T, ScanLayout<8, 2, 64, 4>, false>(p, aligned_rows, aligned_BC);
    }
    if (p.dstate <= 32) {
        return launch_forward_layout<T, ScanLayout<8, 4, 64, 4>, false>(p, aligned_rows, aligned_BC);
    }
    if (p.dstate <= 64) {
        return launch_forward_layout<T, ScanLayout<16, 4, 32, 8>, false>(p, aligned_rows, aligned_BC);
    }
    return launch_forward_layout<T, ScanLayout<16, 4, 32, 8>, true>(p, aligned_rows, aligned_BC);
}

}  // namespace mamba
