// The CUDA backward scan. scan_tile.cuh explains the layout.
//
// A block walks the length backwards in tiles of MAMBA_SCAN_CHECKPOINT steps. From the checkpoint before a tile it runs the
// states forward once, keeping one every kSub steps; then, sub-tile by sub-tile from the end, it runs kSub steps forward again
// with states and decays in registers, and back over them:
//   g_t = C_t dy_t + a_{t+1} g_{t+1}          the gradient of h_t
//   du_t = dt_t sum_n(B g) + D dy_t           ddt_t = sum_n(A a_t h_{t-1} g) + u_t sum_n(B g)
//   dB_t = sum_d(dt u g)    dC_t = sum_d(dy h)    dA = sum_t(dt a_t h_{t-1} g)
// with a_t = exp(dt_t A) and dy = dout silu(z).
#pragma once

#include "selective_scan/scan_launch.cuh"
#include "selective_scan/scan_tile.cuh"

namespace mamba {

// Shared memory of one block, in floats. Rows are Layout::kRow long, those of the sums over channels kSumRow.
template <class Layout, int kSub_>
struct BackwardShared {
    static constexpr int kSub = kSub_;
    static constexpr int kSubs = Layout::kTile / kSub;
    static constexpr int kSumRow = kSub + 4;
    float B[Layout::kSlice * Layout::kRow];
    float C[Layout::kSlice * Layout::kRow];
    float dt[Layout::kChannels * Layout::kRow];
    float x[Layout::kChannels * Layout::kRow];                      // dt * u
    float dy[Layout::kChannels * Layout::kRow];                     // dout * silu(z)
    float y[Layout::kChannels * Layout::kRow];                      // sum_n C h
    float Bg[Layout::kChannels * Layout::kRow];                     // sum_n B g
    float Aq[Layout::kChannels * Layout::kRow];                     // sum_n A a h g, A times log2(e)
    float h_sub[(kSubs - 1) * Layout::kStates * Layout::kThreads];  // states before each sub-tile but the first
    float dB[Layout::kWarps * Layout::kSlice * kSumRow];            // each warp's sum over its channels
    float dC[Layout::kWarps * Layout::kSlice * kSumRow];
    int resets[Layout::kTile];
};

template <class Layout>
struct BackwardThread {
    float A[Layout::kStates];  // times log2(e)
    float w[Layout::kStates];  // a_{t+1} g_{t+1}
    float dA[Layout::kStates];
    float constant_B[Layout::kStates];  // where B, C do not vary over time
    float constant_C[Layout::kStates];
    float constant_dB[Layout::kStates];
    float constant_dC[Layout::kStates];
};

// Sums four steps' values over the warp's channels and stores them in row[0..3].
template <class Layout>
__device__ __forceinline__ void store_sum_over_channels(float* row, const float (&v)[4], int lane) {
    if constexpr (Layout::kWarpChannels == 1) {
        *reinterpret_cast<float4*>(row) = make_float4(v[0], v[1], v[2], v[3]);
    } else if constexpr (Layout::kWarpChannels == 2) {
        const bool high = (lane & 16) != 0;
        const float first = (high ? v[2] : v[0]) + __shfl_xor_sync(0xffffffffu, high ? v[0] : v[2], 16);
        const float second = (high ? v[3] : v[1]) + __shfl_xor_sync(0xffffffffu, high ? v[1] : v[3], 16);
        *reinterpret_cast<float2*>(row + (high ? 2 : 0)) = make_float2(first, second);
    } else {
        float sum = transpose_sum4<Layout::kLanes>(v, lane);
#pragma unroll
        for (int bit = 4 * Layout::kLanes; bit < 32; bit *= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, bit);
        }
        if (lane < 4 * Layout::kLanes) {
            row[lane / Layout::kLanes] = sum;
        }
    }
}

