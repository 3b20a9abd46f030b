// The CUDA backward scan. scan_tile.cuh explains the layout.
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

#include "selective_scan/backward_tile.cuh"
#include "selective_scan/scan_launch.cuh"

namespace mamba {

// Where the elements of a lane lie in the tensors, in a tile that begins at step 0.
template <typename T, class Layout>
struct BackwardRows {
    const T* u[Layout::kPasses];
    const T* delta[Layout::kPasses];
    const T* dout[Layout::kPasses];
    const T* z[Layout::kPasses];
    bool exists[Layout::kPasses];
    int64_t output[Layout::kPasses];  // offset in du, ddelta and dz
    int64_t channel[Layout::kPasses];
    int tile_row[Layout::kPasses];  // row in the block's tiles
    int step;                       // first step of the lane in a tile
};

template <typename T, class Layout>
__device__ __forceinline__ BackwardRows<T, Layout> backward_rows(const MambaSelectiveScanBackward& q, const ScanBlock& block) {
    const MambaSelectiveScan& p = q.forward;
    const int lane = threadIdx.x % 32;
    BackwardRows<T, Layout> rows;
    rows.step = lane % Layout::kRowLanes * Layout::kVector;
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int row = threadIdx.x / 32 * Layout::kWarpChannels + pass * Layout::kPassRows + lane / Layout::kRowLanes;
        const int64_t channel = block.first_channel + (row < block.channels ? row : 0);
        rows.tile_row[pass] = row;
        rows.channel[pass] = channel;
        rows.exists[pass] = row < block.channels;
        rows.output[pass] = (block.batch * p.dim + channel) * p.seqlen + rows.step;
        rows.u[pass] = static_cast<const T*>(p.u) + block.batch * p.u_batch_stride + channel * p.u_dim_stride + rows.step;
        rows.delta[pass] =
            static_cast<const T*>(p.delta) + block.batch * p.delta_batch_stride + channel * p.delta_dim_stride + rows.step;
        rows.dout[pass] =
            static_cast<const T*>(q.dout) + block.batch * q.dout_batch_stride + channel * q.dout_dim_stride + rows.step;
        rows.z[pass] = static_cast<const T*>(p.z) + block.batch * p.z_batch_stride + channel * p.z_dim_stride + rows.step;
    }
    return rows;
}

// What a lane reads of one tile.
template <typename T, class Layout>
struct BackwardInputs {
    Packed<T, Layout::kVector> u[Layout::kPasses];
    Packed<T, Layout::kVector> delta[Layout::kPasses];
    Packed<T, Layout::kVector> dout[Layout::kPasses];
    Packed<T, Layout::kVector> z[Layout::kPasses];
};

template <typename T, class Layout, bool kAligned>
__device__ __forceinline__ void fetch_inputs(BackwardInputs<T, Layout>& in, const BackwardRows<T, Layout>& rows,
                                             int64_t first_step, int steps, bool with_z) {
    int valid[Layout::kPasses];
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        valid[pass] = rows.exists[pass] ? steps - rows.step : 0;
    }
    fetch_rows<T, Layout, kAligned>(in.u, rows.u, first_step, valid);
    fetch_rows<T, Layout, kAligned>(in.delta, rows.delta, first_step, valid);
    fetch_rows<T, Layout, kAligned>(in.dout, rows.dout, first_step, valid);
    if (with_z) {
        fetch_rows<T, Layout, kAligned>(in.z, rows.z, first_step, valid);
    }
}

// Asks for the whole tile at `first_step` to come into the L2 cache.
template <typename T, class Layout>
__device__ __forceinline__ void prefetch_inputs(const BackwardRows<T, Layout>& rows, int64_t first_step, bool with_z) {
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        if (rows.exists[pass]) {
            prefetch_to_L2(rows.u[pass] + first_step);
            prefetch_to_L2(rows.delta[pass] + first_step);
            prefetch_to_L2(rows.dout[pass] + first_step);
            if (with_z) {
                prefetch_to_L2(rows.z[pass] + first_step);
            }
        }
    }
}

// dt and dy = dout silu(z) of the lane's elements; zero past the end, which leaves state and gradient as they are.
template <typename T, class Layout>
__device__ __forceinline__ void stage_time_and_gradient(float* dt_tile, float* dy_tile, const BackwardInputs<T, Layout>& in,
                                                        const BackwardRows<T, Layout>& rows, const MambaSelectiveScan& p,
                                                        int steps) {
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int at = rows.tile_row[pass] * Layout::kRow + rows.step;
        const float bias = p.delta_bias != nullptr ? p.delta_bias[rows.channel[pass]] : 0.0f;
        float dt[Layout::kVector], dy[Layout::kVector];
        unpack<T, Layout::kVector>(in.delta[pass], dt);
        unpack<T, Layout::kVector>(in.dout[pass], dy);
        time_steps(dt, bias, p.delta_softplus, steps - rows.step);
        if (p.z != nullptr) {
            float z[Layout::kVector];
            unpack<T, Layout::kVector>(in.z[pass], z);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                dy[i] *= silu(z[i]);
            }
        }
        write_row(dt_tile + at, dt);
        write_row(dy_tile + at, dy);
    }
}

