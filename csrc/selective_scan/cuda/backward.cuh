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

#include "common/kernel_launch.cuh"
#include "selective_scan/cuda/backward_carry.cuh"
#include "selective_scan/cuda/backward_chains.cuh"
#include "selective_scan/cuda/backward_elements.cuh"
#include "selective_scan/cuda/backward_tile.cuh"
#include "selective_scan/cuda/few_states_backward.cuh"
#include "selective_scan/launch.h"

namespace mamba {

// All sub-tiles of one tile and slice. h: the states before the tile. offset: of the slice's first state and the tile's first
// step in dB and dC.
template <class Layout, class Shared, bool kGeneral>
__device__ __forceinline__ void backward_tile(const ScanBackward& q, BackwardThread<Layout>& thread, Chains<Layout>& h,
                                              Shared& shared, BackwardConstants<Layout>& constants,
                                              const SumFlush<Layout, Shared>& flush, int64_t offset, int states, int steps,
                                              bool need_y, bool add, bool atomic) {
    constexpr int kSub = Shared::kSub;
    const int subs = (steps + kSub - 1) / kSub;  // see forward.cuh: not by ceil_div
    float* const h_sub = shared.h_sub + threadIdx.x;
    const auto keep = [&](int sub) {
#pragma unroll
        for (int c = 0; c < Layout::kEach; ++c) {
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                h_sub[(sub * Shared::kChains + c * Layout::kStates + s) * Layout::kThreads] = h[c][s];
            }
        }
    };
    const auto take = [&](int sub) {
#pragma unroll
        for (int c = 0; c < Layout::kEach; ++c) {
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
                h[c][s] = h_sub[(sub * Shared::kChains + c * Layout::kStates + s) * Layout::kThreads];
            }
        }
    };
    for (int sub = 0; sub < subs - 1; ++sub) {
        keep(sub);
        advance_sub_tile<Layout, Shared, kGeneral>(thread, h, shared, constants, sub * kSub);
    }
    for (int sub = subs - 1; sub >= 0; --sub) {
        if (sub < subs - 1) {
            take(sub);
        }
        const int buffer = sub % 2 * Shared::kSums;
        backward_sub_tile<Layout, Shared, kGeneral>(thread, h, shared, constants, buffer, sub * kSub, need_y, add);
        __syncthreads();
        const int sub_steps = steps - sub * kSub;
        const int64_t sub_offset = is_reverse<Layout>(q.forward) ? offset - sub * kSub : offset + sub * kSub;
        if (!kGeneral || constants.variable_B) {
            flush(shared.dB + buffer, q.parts.dB + sub_offset, states, sub_steps, q.forward.seqlen, atomic);
        }
        if (!kGeneral || constants.variable_C) {
            flush(shared.dC + buffer, q.parts.dC + sub_offset, states, sub_steps, q.forward.seqlen, atomic);
        }
    }
}

template <class Layout, class Shared>
__device__ __forceinline__ void clear_channel_sums(Shared& shared) {
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        shared.bias_sum[pass][threadIdx.x] = 0.0f;
        shared.D_sum[pass][threadIdx.x] = 0.0f;
    }
}

// The gradients of delta_bias and D: the lanes' sums of each row.
template <typename T, class Layout, class Shared>
__device__ __forceinline__ void store_channel_sums(const ScanBackward& q, const Shared& shared,
                                                   const BackwardRows<T, Layout>& rows, int64_t part) {
#pragma unroll
    for (int pass = 0; pass < Layout::kPasses; ++pass) {
        float bias_sum = shared.bias_sum[pass][threadIdx.x];
        float D_sum = shared.D_sum[pass][threadIdx.x];
#pragma unroll
        for (int bit = Layout::kRowLanes / 2; bit > 0; bit /= 2) {
            bias_sum += __shfl_xor_sync(0xffffffffu, bias_sum, bit);
            D_sum += __shfl_xor_sync(0xffffffffu, D_sum, bit);
        }
        if (rows.step == 0 && rows.exists[pass]) {
            const int64_t at = part * q.forward.dim + rows.channel(pass);
            if (q.parts.ddelta_bias != nullptr) {
                q.parts.ddelta_bias[at] = bias_sum;
            }
            if (q.parts.dD != nullptr) {
                q.parts.dD[at] = D_sum;
            }
        }
    }
}

