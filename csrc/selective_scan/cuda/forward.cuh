// The CUDA forward scan. tile.cuh explains the layout.
//
// Where channels are too few to fill the GPU, the length is split into segments (MambaSelectiveScan::segments): one launch
// finds what every segment passes on, a second one runs them all from the right states.
#pragma once

#include "selective_scan/cuda/tile.cuh"

namespace mamba {

// What one thread needs to run its states through a tile.
template <class Layout>
struct ForwardThread {
    float h[Layout::kStates];
    float A[Layout::kStates];           // times log2(e)
    float constant_B[Layout::kStates];  // where B, C do not vary over time
    float constant_C[Layout::kStates];
    float dt_sum;    // kCarryOnly: sum of dt, over which the segment's decays multiply to exp2(A dt_sum)
    bool restarted;  // kCarryOnly: the state has restarted
};

// A and constant B and C of a lane's states. parameter: number of the first one in them; states: see pass_through_segments.
template <class Layout>
__device__ __forceinline__ void load_parameters(ForwardThread<Layout>& thread, const MambaSelectiveScan& p, int64_t parameter,
                                                int states) {
#pragma unroll
    for (int s = 0; s < Layout::kStates; ++s) {
        const int64_t at = parameter + s * Layout::kLanes;
        const bool exists = s * Layout::kLanes < states;
        thread.A[s] = exists ? decay_exponent(p.A[at]) : 0.0f;
        thread.constant_B[s] = exists && !p.variable_B ? static_cast<const float*>(p.B)[at] : 0.0f;
        thread.constant_C[s] = exists && !p.variable_C ? static_cast<const float*>(p.C)[at] : 0.0f;
    }
}

// Runs `steps` (a multiple of kUnroll) steps of one tile. y is added to where add_y, else written. kGeneral: B or C may be
// constant, and the state may restart; the common case pays for neither. kCarryOnly: the states alone, no y. The sums over
// states come last in each round: a store to shared memory would hold back the loads behind it.
template <typename T, class Layout, int kUnroll, bool kGeneral, bool kCarryOnly>
__device__ __forceinline__ void forward_tile(ForwardThread<Layout>& thread, const float* dt_row, const float* x_row,
                                             float* y_row, const MatrixTile<T, Layout>& BC, bool variable_B, bool variable_C,
                                             const int* resets, int steps, bool add_y) {
    const int lane = threadIdx.x % 32;
    const int own = lane % Layout::kLanes * Layout::kRow;
    for (int first = 0; first < steps; first += kUnroll) {
        float y[kUnroll];
#pragma unroll
        for (int step = 0; step < kUnroll; step += 4) {
            const Steps4 dt = read4(dt_row + first + step);
            const Steps4 x = read4(x_row + first + step);
            if (kCarryOnly && !add_y) {  // once for all slices
                thread.dt_sum += (dt.at[0] + dt.at[1]) + (dt.at[2] + dt.at[3]);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    thread.restarted |= kGeneral && resets[first + step + j] != 0;
                }
            }
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                const int at = own + first + step + s * Layout::kLanes * Layout::kRow;
                Steps4 B;
                Steps4 C = same4(0.0f);
                if constexpr (kCarryOnly) {
                    B = BC.read_one(at);
                } else {
                    BC.read(at, B, C);
                }
                if (kGeneral) {
                    B = variable_B ? B : same4(thread.constant_B[s]);
                    C = variable_C ? C : same4(thread.constant_C[s]);
                }
                float h = thread.h[s];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (kGeneral) {
                        h = resets[first + step + j] ? 0.0f : h;
                    }
                    h = fmaf(exp2_fast(dt.at[j] * thread.A[s]), h, x.at[j] * B.at[j]);
                    if (!kCarryOnly) {
                        y[step + j] = s == 0 ? C.at[j] * h : fmaf(C.at[j], h, y[step + j]);
                    }
                }
                thread.h[s] = h;
            }
        }
        if (!kCarryOnly) {
            sum_to_row<kUnroll, Layout::kLanes, 1>(y_row + first, y, lane, add_y);
        }
    }
}