// dt * u of the lane's elements.
template <typename T, class Layout>
__device__ __forceinline__ void stage_input(float* x_tile, const float* dt_tile, const BackwardInputs<T, Layout>& in,
                                            const BackwardRows<T, Layout>& rows) {
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int at = rows.tile_row[pass] * Layout::kRow + rows.step;
        float dt[Layout::kVector], x[Layout::kVector];
        read_row(dt, dt_tile + at);
        unpack<T, Layout::kVector>(in.u[pass], x);
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            x[i] *= dt[i];
        }
        write_row(x_tile + at, x);
    }
}

// The gradients of u, delta and z, and out again where it is asked for. The inputs were read again for this: they are in the
// cache, and registers are dear while the states run.
template <typename T, class Layout, class Shared>
__device__ __forceinline__ void store_gradients(const MambaSelectiveScanBackward& q, const Shared& shared,
                                                const BackwardInputs<T, Layout>& in, const BackwardRows<T, Layout>& rows,
                                                const ScanBlock& block, int64_t first_step, int steps, bool aligned,
                                                float (&bias_sum)[Layout::kPasses], float (&D_sum)[Layout::kPasses]) {
    const MambaSelectiveScan& p = q.forward;
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int at = rows.tile_row[pass] * Layout::kRow + rows.step;
        const int valid = rows.exists[pass] ? steps - rows.step : 0;
        const int64_t output = rows.output[pass] + first_step;
        const float bias = p.delta_bias != nullptr ? p.delta_bias[rows.channel[pass]] : 0.0f;
        const float D = p.D != nullptr ? p.D[rows.channel[pass]] : 0.0f;
        float u[Layout::kVector], dt[Layout::kVector], dy[Layout::kVector], Bg[Layout::kVector], Aq[Layout::kVector];
        unpack<T, Layout::kVector>(in.u[pass], u);
        read_row(dt, shared.dt + at);
        read_row(dy, shared.dy + at);
        read_row(Bg, shared.Bg + at);
        read_row(Aq, shared.Aq + at);
        float du[Layout::kVector], ddelta[Layout::kVector];
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            du[i] = fmaf(dt[i], Bg[i], D * dy[i]);
            ddelta[i] = fmaf(u[i], Bg[i], Aq[i] * kLn2);
            D_sum[pass] = fmaf(dy[i], u[i], D_sum[pass]);
        }
        if (p.delta_softplus) {
            float raw[Layout::kVector];
            unpack<T, Layout::kVector>(in.delta[pass], raw);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                ddelta[i] *= sigmoid(raw[i] + bias);
            }
        }
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            bias_sum[pass] += i < valid ? ddelta[i] : 0.0f;
        }
        store_steps<T, Layout::kVector>(static_cast<T*>(q.du) + output, valid, aligned, du);
        store_steps<T, Layout::kVector>(static_cast<T*>(q.ddelta) + output, valid, aligned, ddelta);
        if (p.z == nullptr && p.out == nullptr) {
            continue;
        }
        float y[Layout::kVector];
        read_row(y, shared.y + at);
#pragma unroll
        for (int i = 0; i < Layout::kVector; ++i) {
            y[i] = fmaf(D, u[i], y[i]);
        }
        if (p.z != nullptr) {
            float z[Layout::kVector], dz[Layout::kVector];
            unpack<T, Layout::kVector>(in.z[pass], z);
            unpack<T, Layout::kVector>(in.dout[pass], dz);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                const float gate = sigmoid(z[i]);
                dz[i] *= y[i] * gate * fmaf(z[i], 1.0f - gate, 1.0f);
                y[i] *= z[i] * gate;
            }
            store_steps<T, Layout::kVector>(static_cast<T*>(q.dz) + output, valid, aligned, dz);
        }
        if (p.out != nullptr) {
            T* out = static_cast<T*>(p.out) + block.batch * p.out_batch_stride + rows.channel[pass] * p.out_dim_stride;
            store_steps<T, Layout::kVector>(out + first_step + rows.step, valid, aligned, y);
        }
    }
}