// Runs the states forward through one sub-tile. kGeneral as in forward_tile.
template <class Layout, class Shared, bool kGeneral>
__device__ __forceinline__ void advance_sub_tile(const BackwardThread<Layout>& thread, float (&h)[Layout::kStates],
                                                 const Shared& shared, int scan_row, int first, bool variable_B) {
    const int k = threadIdx.x % Layout::kLanes;
#pragma unroll
    for (int step = first; step < first + Shared::kSub; step += 4) {
        const Steps4 dt = read4(shared.dt + scan_row * Layout::kRow + step);
        const Steps4 x = read4(shared.x + scan_row * Layout::kRow + step);
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const Steps4 B = !kGeneral || variable_B ? read4(shared.B + (s * Layout::kLanes + k) * Layout::kRow + step)
                                                     : same4(thread.constant_B[s]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (kGeneral) {
                    h[s] = shared.resets[step + j] ? 0.0f : h[s];
                }
                h[s] = fmaf(exp2_fast(dt.at[j] * thread.A[s]), h[s], x.at[j] * B.at[j]);
            }
        }
    }
}

// One sub-tile, forward then backward. kGeneral as in forward_tile.
template <class Layout, class Shared, bool kGeneral>
__device__ __forceinline__ void backward_sub_tile(BackwardThread<Layout>& thread, float (&h_start)[Layout::kStates],
                                                  Shared& shared, int scan_row, int first, bool variable_B, bool variable_C,
                                                  bool need_y, bool add) {
    constexpr int kSub = Shared::kSub;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int k = lane % Layout::kLanes;
    const int own = scan_row * Layout::kRow + first;
    const int* resets = shared.resets + first;
    float h[Layout::kStates][kSub];
    float a[Layout::kStates][kSub];

#pragma unroll
    for (int step = 0; step < kSub; step += 4) {
        const Steps4 dt = read4(shared.dt + own + step);
        const Steps4 x = read4(shared.x + own + step);
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const int row = (s * Layout::kLanes + k) * Layout::kRow + first + step;
            const Steps4 B = !kGeneral || variable_B ? read4(shared.B + row) : same4(thread.constant_B[s]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int t = step + j;
                float before = t == 0 ? h_start[s] : h[s][t == 0 ? 0 : t - 1];
                if (kGeneral) {
                    before = resets[t] ? 0.0f : before;
                }
                a[s][t] = exp2_fast(dt.at[j] * thread.A[s]);
                h[s][t] = fmaf(a[s][t], before, x.at[j] * B.at[j]);
            }
        }
        if (need_y) {
            float y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                const int row = (s * Layout::kLanes + k) * Layout::kRow + first + step;
                const Steps4 C = !kGeneral || variable_C ? read4(shared.C + row) : same4(thread.constant_C[s]);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    y[j] = fmaf(C.at[j], h[s][step + j], y[j]);
                }
            }
            const float sum = sum_over_states<Layout::kLanes>(y, lane);
            if (k < 4) {
                float* to = shared.y + own + step + k;
                *to = add ? *to + sum : sum;
            }
        }
    }