// kSliced: dstate is larger than the layout's slice; states then wait in shared memory between slices. kCarryOnly: fills the
// workspace for all segments but the last.
template <typename T, class Layout, int kUnroll, int kBlocks, bool kSliced, bool kCarryOnly>
__global__ void __launch_bounds__(Layout::kThreads, kBlocks)
    selective_scan_forward_kernel(const MambaSelectiveScan p, bool aligned) {
    __shared__ __align__(16) MatrixTile<T, Layout> BC_tile;
    __shared__ __align__(16) float dt_tile[Layout::kChannels * Layout::kRow];
    __shared__ __align__(16) float x_tile[Layout::kChannels * Layout::kRow];  // dt * u
    __shared__ __align__(16) float y_tile[kCarryOnly ? 4 : Layout::kChannels * Layout::kRow];
    __shared__ int resets[Layout::kTile];
    MAMBA_DYNAMIC_SHARED(4, float, waiting_h);  // (slices, kStates, kThreads), sliced only

    if (kCarryOnly) {
        let_next_kernel_start();
    }
    const ScanBlock block = scan_block(p, Layout::kChannels, 0);
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * Layout::kWarpChannels;  // the warp's first row in the channel tiles
    const int slices = kSliced ? static_cast<int>(ceil_div(p.dstate, Layout::kSlice)) : 1;

    // The scan's own channel and states.
    const int scan_row = warp_row + lane / Layout::kLanes;
    const int k = lane % Layout::kLanes;
    const bool scan_valid = scan_row < block.channels;
    const int64_t scan_channel = block.first_channel + (scan_valid ? scan_row : 0);
    const int64_t state_row = (block.batch * p.dim + scan_channel) * p.dstate;
    const int own_states = scan_valid ? static_cast<int>(p.dstate) - k : 0;  // the lane's state k + i exists where i is below
    ForwardThread<Layout> thread;
    thread.dt_sum = 0.0f;
    thread.restarted = false;
    if (!kSliced) {
        load_parameters(thread, p, scan_channel * p.dstate + k, own_states);
    }

    // The element-wise part: kPasses rows, kVector steps each from element_step on.
    const int element_step = lane % Layout::kRowLanes * Layout::kVector;
    const T* u_row[Layout::kPasses];
    const T* delta_row[Layout::kPasses];
    const T* z_row[Layout::kPasses];
    T* out_row[Layout::kPasses];
    float bias[Layout::kPasses];
    float D[Layout::kPasses];
    bool row_exists[Layout::kPasses];
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int row = warp_row + pass * Layout::kPassRows + lane / Layout::kRowLanes;
        const int64_t channel = block.first_channel + (row < block.channels ? row : 0);
        row_exists[pass] = row < block.channels;
        u_row[pass] = static_cast<const T*>(p.u) + block.batch * p.u_batch_stride + channel * p.u_dim_stride + element_step;
        delta_row[pass] =
            static_cast<const T*>(p.delta) + block.batch * p.delta_batch_stride + channel * p.delta_dim_stride + element_step;
        z_row[pass] = static_cast<const T*>(p.z) + block.batch * p.z_batch_stride + channel * p.z_dim_stride + element_step;
        out_row[pass] = static_cast<T*>(p.out) + block.batch * p.out_batch_stride + channel * p.out_dim_stride + element_step;
        bias[pass] = p.delta_bias != nullptr ? p.delta_bias[channel] : 0.0f;
        D[pass] = p.D != nullptr ? p.D[channel] : 0.0f;
    }
    const MatrixRows<T, Layout> matrix_rows(p, block);
    const int32_t* seq_idx = p.seq_idx != nullptr ? p.seq_idx + block.batch * p.seqlen : nullptr;
    const bool general = !p.variable_B || !p.variable_C || seq_idx != nullptr;
    if (general && seq_idx == nullptr) {
        for (int i = threadIdx.x; i < Layout::kTile; i += Layout::kThreads) {
            resets[i] = 0;
        }
    }

    // A tile's elements, on their way into registers: small ones early, large ones, and those of lanes with eight states, where
    // they are needed (early they are up to 6 % slower). The walk of states alone has room there for those of the next tile
    // while it works at this one.
    constexpr bool kEarly = sizeof(T) == 2 && (Layout::kStates < 8 || kSliced || kCarryOnly);
    constexpr bool kAhead = kEarly && kCarryOnly && !kSliced;
    int steps = 0;
    int valid[Layout::kPasses];  // elements of the lane in each row
    StagedTile<T, Layout> B_staged, C_staged;
    Packed<T, Layout::kVector> u[Layout::kPasses], delta[Layout::kPasses], z[Layout::kPasses];
    const auto fetch_tile = [&](int64_t first_step) {
        const int64_t left = block.end - first_step;
        steps = static_cast<int>(left < Layout::kTile ? left : Layout::kTile);
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            valid[pass] = row_exists[pass] ? steps - element_step : 0;
        }
        if (aligned) {
            fetch_rows<T, Layout, true>(delta, delta_row, first_step, valid);
            fetch_rows<T, Layout, true>(u, u_row, first_step, valid);
            fetch_BC<T, Layout, true>(B_staged, C_staged, p, matrix_rows, 0, first_step, steps, true, !kCarryOnly);
        } else {
            fetch_rows<T, Layout, false>(delta, delta_row, first_step, valid);
            fetch_rows<T, Layout, false>(u, u_row, first_step, valid);
            fetch_BC<T, Layout, false>(B_staged, C_staged, p, matrix_rows, 0, first_step, steps, true, !kCarryOnly);
        }
    };
    if (kEarly) {
        fetch_tile(block.begin);
    }

    // Before the tiles, not in the first of them: ptxas lets such a load share a scoreboard with that of z, and the steps of
    // every tile would then wait for z.
    for (int slice = 0; slice < slices; ++slice) {
        const int64_t state = state_row + slice * Layout::kSlice + k;
        const int states = kCarryOnly ? 0 : own_states - slice * Layout::kSlice;
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const bool given = p.initial_state != nullptr && s * Layout::kLanes < states;
            thread.h[s] = given ? p.initial_state[state + s * Layout::kLanes] : 0.0f;
        }
        if (!kCarryOnly && block.segment > 0) {
            wait_for_previous_kernel();
            pass_through_segments<Layout>(p, thread.h, 0, 1, static_cast<int>(block.segment), state, states);
        }
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            if (kSliced) {
                waiting_h[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x] = thread.h[s];
            }
        }
    }

    for (int64_t first_step = block.begin; first_step < block.end; first_step += Layout::kTile) {
        const int64_t next_step = first_step + Layout::kTile;
        if (!kEarly) {
            fetch_tile(first_step);
        }
        // Not by round_up: the compiler would make other code of the whole loop. So too in backward.cuh.
        const int rounded = (steps + kUnroll - 1) / kUnroll * kUnroll;
        // dt and dt * u of the warp's own rows. Steps past the end get dt = 0 and x = 0, which leaves the state as it is.
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            const int row = (warp_row + pass * Layout::kPassRows + lane / Layout::kRowLanes) * Layout::kRow + element_step;
            float dt[Layout::kVector], x[Layout::kVector];
            unpack<T, Layout::kVector>(delta[pass], dt);
            unpack<T, Layout::kVector>(u[pass], x);
            time_steps(dt, bias[pass], p.delta_softplus, steps - element_step);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                x[i] *= dt[i];
            }
            write_row(dt_tile + row, dt);
            write_row(x_tile + row, x);
        }

        for (int slice = 0; slice < slices; ++slice) {
            const int first_state = slice * Layout::kSlice;
            __syncthreads();  // the last tile's readers are done
            if constexpr (kCarryOnly) {
                BC_tile.put_one(B_staged);
            } else {
                BC_tile.put(B_staged, C_staged);
            }
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
            if (kAhead && next_step < block.end) {
                fetch_tile(next_step);
            }
            if (!kAhead && slice == 0 && next_step < block.end) {
                // What comes next is asked for into the L2 cache only: registers are scarce.
#pragma unroll
                for (int pass = 0; pass < Layout::kPasses; ++pass) {
                    if (row_exists[pass] && next_step + element_step < block.end) {
                        prefetch_to_L2(u_row[pass] + next_step);
                        prefetch_to_L2(delta_row[pass] + next_step);
                    }
                }
            }
            if (!kCarryOnly && slice + 1 == slices && p.z != nullptr) {
                if (aligned) {
                    fetch_rows<T, Layout, true>(z, z_row, first_step, valid);
                } else {
                    fetch_rows<T, Layout, false>(z, z_row, first_step, valid);
                }
            }
            if (kSliced) {
                load_parameters(thread, p, scan_channel * p.dstate + first_state + k, own_states - first_state);
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    thread.h[s] = waiting_h[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x];
                }
            }

            const float* dt_row = dt_tile + scan_row * Layout::kRow;
            const float* x_row = x_tile + scan_row * Layout::kRow;
            float* y_row = y_tile + (kCarryOnly ? 0 : scan_row * Layout::kRow);
            if (general) {
                forward_tile<T, Layout, kUnroll, true, kCarryOnly>(thread, dt_row, x_row, y_row, BC_tile, p.variable_B,
                                                                   p.variable_C, resets, rounded, slice > 0);
            } else {
                forward_tile<T, Layout, kUnroll, false, kCarryOnly>(thread, dt_row, x_row, y_row, BC_tile, true, true, resets,
                                                                    rounded, slice > 0);
            }

            const bool checkpoint =
                !kCarryOnly && p.checkpoints != nullptr && next_step % MAMBA_SCAN_CHECKPOINT == 0 && next_step < p.seqlen;
            const bool finish = !kCarryOnly && p.last_state != nullptr && next_step >= p.seqlen;
            const int64_t count = (p.seqlen - 1) / MAMBA_SCAN_CHECKPOINT;
            const int64_t number = next_step / MAMBA_SCAN_CHECKPOINT - 1;
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                const int n = first_state + s * Layout::kLanes + k;
                const bool valid = scan_valid && n < p.dstate;
                if (checkpoint && valid) {
                    p.checkpoints[((block.batch * count + number) * p.dim + scan_channel) * p.dstate + n] = thread.h[s];
                }
                if (finish && valid) {
                    p.last_state[state_row + n] = thread.h[s];
                }
                if (kCarryOnly && next_step >= block.end && valid) {
                    const int64_t at = workspace_at(p, block.segment, state_row + n);
                    p.workspace[at] = thread.h[s];
                    p.workspace[at + p.batch * p.dim * p.dstate] =
                        thread.restarted ? -1.0f : exp2_fast(thread.A[s] * thread.dt_sum);
                }
                if (kSliced) {
                    waiting_h[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x] = thread.h[s];
                }
            }
        }

        if (!kCarryOnly) {
            __syncwarp();  // the sums of other lanes are in
#pragma unroll
            for (int pass = 0; pass < Layout::kPasses; ++pass) {
                const int row = warp_row + pass * Layout::kPassRows + lane / Layout::kRowLanes;
                float y[Layout::kVector], other[Layout::kVector];
                read_row(y, y_tile + row * Layout::kRow + element_step);
                unpack<T, Layout::kVector>(u[pass], other);
#pragma unroll
                for (int i = 0; i < Layout::kVector; ++i) {
                    y[i] = p.D != nullptr ? fmaf(D[pass], other[i], y[i]) : y[i];
                }
                if (p.z != nullptr) {
                    unpack<T, Layout::kVector>(z[pass], other);
#pragma unroll
                    for (int i = 0; i < Layout::kVector; ++i) {
                        y[i] *= silu(other[i]);
                    }
                }
                store_steps<T, Layout::kVector>(out_row[pass] + first_step, valid[pass], aligned, y);
            }
        }
        if (kEarly && !kAhead && next_step < block.end) {
            fetch_tile(next_step);
        }
        __syncwarp();  // y and dt have been read before the next tile overwrites them
    }

    if (p.seqlen == 0 && p.last_state != nullptr && scan_valid) {
        for (int n = k; n < p.dstate; n += Layout::kLanes) {
            p.last_state[state_row + n] = p.initial_state != nullptr ? p.initial_state[state_row + n] : 0.0f;
        }
    }
}