// Fills the workspace for all segments but the first: a_t g_t of the segment's first step if nothing came from later ones.
template <typename T, class Layout, bool kSliced>
__global__ void __launch_bounds__(Layout::kThreads)
    selective_scan_backward_carry_kernel(const MambaSelectiveScanBackward q, bool aligned) {
    __shared__ alignas(16) MatrixTile<T, Layout> BC;
    __shared__ alignas(16) float dt_tile[Layout::kChannels * Layout::kRow];
    __shared__ alignas(16) float dy_tile[Layout::kChannels * Layout::kRow];
    __shared__ int resets[Layout::kTile];
    extern __shared__ float waiting_w[];  // (slices, kStates, kThreads), sliced only

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
            BC.put(B_staged, C_staged);
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
                    Steps4 B, C;
                    BC.read((s * Layout::kLanes + k) * Layout::kRow + step, B, C);
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

// kSliced: dstate is larger than the layout's slice; w then waits in shared memory and dA, dB, dC of constants in their
// outputs between slices.
template <typename T, class Layout, int kSub, int kBlocks, bool kSliced>
__global__ void __launch_bounds__(Layout::kThreads, kBlocks)
    selective_scan_backward_kernel(const MambaSelectiveScanBackward q, bool aligned, bool atomic) {
    using Shared = BackwardShared<T, Layout, kSub>;
    static_assert(Layout::kTile == MAMBA_SCAN_CHECKPOINT, "a tile starts at a checkpoint");
    extern __shared__ float4 raw_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(raw_shared);
    float* waiting_w = reinterpret_cast<float*>(raw_shared) + sizeof(Shared) / sizeof(float);  // (slices, kStates, kThreads)

    const MambaSelectiveScan& p = q.forward;
    const ScanBlock block = scan_block(p, Layout::kChannels, 0);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int64_t seqlen = p.seqlen;
    const int slices = kSliced ? static_cast<int>((p.dstate + Layout::kSlice - 1) / Layout::kSlice) : 1;
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
            float w = 0.0f;
            if (valid) {
                w = q.dlast_state != nullptr ? q.dlast_state[state_row + n] : 0.0f;
                for (int64_t segment = p.segments - 1; segment > block.segment; --segment) {
                    w = pass_through_segment(p, segment, state_row + n, w);
                }
            }
            thread.w[s] = w;
            thread.dA[s] = 0.0f;
            thread.constant_dB[s] = 0.0f;
            thread.constant_dC[s] = 0.0f;
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
        const int subs = (steps + kSub - 1) / kSub;
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
                    if (scan_valid && n < p.dstate) {
                        q.dA[part_row + n] += thread.dA[s];
                        if (!p.variable_B) {
                            q.dB[part_row + n] += thread.constant_dB[s];
                        }
                        if (!p.variable_C) {
                            q.dC[part_row + n] += thread.constant_dC[s];
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

// The layouts, one for each range of dstate. Those above 32 states work through slices of 32. Backward32Small is for GPUs with
// less shared memory a block than kBackwardShared (compute capability 7.5).
using Backward8 = ScanLayout<4, 2, MAMBA_SCAN_CHECKPOINT, 4>;
using Backward16 = ScanLayout<8, 2, MAMBA_SCAN_CHECKPOINT, 4>;
using Backward32 = ScanLayout<8, 4, MAMBA_SCAN_CHECKPOINT, 4>;
using Backward32Small = ScanLayout<8, 4, MAMBA_SCAN_CHECKPOINT, 2>;

template <typename T, class Layout, int kSub, int kBlocks, bool kSliced>
cudaError_t launch_backward_layout(const MambaSelectiveScanBackward& q, bool aligned) {
    const MambaSelectiveScan& p = q.forward;
    const auto kernel = selective_scan_backward_kernel<T, Layout, kSub, kBlocks, kSliced>;
    size_t shared_bytes = sizeof(BackwardShared<T, Layout, kSub>);
    if (kSliced) {
        const int64_t slices = (p.dstate + Layout::kSlice - 1) / Layout::kSlice;
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
    const cudaStream_t stream = static_cast<cudaStream_t>(p.run.stream);
    if (p.segments > 1) {
        const int64_t slices = ceil_div(p.dstate, Layout::kSlice);
        const size_t waiting_bytes =
            kSliced ? static_cast<size_t>(slices) * Layout::kStates * Layout::kThreads * sizeof(float) : 0;
        const unsigned int blocks = static_cast<unsigned int>(scan_grid(p, Layout::kChannels, p.segments - 1));
        selective_scan_backward_carry_kernel<T, Layout, kSliced>
            <<<blocks, Layout::kThreads, waiting_bytes, stream>>>(q, aligned);
    }
    const bool atomic = q.slots == 1 && p.dim / p.ngroups > Layout::kChannels;
    kernel<<<static_cast<unsigned int>(scan_grid(p, Layout::kChannels, p.segments)), Layout::kThreads, shared_bytes, stream>>>(
        q, aligned, atomic);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch_selective_scan_backward(const MambaSelectiveScanBackward& q, bool aligned, bool small) {
    const int64_t dstate = q.forward.dstate;
    if (dstate <= Backward8::kSlice) {
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
