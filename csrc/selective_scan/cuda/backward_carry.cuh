// The first launch of a CUDA backward scan whose length is split into segments, or over several devices.
#pragma once

#include "selective_scan/cuda/backward_elements.cuh"

namespace mamba {

// Takes a lane's w = a_t g_t back through a tile. kGeneral as in forward_tile; count_dt: once for all slices.
template <typename T, class Layout, bool kGeneral>
__device__ __forceinline__ void carry_tile(Chains<Layout>& w, const Chains<Layout>& A, const Chains<Layout>& constant_C,
                                           float (&dt_sum)[Layout::kEach], bool& restarted, const float* dt_tile,
                                           const float* dy_tile, const MatrixTile<T, Layout>& BC,
                                           const LaneOrder<Layout>& order, const int (&channel_row)[Layout::kEach],
                                           bool variable_C, const int* resets, bool count_dt) {
#pragma unroll 2
    for (int step = Layout::kTile - 4; step >= 0; step -= 4) {
        Steps4 C[Layout::kStates];
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            C[s] = BC.read_one(BC.words + order.state(s) * Layout::kRow + step);
        }
#pragma unroll
        for (int c = 0; c < Layout::kEach; ++c) {
            const Steps4 dt = read4(dt_tile + channel_row[c] * Layout::kRow + step);
            const Steps4 dy = read4(dy_tile + channel_row[c] * Layout::kRow + step);
            if (count_dt) {
                dt_sum[c] += (dt.at[0] + dt.at[1]) + (dt.at[2] + dt.at[3]);
            }
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
#pragma unroll
                for (int j = 3; j >= 0; --j) {
                    const float C_now = kGeneral && !variable_C ? constant_C[c][s] : C[s].at[j];
                    w[c][s] = exp2_fast(dt.at[j] * A[c][s]) * fmaf(C_now, dy.at[j], w[c][s]);
                    if (kGeneral) {
                        w[c][s] = resets[step + j] ? 0.0f : w[c][s];
                        restarted |= resets[step + j] != 0;
                    }
                }
            }
        }
    }
}

template <class Layout>
__device__ __forceinline__ void clear_waiting(float* waiting, int slices) {
    for (int i = threadIdx.x; i < slices * Layout::kEach * Layout::kStates * Layout::kThreads; i += Layout::kThreads) {
        waiting[i] = 0.0f;
    }
}