#pragma unroll
    for (int step = kSub - 4; step >= 0; step -= 4) {
        const Steps4 dt = read4(shared.dt + own + step);
        const Steps4 x = read4(shared.x + own + step);
        const Steps4 dy = read4(shared.dy + own + step);
        float Bg[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float Aq[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const int n = s * Layout::kLanes + k;
            const int row = n * Layout::kRow + first + step;
            const Steps4 B = !kGeneral || variable_B ? read4(shared.B + row) : same4(thread.constant_B[s]);
            const Steps4 C = !kGeneral || variable_C ? read4(shared.C + row) : same4(thread.constant_C[s]);
            float dB[4], dC[4];
#pragma unroll
            for (int j = 3; j >= 0; --j) {
                const int t = step + j;
                const float before = t == 0 ? h_start[s] : h[s][t == 0 ? 0 : t - 1];
                const float g = fmaf(C.at[j], dy.at[j], thread.w[s]);
                Bg[j] = fmaf(B.at[j], g, Bg[j]);
                float w = a[s][t] * g;
                float q = w * before;
                if (kGeneral) {
                    w = resets[t] ? 0.0f : w;
                    q = resets[t] ? 0.0f : q;
                }
                thread.w[s] = w;
                Aq[j] = fmaf(thread.A[s], q, Aq[j]);
                thread.dA[s] = fmaf(dt.at[j], q, thread.dA[s]);
                dB[j] = x.at[j] * g;
                dC[j] = dy.at[j] * h[s][t];
            }
            const int sums = (warp * Layout::kSlice + n) * Shared::kSumRow + step;
            if (!kGeneral || variable_B) {
                store_sum_over_channels<Layout>(shared.dB + sums, dB, lane);
            } else {
                thread.constant_dB[s] += (dB[0] + dB[1]) + (dB[2] + dB[3]);
            }
            if (!kGeneral || variable_C) {
                store_sum_over_channels<Layout>(shared.dC + sums, dC, lane);
            } else {
                thread.constant_dC[s] += (dC[0] + dC[1]) + (dC[2] + dC[3]);
            }
        }
        const float sum_Bg = sum_over_states<Layout::kLanes>(Bg, lane);
        const float sum_Aq = sum_over_states<Layout::kLanes>(Aq, lane);
        if (k < 4) {
            float* to_Bg = shared.Bg + own + step + k;
            float* to_Aq = shared.Aq + own + step + k;
            *to_Bg = add ? *to_Bg + sum_Bg : sum_Bg;
            *to_Aq = add ? *to_Aq + sum_Aq : sum_Aq;
        }
    }
}

// Adds the warps' sums of one sub-tile and hands them to global memory: row n of `out` starts at out + n * seqlen.
template <class Layout, class Shared>
__device__ __forceinline__ void flush_sums(const float* sums, float* out, int states, int64_t first_step, int64_t seqlen,
                                           bool atomic) {
    for (int item = threadIdx.x; item < Layout::kSlice * Shared::kSub; item += Layout::kThreads) {
        const int n = item / Shared::kSub;
        const int step = item % Shared::kSub;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < Layout::kWarps; ++warp) {
            sum += sums[(warp * Layout::kSlice + n) * Shared::kSumRow + step];
        }
        if (n < states && first_step + step < seqlen) {
            float* to = out + n * seqlen + first_step + step;
            if (atomic) {
                atomicAdd(to, sum);
            } else {
                *to = sum;
            }
        }
    }
}

