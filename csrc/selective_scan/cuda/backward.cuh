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
#include "selective_scan/cuda/backward_elements.cuh"
#include "selective_scan/cuda/backward_tile.cuh"

namespace mamba {

// A thread's part of a block's walk: what it holds, and the phases of a tile. Of a sliced layout w waits in shared memory and
// dA in its output between slices; dB and dC of constants are added up in their outputs.
template <typename T, class Layout>
struct BackwardScan : ScanThread<T, Layout> {
    using Base = ScanThread<T, Layout>;
    using Shared = BackwardShared<T, Layout>;
    using Base::block, Base::first_chain, Base::first_parameter, Base::for_chains, Base::p, Base::parameters, Base::slices,
        Base::steps;
    static_assert(Layout::kTile == MAMBA_SCAN_CHECKPOINT, "a tile starts at a checkpoint");

    const ScanBackward& q;
    Shared& shared;
    const bool atomic;
    const int64_t first_part;  // of (part, parameter): a segment of a batch entry each
    const BackwardRows<T, Layout> rows;
    const SumFlush<Layout, Shared> flush;
    BackwardThread<Layout> thread;
    BackwardInputs<T, Layout> in;  // of the tile in hand

    __device__ __forceinline__ BackwardScan(const ScanBackward& params, Shared& memory, bool aligned, bool is_atomic)
        : Base(params.forward, aligned, reinterpret_cast<float*>(&memory) + sizeof(Shared) / sizeof(float), 0),
          q(params),
          shared(memory),
          atomic(is_atomic),
          first_part((block.segment * p.batch + block.batch) * parameters + first_parameter),
          rows(q, block),
          flush(first_sum(), p.seqlen, is_reverse<Layout>(p)) {
        const int lane = threadIdx.x % 32;
        const int warp = threadIdx.x / 32;
        unroll<Layout::kEach>([&](int c) { thread.own[c] = opaque(this->row(c) * Layout::kRow); });
        unroll<Layout::kStates>([&](int s) { thread.matrix[s] = opaque(this->order.state(s) * Layout::kRow); });
        thread.swizzle = swizzle(this->order.state(0));
        thread.state_sums = opaque(thread.own[0] + StateSums<Layout, kSumSteps>::first(lane));
        thread.channel_sums = opaque((warp * Layout::kSlice + this->order.state(0)) * Layout::kSteps +
                                     (ChannelSums<Layout, kSumSteps>::first(lane) ^ thread.swizzle));
    }

    // Where the block's sums begin in dB and dC of variable matrices.
    __device__ __forceinline__ int64_t first_sum() const {
        const int64_t slot = q.slots > 1 ? block.index : 0;
        return ((slot * p.batch + block.batch) * p.ngroups + block.group) * p.dstate * p.seqlen;
    }

    __device__ __forceinline__ void clear_sums() {
        unroll<Layout::kPasses>([&](int pass) {
            shared.bias_sum[pass][threadIdx.x] = 0.0f;
            shared.D_sum[pass][threadIdx.x] = 0.0f;
        });
        this->clear_resets(shared.resets);
    }

    // w behind the segment: the last state's gradient, and what later segments pass back.
    __device__ __forceinline__ void load_gradients() {
        for (int slice = 0; slice < slices(); ++slice) {
            this->load_A(thread.A, slice);
            for_chains(slice, [&](int c, int s, bool exists, int parameter) {
                thread.w[c][s] = exists && q.dlast_state != nullptr ? q.dlast_state[first_chain + parameter] : 0.0f;
                thread.dA[c][s] = 0.0f;
                if (exists && Layout::kSliced) {
                    q.parts.dA[first_part + parameter] = 0.0f;
                }
                if (exists && !Layout::kMamba && !p.variable_B) {
                    q.parts.dB[first_part + parameter] = 0.0f;
                }
                if (exists && !Layout::kMamba && !p.variable_C) {
                    q.parts.dC[first_part + parameter] = 0.0f;
                }
            });
            const int later = static_cast<int>(p.segments - 1 - block.segment);
            if (later > 0) {
                griddepcontrol_wait();
                this->pass_through_segments(thread.w, slice, p.segments - 1, -1, later);
            }
            this->put_away(thread.w, slice);
        }
    }