// Fills the workspace for all segments from first_segment on: a_t g_t of the segment's first step if nothing came from later
// ones.
template <typename T, class Layout>
__global__ void __launch_bounds__(Layout::kThreads)
    selective_scan_backward_carry_kernel(const ScanBackward q, bool aligned, int64_t first_segment) {
    __shared__ __align__(16) MatrixTile<T, Layout> BC;
    __shared__ __align__(16) float dt_tile[Layout::kChannels * Layout::kRow];
    __shared__ __align__(16) float dy_tile[Layout::kChannels * Layout::kRow];
    __shared__ int resets[Layout::kTile];
    __shared__ float bias[Layout::kChannels];
    MAMBA_DYNAMIC_SHARED(4, float, waiting_w);  // (slices, kStates, kThreads), sliced only

    griddepcontrol_launch_dependents();
    const MambaSelectiveScan& p = q.forward;
    const ScanBlock block = scan_block(p, Layout::kChannels, first_segment);
    const BackwardRows<T, Layout> rows(q, block);
    const MatrixRows<T, Layout> matrix_rows(p, block);
    const LaneOrder<Layout> order(threadIdx.x % 32);
    const int slices = Layout::kSliced ? static_cast<int>(ceil_div(p.dstate, Layout::kSlice)) : 1;
    const int32_t* seq_idx = !Layout::kMamba && p.seq_idx != nullptr ? p.seq_idx + block.batch * p.seqlen : nullptr;
    const bool general = !Layout::kMamba && (!p.variable_C || seq_idx != nullptr);
    if (general && seq_idx == nullptr) {
        clear_resets<Layout>(resets);
    }
    int channel_row[Layout::kEach];
    Chains<Layout> A, w, constant_C;
#pragma unroll
    for (int c = 0; c < Layout::kEach; ++c) {
        channel_row[c] = threadIdx.x / 32 * Layout::kWarpChannels + order.channel(c);
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            w[c][s] = 0.0f;
        }
    }
    if (Layout::kSliced) {
        clear_waiting<Layout>(waiting_w, slices);
    }
    stage_parameter<Layout>(bias, p.delta_bias, block);
    __syncthreads();
    float dt_sum[Layout::kEach] = {};
    bool restarted = false;

    for (int64_t tile = ceil_div(block.end, Layout::kTile) - 1; tile >= block.begin / Layout::kTile; --tile) {
        const int64_t first_step = tile * Layout::kTile;
        const int64_t left = block.end - first_step;
        const int steps = Layout::kWhole || left > Layout::kTile ? Layout::kTile : static_cast<int>(left);
        const bool whole = steps == Layout::kTile && block.channels == Layout::kChannels && p.dstate % Layout::kSlice == 0;
        const bool inside = vectors_within<Layout>(first_step, p.seqlen);
        const int64_t place = place_of<Layout>(p, first_step, Layout::kTile);
        BackwardInputs<T, Layout> in;
        StagedTile<T, Layout> B_staged, C_staged;
        with_access<Layout>(aligned, whole, inside, [&](auto access) {
            in.template fetch<decltype(access)::kAccess>(rows, q, place, steps);
            fetch_BC<decltype(access)::kAccess>(B_staged, C_staged, p, matrix_rows, 0, place, steps, false, true);
        });
        if (is_reverse<Layout>(p)) {
            in.mirror(is_gated<Layout>(p));
        }
        stage_time_and_gradient<T, Layout>(dt_tile, dy_tile, bias, in, rows, p, steps);
        if (first_step > block.begin) {
            prefetch_inputs(rows, q, place_of<Layout>(p, first_step - Layout::kTile, Layout::kTile));
        }
        for (int slice = 0; slice < slices; ++slice) {
            const int first_state = slice * Layout::kSlice;
            stage_matrices<T, Layout, true>(BC, C_staged, B_staged, resets, seq_idx, first_step, p);
            if (Layout::kSliced && slice + 1 < slices) {
                with_access<Layout>(aligned, whole, inside, [&](auto access) {
                    fetch_BC<decltype(access)::kAccess>(B_staged, C_staged, p, matrix_rows, first_state + Layout::kSlice, place,
                                                        steps, false, true);
                });
            }
#pragma unroll
            for (int c = 0; c < Layout::kEach; ++c) {
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    const int n = first_state + order.state(s);
                    const bool exists = Layout::kWhole || (channel_row[c] < block.channels && n < p.dstate);
                    const int64_t parameter = (block.first_channel + channel_row[c]) * p.dstate + n;
                    A[c][s] = exists ? decay_exponent(p.A[parameter]) : 0.0f;
                    constant_C[c][s] =
                        !Layout::kMamba && exists && !p.variable_C ? static_cast<const float*>(p.C)[parameter] : 0.0f;
                    if (Layout::kSliced) {
                        const int chain = (slice * Layout::kEach + c) * Layout::kStates + s;
                        w[c][s] = waiting_w[chain * Layout::kThreads + threadIdx.x];
                    }
                }
            }
            if (general) {
                carry_tile<T, Layout, true>(w, A, constant_C, dt_sum, restarted, dt_tile, dy_tile, BC, order, channel_row,
                                            p.variable_C, resets, slice == 0);
            } else {
                carry_tile<T, Layout, false>(w, A, constant_C, dt_sum, restarted, dt_tile, dy_tile, BC, order, channel_row,
                                             true, resets, slice == 0);
            }
#pragma unroll
            for (int c = 0; c < Layout::kEach; ++c) {
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    const int n = first_state + order.state(s);
                    if (Layout::kSliced) {
                        const int chain = (slice * Layout::kEach + c) * Layout::kStates + s;
                        waiting_w[chain * Layout::kThreads + threadIdx.x] = w[c][s];
                    }
                    if (first_step == block.begin && channel_row[c] < block.channels && n < p.dstate) {
                        const int64_t state = (block.batch * p.dim + block.first_channel + channel_row[c]) * p.dstate + n;
                        const int64_t at = workspace_at(p, block.segment, state);
                        p.workspace[at] = w[c][s];
                        p.workspace[at + p.batch * p.dim * p.dstate] = restarted ? -1.0f : exp2_fast(A[c][s] * dt_sum[c]);
                    }
                }
            }
        }
        __syncwarp();  // the rows have been read before the next tile overwrites them
    }
}

}  // namespace mamba