// kSliced: dstate is larger than the layout's slice; w then waits in shared memory and dA, dB, dC of constants in their
// outputs between slices.
template <typename T, class Layout, int kSub, bool kSliced>
__global__ void __launch_bounds__(Layout::kThreads)
    selective_scan_backward_kernel(const MambaSelectiveScanBackward q, bool aligned_rows, bool aligned_BC, bool atomic) {
    using Shared = BackwardShared<Layout, kSub>;
    static_assert(Layout::kTile == MAMBA_SCAN_CHECKPOINT, "a tile starts at a checkpoint");
    extern __shared__ float4 raw_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(raw_shared);
    float* waiting_w = reinterpret_cast<float*>(raw_shared) + sizeof(Shared) / sizeof(float);  // (slices, kStates, kThreads)

    const MambaSelectiveScan& p = q.forward;
    const ScanBlock block = scan_block(p, Layout::kChannels);
    const int lane = threadIdx.x % 32;
    const int warp_row = threadIdx.x / 32 * Layout::kWarpChannels;
    const int64_t seqlen = p.seqlen;
    const int slices = kSliced ? static_cast<int>((p.dstate + Layout::kSlice - 1) / Layout::kSlice) : 1;
    const bool need_y = p.z != nullptr || p.out != nullptr;

    const int scan_row = warp_row + lane / Layout::kLanes;
    const int k = lane % Layout::kLanes;
    const bool scan_valid = scan_row < block.channels;
    const int64_t scan_channel = block.first_channel + (scan_valid ? scan_row : 0);
    const int64_t state_row = (block.batch * p.dim + scan_channel) * p.dstate;
    BackwardThread<Layout> thread;

    const int element_step = lane % Layout::kRowLanes * Layout::kVector;
    float bias_sum[Layout::kPasses];
    float D_sum[Layout::kPasses];
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        bias_sum[pass] = 0.0f;
        D_sum[pass] = 0.0f;
    }
    const T* B_base = static_cast<const T*>(p.B) + block.batch * p.B_batch_stride + block.group * p.B_group_stride;
    const T* C_base = static_cast<const T*>(p.C) + block.batch * p.C_batch_stride + block.group * p.C_group_stride;
    const int64_t sum_slot = q.slots > 1 ? block.index : 0;
    const int64_t sum_base = ((sum_slot * p.batch + block.batch) * p.ngroups + block.group) * p.dstate * seqlen;
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
            if (kSliced) {
                waiting_w[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x] = thread.w[s];
                if (valid) {
                    q.dA[state_row + n] = 0.0f;
                    if (!p.variable_B) {
                        q.dB[state_row + n] = 0.0f;
                    }
                    if (!p.variable_C) {
                        q.dC[state_row + n] = 0.0f;
                    }
                }
            }
        }
    }

    const int64_t checkpoints = seqlen > 0 ? (seqlen - 1) / MAMBA_SCAN_CHECKPOINT : 0;
    for (int64_t tile = seqlen > 0 ? checkpoints : -1; tile >= 0; --tile) {
        const int64_t first_step = tile * Layout::kTile;
        const int64_t left = seqlen - first_step;
        const int subs = left < Layout::kTile ? static_cast<int>((left + kSub - 1) / kSub) : Shared::kSubs;

        // dt, dt * u and dy of the warp's own rows; zero past the end, which leaves state and gradient as they are.
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            const int row = warp_row + pass * Layout::kPassRows + lane / Layout::kRowLanes;
            const int64_t channel = block.first_channel + (row < block.channels ? row : 0);
            const int64_t length = row < block.channels ? seqlen : 0;
            const int64_t step = first_step + element_step;
            const auto u = load_steps<T, Layout::kVector>(
                static_cast<const T*>(p.u) + block.batch * p.u_batch_stride + channel * p.u_dim_stride, step, length,
                aligned_rows);
            const auto delta = load_steps<T, Layout::kVector>(
                static_cast<const T*>(p.delta) + block.batch * p.delta_batch_stride + channel * p.delta_dim_stride, step,
                length, aligned_rows);
            const auto dout = load_steps<T, Layout::kVector>(
                static_cast<const T*>(q.dout) + block.batch * q.dout_batch_stride + channel * q.dout_dim_stride, step, length,
                aligned_rows);
            Packed<T, Layout::kVector> z;
            if (p.z != nullptr) {
                z = load_steps<T, Layout::kVector>(
                    static_cast<const T*>(p.z) + block.batch * p.z_batch_stride + channel * p.z_dim_stride, step, length,
                    aligned_rows);
            }
            const float bias = p.delta_bias != nullptr ? p.delta_bias[channel] : 0.0f;
            const int at = row * Layout::kRow + element_step;
            float dt[Layout::kVector], x[Layout::kVector], dy[Layout::kVector];
            unpack<T, Layout::kVector>(delta, dt);
            unpack<T, Layout::kVector>(u, x);
            unpack<T, Layout::kVector>(dout, dy);
            time_steps(dt, bias, p.delta_softplus, seqlen - step);
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                x[i] *= dt[i];
            }
            if (p.z != nullptr) {
                float gate[Layout::kVector];
                unpack<T, Layout::kVector>(z, gate);
#pragma unroll
                for (int i = 0; i < Layout::kVector; ++i) {
                    dy[i] *= silu(gate[i]);
                }
            }
            write_row(shared.dt + at, dt);
            write_row(shared.x + at, x);
            write_row(shared.dy + at, dy);
        }

        for (int slice = 0; slice < slices; ++slice) {
            const int first_state = slice * Layout::kSlice;
            const int states =
                static_cast<int>(p.dstate - first_state < Layout::kSlice ? p.dstate - first_state : Layout::kSlice);
            __syncthreads();  // the readers of B and C are done
            StagedTile<T, Layout> staged;
            if (p.variable_B) {
                staged.fetch(B_base, p.B_dstate_stride, first_state, p.dstate, first_step, seqlen, aligned_BC);
                staged.put(shared.B);
            }
            if (p.variable_C) {
                staged.fetch(C_base, p.C_dstate_stride, first_state, p.dstate, first_step, seqlen, aligned_BC);
                staged.put(shared.C);
            }
            if (seq_idx != nullptr) {
                stage_resets(shared.resets, Layout::kTile, seq_idx, first_step, seqlen);
            }
            float h[Layout::kStates];
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                const int n = first_state + s * Layout::kLanes + k;
                const bool valid = scan_valid && n < p.dstate;
                const int64_t parameter = scan_channel * p.dstate + n;
                thread.A[s] = valid ? p.A[parameter] * kLog2e : 0.0f;
                thread.constant_B[s] = valid && !p.variable_B ? static_cast<const float*>(p.B)[parameter] : 0.0f;
                thread.constant_C[s] = valid && !p.variable_C ? static_cast<const float*>(p.C)[parameter] : 0.0f;
                if (kSliced) {
                    thread.w[s] = waiting_w[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x];
                }
                const float* from = p.initial_state != nullptr ? p.initial_state + state_row : nullptr;
                if (tile > 0) {
                    from = p.checkpoints + ((block.batch * checkpoints + tile - 1) * p.dim + scan_channel) * p.dstate;
                }
                h[s] = valid && from != nullptr ? from[n] : 0.0f;
            }
            __syncthreads();

            // The state before each sub-tile: h_sub holds those of sub-tiles 1, 2, ...; h_start that of sub-tile 0.
            float h_start[Layout::kStates];
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                h_start[s] = h[s];
            }
            for (int sub = 0; sub < subs - 1; ++sub) {
                if (general) {
                    advance_sub_tile<Layout, Shared, true>(thread, h, shared, scan_row, sub * kSub, p.variable_B);
                } else {
                    advance_sub_tile<Layout, Shared, false>(thread, h, shared, scan_row, sub * kSub, true);
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
                if (general) {
                    backward_sub_tile<Layout, Shared, true>(thread, h, shared, scan_row, sub * kSub, p.variable_B, p.variable_C,
                                                            need_y, slice > 0);
                } else {
                    backward_sub_tile<Layout, Shared, false>(thread, h, shared, scan_row, sub * kSub, true, true, need_y,
                                                             slice > 0);
                }
                __syncthreads();
                const int64_t sub_step = first_step + sub * kSub;
                if (p.variable_B) {
                    flush_sums<Layout, Shared>(shared.dB, q.dB + sum_base + first_state * seqlen, states, sub_step, seqlen,
                                               atomic);
                }
                if (p.variable_C) {
                    flush_sums<Layout, Shared>(shared.dC, q.dC + sum_base + first_state * seqlen, states, sub_step, seqlen,
                                               atomic);
                }
                __syncthreads();
            }

            if (kSliced) {
#pragma unroll
                for (int s = 0; s < Layout::kStates; ++s) {
                    const int n = first_state + s * Layout::kLanes + k;
                    waiting_w[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x] = thread.w[s];
                    if (scan_valid && n < p.dstate) {
                        q.dA[state_row + n] += thread.dA[s];
                        if (!p.variable_B) {
                            q.dB[state_row + n] += thread.constant_dB[s];
                        }
                        if (!p.variable_C) {
                            q.dC[state_row + n] += thread.constant_dC[s];
                        }
                    }
                    thread.dA[s] = 0.0f;
                    thread.constant_dB[s] = 0.0f;
                    thread.constant_dC[s] = 0.0f;
                }
            }
        }

        // Element-wise gradients. The inputs are read again: they are in the cache, and registers are dear above.
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            const int row = warp_row + pass * Layout::kPassRows + lane / Layout::kRowLanes;
            const int64_t channel = block.first_channel + (row < block.channels ? row : 0);
            const int64_t length = row < block.channels ? seqlen : 0;
            const int64_t step = first_step + element_step;
            const int64_t output_row = (block.batch * p.dim + channel) * seqlen;
            const auto u = load_steps<T, Layout::kVector>(
                static_cast<const T*>(p.u) + block.batch * p.u_batch_stride + channel * p.u_dim_stride, step, length,
                aligned_rows);
            const auto delta = load_steps<T, Layout::kVector>(
                static_cast<const T*>(p.delta) + block.batch * p.delta_batch_stride + channel * p.delta_dim_stride, step,
                length, aligned_rows);
            const float bias = p.delta_bias != nullptr ? p.delta_bias[channel] : 0.0f;
            const float D = p.D != nullptr ? p.D[channel] : 0.0f;
            const int at = row * Layout::kRow + element_step;
            float u_value[Layout::kVector], dt[Layout::kVector], dy[Layout::kVector], Bg[Layout::kVector], Aq[Layout::kVector];
            unpack<T, Layout::kVector>(u, u_value);
            read_row(dt, shared.dt + at);
            read_row(dy, shared.dy + at);
            read_row(Bg, shared.Bg + at);
            read_row(Aq, shared.Aq + at);
            float du[Layout::kVector], ddelta[Layout::kVector];
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                du[i] = fmaf(dt[i], Bg[i], D * dy[i]);
                D_sum[pass] = fmaf(dy[i], u_value[i], D_sum[pass]);
                ddelta[i] = fmaf(u_value[i], Bg[i], Aq[i] * kLn2);
            }
            if (p.delta_softplus) {
                float raw[Layout::kVector];
                unpack<T, Layout::kVector>(delta, raw);
#pragma unroll
                for (int i = 0; i < Layout::kVector; ++i) {
                    ddelta[i] *= sigmoid(raw[i] + bias);
                }
            }