    // The tile's loads; again without B and C, before gradients are stored.
    template <bool kMatrices>
    __device__ __forceinline__ void fetch_tile(int64_t first_step) {
        const int64_t place = place_of<Layout>(p, first_step, Layout::kTile);
        this->with_tile_access([&](auto access) {
            in.template fetch<decltype(access)::kAccess>(rows, q, place, steps);
            if constexpr (kMatrices) {
                this->template fetch_matrices<decltype(access)::kAccess>(0, first_step);
            }
        });
    }

    // The states before the tile, in h, and what waits between slices.
    __device__ __forceinline__ void load_chains(Chains<Layout>& h, const float* from, int slice) {
        if (Layout::kSliced) {
            this->load_A(thread.A, slice);
            this->take_back(thread.w, slice);
        }
        for_chains(slice, [&](int c, int s, bool exists, int parameter) {
            h[c][s] = exists && from != nullptr ? from[parameter] : 0.0f;
        });
    }
    // Where they lie, null for states of zero.
    __device__ __forceinline__ const float* states_before(int64_t tile) const {
        if (tile > 0) {
            const int64_t checkpoints = p.seqlen > 0 ? (p.seqlen - 1) / MAMBA_SCAN_CHECKPOINT : 0;
            return p.checkpoints + (block.batch * checkpoints + tile - 1) * parameters + first_parameter;
        }
        return p.initial_state != nullptr ? p.initial_state + first_chain : nullptr;
    }

    // dt, dy and dt * u of the warp's own rows; the tile before is asked for.
    __device__ __forceinline__ void stage_elements(int64_t tile, const float* from) {
        const int64_t first_step = tile * Layout::kTile;
        if (tile > 1) {
            constexpr int kLine = 8;  // floats that one prefetch brings
            for (int i = threadIdx.x * kLine; i < block.channels * p.dstate; i += Layout::kThreads * kLine) {
                prefetch_to_L2(from - parameters + i);
            }
        }
        if (is_reverse<Layout>(p)) {
            in.mirror(is_gated<Layout>(p));
        }
        stage_time_and_gradient<T, Layout>(shared.dt, shared.dy, shared.bias, in, rows, p, steps);
        stage_input<T, Layout>(shared.x, shared.dt, in, rows);
        if (first_step > block.begin) {
            prefetch_inputs(rows, q, place_of<Layout>(p, first_step - Layout::kTile, Layout::kTile));
        }
        if (adds<Layout>(p) && rows.step + Layout::kVector <= steps) {
            prefetch_sums(rows, q, block, place_of<Layout>(p, first_step, Layout::kTile));
        }
    }

    // B and C of the slice; the next slice's are on their way then.
    __device__ __forceinline__ void stage_slice(int slice, int64_t first_step) {
        this->stage_matrices(shared.resets, first_step, [&] { shared.BC.put(this->B_staged, this->C_staged); });
        this->fetch_next_slice(slice, first_step);
    }

    // The states of a slice through the tile, forward and back.
    __device__ __forceinline__ void run_states(Chains<Layout>& h, int slice, int64_t first_step) {
        const int first_state = slice * Layout::kSlice;
        const int64_t left = p.dstate - first_state;
        const int states = static_cast<int>(left < Layout::kSlice ? left : Layout::kSlice);
        const int64_t offset = first_state * p.seqlen + place_of<Layout>(p, first_step, 1);
        BackwardConstants<Layout> constants;
        const bool need_y = is_gated<Layout>(p) || p.out != nullptr;
        if (this->general) {
            this->load_constants(constants, slice);
            for_each_chain<Layout>([&](int c, int s) { constants.dB[c][s] = constants.dC[c][s] = 0.0f; });
            backward_tile<Layout, Shared, true>(q, thread, h, shared, constants, flush, offset, states, steps, need_y,
                                                slice > 0, atomic);
            for_chains(slice, [&](int c, int s, bool exists, int parameter) {
                if (exists && !p.variable_B) {  // no other thread's: atomic because nothing waits for it
                    atomicAdd(q.parts.dB + first_part + parameter, constants.dB[c][s]);
                }
                if (exists && !p.variable_C) {
                    atomicAdd(q.parts.dC + first_part + parameter, constants.dC[c][s]);
                }
            });
        } else {
            backward_tile<Layout, Shared, false>(q, thread, h, shared, constants, flush, offset, states, steps, need_y,
                                                 slice > 0, atomic);
        }
        if (Layout::kSliced) {
            this->put_away(thread.w, slice);
            for_chains(slice, [&](int c, int s, bool exists, int parameter) {
                if (exists) {
                    atomicAdd(q.parts.dA + first_part + parameter, thread.dA[c][s]);
                }
                thread.dA[c][s] = 0.0f;
            });
        }
    }