template <typename T, class Layout, int kUnroll, int kBlocks, bool kSliced>
cudaError_t launch_forward_layout(const MambaSelectiveScan& p, bool aligned) {
    const int64_t slices = ceil_div(p.dstate, Layout::kSlice);
    const size_t shared_bytes = kSliced ? static_cast<size_t>(slices) * Layout::kStates * Layout::kThreads * sizeof(float) : 0;
    const unsigned blocks = static_cast<unsigned>(scan_grid(p, Layout::kChannels, p.segments));
    const auto kernel = selective_scan_forward_kernel<T, Layout, kUnroll, kBlocks, kSliced, false>;
    if (p.segments > 1) {
        const auto carry_kernel = selective_scan_forward_kernel<T, Layout, kUnroll, kBlocks, kSliced, true>;
        const unsigned carry_blocks = static_cast<unsigned>(scan_grid(p, Layout::kChannels, p.segments - 1));
        const cudaError_t error =
            launch_kernel(carry_kernel, carry_blocks, Layout::kThreads, shared_bytes, p.run.stream, p, aligned);
        if (error != cudaSuccess) {
            return error;
        }
        return launch_overlapping(kernel, blocks, Layout::kThreads, shared_bytes, p.run.stream, p, aligned);
    }
    return launch_kernel(kernel, blocks, Layout::kThreads, shared_bytes, p.run.stream, p, aligned);
}

template <typename T>
cudaError_t launch_scan_forward(const MambaSelectiveScan& p, bool aligned, bool wide) {
    if (p.dstate <= Forward8::kSlice) {
        return launch_forward_layout<T, Forward8, 16, 4, false>(p, aligned);
    }
    if (p.dstate <= Forward16::kSlice) {
        if (wide) {
            return launch_forward_layout<T, Forward16Wide, 16, 4, false>(p, aligned);
        }
        return launch_forward_layout<T, Forward16, 8, 3, false>(p, aligned);
    }
    if (p.dstate <= Forward32::kSlice) {
        return launch_forward_layout<T, Forward32, 8, 3, false>(p, aligned);
    }
    if (p.dstate <= Forward64::kSlice) {
        return launch_forward_layout<T, Forward64, 4, 3, false>(p, aligned);
    }
    return launch_forward_layout<T, Forward64, 4, 3, true>(p, aligned);
}

}  // namespace mamba