#pragma unroll
            for (int i = 0; i < Layout::kVector; ++i) {
                bias_sum[pass] += step + i < length ? ddelta[i] : 0.0f;
            }
            store_steps<T, Layout::kVector>(static_cast<T*>(q.du) + output_row, step, length, aligned_rows, du);
            store_steps<T, Layout::kVector>(static_cast<T*>(q.ddelta) + output_row, step, length, aligned_rows, ddelta);
            if (need_y) {
                float y[Layout::kVector];
                read_row(y, shared.y + at);
#pragma unroll
                for (int i = 0; i < Layout::kVector; ++i) {
                    y[i] = fmaf(D, u_value[i], y[i]);
                }
                if (p.z != nullptr) {
                    float z[Layout::kVector], dz[Layout::kVector];
                    unpack<T, Layout::kVector>(
                        load_steps<T, Layout::kVector>(
                            static_cast<const T*>(p.z) + block.batch * p.z_batch_stride + channel * p.z_dim_stride, step,
                            length, aligned_rows),
                        z);
                    unpack<T, Layout::kVector>(
                        load_steps<T, Layout::kVector>(
                            static_cast<const T*>(q.dout) + block.batch * q.dout_batch_stride + channel * q.dout_dim_stride,
                            step, length, aligned_rows),
                        dz);
#pragma unroll
                    for (int i = 0; i < Layout::kVector; ++i) {
                        const float gate = sigmoid(z[i]);
                        dz[i] *= y[i] * gate * fmaf(z[i], 1.0f - gate, 1.0f);
                        y[i] *= z[i] * gate;
                    }
                    store_steps<T, Layout::kVector>(static_cast<T*>(q.dz) + output_row, step, length, aligned_rows, dz);
                }
                if (p.out != nullptr) {
                    T* out_row = static_cast<T*>(p.out) + block.batch * p.out_batch_stride + channel * p.out_dim_stride;
                    store_steps<T, Layout::kVector>(out_row, step, length, aligned_rows, y);
                }
            }
        }
        __syncwarp();  // the rows are read before the next tile overwrites them
    }

    for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const int n = slice * Layout::kSlice + s * Layout::kLanes + k;
            if (!scan_valid || n >= p.dstate) {
                continue;
            }
            if (q.dinitial_state != nullptr) {
                const float w =
                    kSliced ? waiting_w[(slice * Layout::kStates + s) * Layout::kThreads + threadIdx.x] : thread.w[s];
                q.dinitial_state[state_row + n] = w;
            }
            if (!kSliced) {
                q.dA[state_row + n] = thread.dA[s];
                if (!p.variable_B) {
                    q.dB[state_row + n] = thread.constant_dB[s];
                }
                if (!p.variable_C) {
                    q.dC[state_row + n] = thread.constant_dC[s];
                }
            }
        }
    }
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        const int row = warp_row + pass * Layout::kPassRows + lane / Layout::kRowLanes;
#pragma unroll
        for (int bit = Layout::kRowLanes / 2; bit > 0; bit /= 2) {
            bias_sum[pass] += __shfl_xor_sync(0xffffffffu, bias_sum[pass], bit);
            D_sum[pass] += __shfl_xor_sync(0xffffffffu, D_sum[pass], bit);
        }
        if (lane % Layout::kRowLanes == 0 && row < block.channels) {
            const int64_t at = block.batch * p.dim + block.first_channel + row;
            if (q.ddelta_bias != nullptr) {
                q.ddelta_bias[at] = bias_sum[pass];
            }
            if (q.dD != nullptr) {
                q.dD[at] = D_sum[pass];
            }
        }
    }
}