// The states before the tile before this one, to the L2 cache.
template <class Layout>
__device__ __forceinline__ void prefetch_states(const float* from, int64_t count) {
    constexpr int kLine = 8;  // floats that one prefetch brings
    for (int i = threadIdx.x * kLine; i < count; i += Layout::kThreads * kLine) {
        prefetch_to_L2(from + i);
    }
}

// dt, dt * u and dy of a tile, from inputs that are in the order of memory; the next tile to the L2 cache.
template <typename T, class Layout, class Shared>
__device__ __forceinline__ void stage_inputs(Shared& shared, BackwardInputs<T, Layout>& in, const BackwardRows<T, Layout>& rows,
                                             const ScanBackward& q, const ScanBlock& block, int64_t first_step, int64_t place,
                                             int steps) {
    const MambaSelectiveScan& p = q.forward;
    if (is_reverse<Layout>(p)) {
        in.mirror(is_gated<Layout>(p));
    }
    stage_time_and_gradient<T, Layout>(shared.dt, shared.dy, shared.bias, in, rows, p, steps);
    stage_input<T, Layout>(shared.x, shared.dt, in, rows);
    if (first_step > block.begin) {
        prefetch_inputs(rows, q, place_of<Layout>(p, first_step - Layout::kTile, Layout::kTile));
    }
    if (adds<Layout>(p) && rows.step + Layout::kVector <= steps) {
        prefetch_sums(rows, q, block, place);
    }
}

// A slice of a tile. general: B or C is constant, or the state may restart; first_part: of the gradients of constants.
template <class Layout, class Shared>
__device__ __forceinline__ void run_slice(const ScanBackward& q, BackwardThread<Layout>& thread, Chains<Layout>& h,
                                          Shared& shared, const SumFlush<Layout, Shared>& flush, const ScanBlock& block,
                                          const LaneOrder<Layout>& order, int slice, int64_t first_parameter,
                                          int64_t first_part, int64_t offset, int states, int steps, bool general, bool need_y,
                                          bool atomic) {
    BackwardConstants<Layout> constants;
    if (general) {
        load_constants(constants, q.forward, block, order, slice, first_parameter);
        backward_tile<Layout, Shared, true>(q, thread, h, shared, constants, flush, offset, states, steps, need_y, slice > 0,
                                            atomic);
        add_constants(q, constants, block, order, slice, first_part);
    } else {
        backward_tile<Layout, Shared, false>(q, thread, h, shared, constants, flush, offset, states, steps, need_y, slice > 0,
                                             atomic);
    }
}