    // The gradients of the initial state and of A.
    __device__ __forceinline__ void store_chains() {
        for (int slice = 0; slice < slices(); ++slice) {
            for_chains(slice, [&](int c, int s, bool exists, int parameter) {
                if (exists && q.dinitial_state != nullptr && block.segment == 0) {
                    q.dinitial_state[first_chain + parameter] = Layout::kSliced ? this->waiting(slice, c, s) : thread.w[c][s];
                }
                if (exists && !Layout::kSliced) {
                    q.parts.dA[first_part + parameter] = thread.dA[c][s];
                }
            });
        }
    }

    // The gradients of delta's bias and of D.
    __device__ __forceinline__ void store_sums() {
        const int64_t part = block.segment * p.batch + block.batch;
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
                const int64_t at = part * p.dim + rows.channel(pass);
                if (q.parts.ddelta_bias != nullptr) {
                    q.parts.ddelta_bias[at] = bias_sum;
                }
                if (q.parts.dD != nullptr) {
                    q.parts.dD[at] = D_sum;
                }
            }
        }
    }
};

template <typename T, class Layout>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kBlocks)
    selective_scan_backward_kernel(const ScanBackward q, bool aligned, bool atomic) {
    MAMBA_DYNAMIC_SHARED(16, float4, raw_shared);
    auto& shared = *reinterpret_cast<BackwardShared<T, Layout>*>(raw_shared);
    BackwardScan<T, Layout> scan(q, shared, aligned, atomic);
    const MambaSelectiveScan& p = q.forward;
    const ScanBlock& block = scan.block;
    scan.clear_sums();
    stage_parameter<Layout>(shared.bias, p.delta_bias, block);
    stage_parameter<Layout>(shared.D, p.D, block);
    __syncthreads();
    scan.load_gradients();

    const int64_t last_tile = ceil_div(block.end, Layout::kTile) - 1;
    for (int64_t tile = last_tile; tile >= block.begin / Layout::kTile; --tile) {
        const int64_t first_step = tile * Layout::kTile;
        scan.begin_tile(first_step, false);
        scan.template fetch_tile<true>(first_step);
        for (int slice = 0; slice < scan.slices(); ++slice) {
            const float* const from = scan.states_before(tile);
            Chains<Layout> h;
            scan.load_chains(h, from, slice);
            if (slice == 0) {
                scan.stage_elements(tile, from);
            }
            scan.stage_slice(slice, first_step);
            scan.run_states(h, slice, first_step);
        }
        scan.template fetch_tile<false>(first_step);  // again: see store_gradients
        __syncwarp();                                 // the sums of other lanes are in
        if (is_reverse<Layout>(p)) {
            scan.in.mirror(is_gated<Layout>(p));
        }
        store_gradients<T, Layout>(q, shared, scan.in, scan.rows, block, place_of<Layout>(p, first_step, Layout::kTile),
                                   scan.steps, aligned);
        __syncwarp();  // the rows have been read before the next tile overwrites them
    }
    scan.store_chains();
    scan.store_sums();
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
        return launch_backward<T, LayoutOf<Walk<kScanBackwardKernels, kRow>>, LayoutOf<CarryWalk<kScanBackwardKernels, kRow>>,
                               kScanBackwardKernels[kRow].shared_bytes>(q, aligned);
    });
}

template <typename T>
cudaError_t launch_scan_backward_carry(const ScanBackward& q, bool aligned, int kernel) {
    return launch_row<T, kScanBackwardKernels>(scan_backward_table, kernel, [&](auto row) {
        return launch_backward_carry<T, LayoutOf<CarryWalk<kScanBackwardKernels, decltype(row)::kRow>>>(q, aligned, 0);
    });
}

}  // namespace mamba