// The layouts, one for each range of dstate. Those above 32 states work through slices of 32.
using Backward8 = ScanLayout<4, 2, MAMBA_SCAN_CHECKPOINT, 4>;
using Backward16 = ScanLayout<8, 2, MAMBA_SCAN_CHECKPOINT, 4>;
using Backward32 = ScanLayout<16, 2, MAMBA_SCAN_CHECKPOINT, 4>;

template <typename T, class Layout, int kSub, bool kSliced>
cudaError_t launch_backward_layout(const MambaSelectiveScanBackward& q, bool aligned_rows, bool aligned_BC) {
    const MambaSelectiveScan& p = q.forward;
    const auto kernel = selective_scan_backward_kernel<T, Layout, kSub, kSliced>;
    size_t shared_bytes = sizeof(BackwardShared<Layout, kSub>);
    if (kSliced) {
        const int64_t slices = (p.dstate + Layout::kSlice - 1) / Layout::kSlice;
        shared_bytes += static_cast<size_t>(slices) * Layout::kStates * Layout::kThreads * sizeof(float);
    }
    if (shared_bytes > 48 * 1024) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
        if (error != cudaSuccess) {
            return error;
        }
    }
    const int64_t grid = scan_grid(p, Layout::kChannels);
    const bool atomic = q.slots == 1 && grid > p.batch * p.ngroups;
    kernel<<<static_cast<unsigned int>(grid), Layout::kThreads, shared_bytes, static_cast<cudaStream_t>(p.run.stream)>>>(
        q, aligned_rows, aligned_BC, atomic);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch_selective_scan_backward(const MambaSelectiveScanBackward& q, bool aligned_rows, bool aligned_BC) {
    const int64_t dstate = q.forward.dstate;
    if (dstate <= Backward8::kSlice) {
        return launch_backward_layout<T, Backward8, 16, false>(q, aligned_rows, aligned_BC);
    }
    if (dstate <= Backward16::kSlice) {
        return launch_backward_layout<T, Backward16, 16, false>(q, aligned_rows, aligned_BC);
    }
    if (dstate <= Backward32::kSlice) {
        return launch_backward_layout<T, Backward32, 8, false>(q, aligned_rows, aligned_BC);
    }
    return launch_backward_layout<T, Backward32, 8, true>(q, aligned_rows, aligned_BC);
}

}  // namespace mamba