// Of a sliced layout w waits in shared memory and dA in its output between slices. dB and dC of constants are added up in their
// outputs.
template <typename T, class Layout>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kBlocks)
    selective_scan_backward_kernel(const ScanBackward q, bool aligned, bool atomic) {
    using Shared = BackwardShared<T, Layout>;
    static_assert(Layout::kTile == MAMBA_SCAN_CHECKPOINT, "a tile starts at a checkpoint");
    MAMBA_DYNAMIC_SHARED(16, float4, raw_shared);
    Shared& shared = *reinterpret_cast<Shared*>(raw_shared);
    float* waiting_w = reinterpret_cast<float*>(raw_shared) + sizeof(Shared) / sizeof(float);  // (slices, kChains, kThreads)

    const MambaSelectiveScan& p = q.forward;
    const ScanBlock block = scan_block(p, Layout::kChannels, 0);
    const LaneOrder<Layout> order(threadIdx.x % 32);
    const int64_t seqlen = p.seqlen;
    const int slices = Layout::kSliced ? static_cast<int>(ceil_div(p.dstate, Layout::kSlice)) : 1;
    const bool need_y = is_gated<Layout>(p) || p.out != nullptr;
    const int64_t part = block.segment * p.batch + block.batch;
    BackwardThread<Layout> thread;
    find_places(thread, order);
    const int64_t parameters = p.dim * p.dstate;
    const int64_t first_parameter = block.first_channel * p.dstate;
    const int64_t first_chain = block.batch * parameters + first_parameter;  // of (batch, parameter)
    const int64_t first_part = part * parameters + first_parameter;          // of (part, parameter)
    const BackwardRows<T, Layout> rows(q, block);
    const MatrixRows<T, Layout> matrix_rows(p, block);
    clear_channel_sums<Layout>(shared);
    const int64_t sum_slot = q.slots > 1 ? block.index : 0;
    const int64_t sum_base = ((sum_slot * p.batch + block.batch) * p.ngroups + block.group) * p.dstate * seqlen;
    const SumFlush<Layout, Shared> flush(sum_base, seqlen, is_reverse<Layout>(p));
    const int32_t* seq_idx = !Layout::kMamba && p.seq_idx != nullptr ? p.seq_idx + block.batch * seqlen : nullptr;
    const bool general = !Layout::kMamba && (!p.variable_B || !p.variable_C || seq_idx != nullptr);
    if (general && seq_idx == nullptr) {
        clear_resets<Layout>(shared.resets);
    }

    stage_parameter<Layout>(shared.bias, p.delta_bias, block);
    stage_parameter<Layout>(shared.D, p.D, block);
    __syncthreads();

    for (int slice = 0; slice < slices; ++slice) {
        begin_slice<Layout>(thread, q, block, order, slice, first_chain, first_parameter, first_part);
        if (Layout::kSliced) {
            for_chains(p, block, order, slice,
                       [&](int c, int s, bool, int) { waiting_place<Layout>(waiting_w, slice, c, s) = thread.w[c][s]; });
        }
    }

    const int64_t checkpoints = seqlen > 0 ? (seqlen - 1) / MAMBA_SCAN_CHECKPOINT : 0;
    const int64_t last_tile = ceil_div(block.end, Layout::kTile) - 1;
    for (int64_t tile = last_tile; tile >= block.begin / Layout::kTile; --tile) {
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
            fetch_BC<decltype(access)::kAccess>(B_staged, C_staged, p, matrix_rows, 0, place, steps);
        });

        for (int slice = 0; slice < slices; ++slice) {
            const int first_state = slice * Layout::kSlice;
            const int states =
                static_cast<int>(p.dstate - first_state < Layout::kSlice ? p.dstate - first_state : Layout::kSlice);
            // The states before the tile.
            const float* from = p.initial_state != nullptr ? p.initial_state + first_chain : nullptr;
            if (tile > 0) {
                from = p.checkpoints + (block.batch * checkpoints + tile - 1) * parameters + first_parameter;
            }
            Chains<Layout> h;
            for_chains(p, block, order, slice, [&](int c, int s, bool exists, int parameter) {
                if (Layout::kSliced) {
                    thread.A[c][s] = exists ? decay_exponent(p.A[first_parameter + parameter]) : 0.0f;
                    thread.w[c][s] = waiting_place<Layout>(waiting_w, slice, c, s);
                }
                h[c][s] = exists && from != nullptr ? from[parameter] : 0.0f;
            });
            if (slice == 0) {
                if (tile > 1) {
                    prefetch_states<Layout>(from - parameters, block.channels * p.dstate);
                }
                stage_inputs(shared, in, rows, q, block, first_step, place, steps);
            }
            stage_matrices<T, Layout, false>(shared.BC, B_staged, C_staged, shared.resets, seq_idx, first_step, p);
            if (Layout::kSliced && slice + 1 < slices) {
                with_access<Layout>(aligned, whole, inside, [&](auto access) {
                    fetch_BC<decltype(access)::kAccess>(B_staged, C_staged, p, matrix_rows, first_state + Layout::kSlice, place,
                                                        steps);
                });
            }

            const int64_t offset = first_state * seqlen + place_of<Layout>(p, first_step, 1);
            run_slice(q, thread, h, shared, flush, block, order, slice, first_parameter, first_part, offset, states, steps,
                      general, need_y, atomic);

            if (Layout::kSliced) {
                end_slice(thread, waiting_w, q, block, order, slice, first_part);
            }
        }

        with_access<Layout>(aligned, whole, inside,
                            [&](auto access) { in.template fetch<decltype(access)::kAccess>(rows, q, place, steps); });
        __syncwarp();  // the sums of other lanes are in
        if (is_reverse<Layout>(p)) {
            in.mirror(is_gated<Layout>(p));
        }
        store_gradients<T, Layout, Shared>(q, shared, in, rows, block, place, steps, aligned);
        __syncwarp();  // the rows have been read before the next tile overwrites them
    }

    for (int slice = 0; slice < slices; ++slice) {
        store_chain_gradients(thread, waiting_w, q, block, order, slice, first_chain, first_part);
    }
    store_channel_sums<T, Layout>(q, shared, rows, part);
}

// What all segments from first_segment on pass back.
template <typename T, class Layout>
cudaError_t launch_backward_carry(const ScanBackward& q, bool aligned, int64_t first_segment) {
    const MambaSelectiveScan& p = q.forward;
    const auto kernel = selective_scan_backward_carry_kernel<T, Layout>;
    const int64_t shared_bytes = waiting_bytes<Layout>(p.dstate);
    const cudaError_t error = Layout::kSliced ? allow_shared(kernel, shared_bytes) : cudaSuccess;
    if (error != cudaSuccess) {
        return error;
    }
    return launch_kernel(kernel, scan_grid(p, Layout::kChannels, p.segments - first_segment), Layout::kThreads,
                         static_cast<size_t>(shared_bytes), p.run.stream, q, aligned, first_segment);
}

template <typename T, class Layout, class CarryLayout, int kMostShared>
cudaError_t launch_backward(const ScanBackward& q, bool aligned) {
    using Shared = BackwardShared<T, Layout>;
    static_assert(sizeof(Shared) + waiting_bytes<Layout>(MAMBA_MAX_DSTATE) <= kMostShared, "what the table says");
    static_assert(Layout::kSlice > 16 || !Layout::kSliced ||
                      sizeof(Shared) + waiting_bytes<Layout>(16) == backward_sliced_shared(16, sizeof(T)),
                  "what the table says");
    const MambaSelectiveScan& p = q.forward;
    const auto kernel = selective_scan_backward_kernel<T, Layout>;
    const int64_t shared_bytes = sizeof(Shared) + waiting_bytes<Layout>(p.dstate);
    cudaError_t error = allow_shared(kernel, shared_bytes);
    const bool carries = p.segments > 1 && !p.carried;
    if (error == cudaSuccess && carries) {
        error = launch_backward_carry<T, CarryLayout>(q, aligned, 1);  // the first one passes nothing back
    }
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t blocks = scan_grid(p, Layout::kChannels, p.segments);
    const size_t shared = static_cast<size_t>(shared_bytes);
    const bool atomic = q.slots == 1 && p.dim / p.ngroups > Layout::kChannels;
    return carries ? launch_programmatic_dependent(kernel, blocks, Layout::kThreads, shared, p.run.stream, q, aligned, atomic)
                   : launch_kernel(kernel, blocks, Layout::kThreads, shared, p.run.stream, q, aligned, atomic);
}

template <typename T>
cudaError_t launch_scan_backward(const ScanBackward& q, bool aligned, int kernel) {
    return launch_row<T, kScanBackwardKernels>(scan_backward_table, kernel, [&](auto row) {
        constexpr int kRow = decltype(row)::kRow;
        constexpr ScanKernel k = kScanBackwardKernels[kRow];
        if constexpr (k.code == ScanCode::kFewStates) {
            static_assert(k.walk.tile == kFewStatesTile && k.walk.lanes == kChannelLanes && k.threads == 32 * k.walk.warps,
                          "what the table says");
            return launch_few_states_backward<T, k.walk.warps, k.walk.channels_per_lane, k.walk.blocks, k.shared_bytes>(q);
        } else {
            return launch_backward<T, LayoutOf<Walk<kScanBackwardKernels, kRow>>,
                                   LayoutOf<CarryWalk<kScanBackwardKernels, kRow>>, k.shared_bytes>(q, aligned);
        }
    });
}

template <typename T>
cudaError_t launch_scan_backward_carry(const ScanBackward& q, bool aligned, int kernel) {
    return launch_row<T, kScanBackwardKernels>(scan_backward_table, kernel, [&](auto row) {
        return launch_backward_carry<T, LayoutOf<CarryWalk<kScanBackwardKernels, decltype(row)::kRow>>>(q, aligned, 0);
    });
}

template <typename T>
ScanBackwardLaunchers ScanBackwardLaunchers::of() {
    return {launch_scan_backward<T>, launch_scan_backward_carry<T>};
}

}  // namespace mamba
