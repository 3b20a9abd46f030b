// The CUDA forward scan. tile.cuh explains the layout.
//
// Where channels are too few to fill the GPU, the length is split into segments (MambaSelectiveScan::segments): one launch
// finds what every segment passes on, a second one runs them all from the right states.
#pragma once

#include "common/kernel_launch.cuh"
#include "selective_scan/cuda/forward_pipeline.cuh"
#include "selective_scan/cuda/forward_tile.cuh"

namespace mamba {

// A thread's part of a block's walk: what it holds, and the phases of a tile. kCarryOnly: fills the workspace for the segments
// of its blocks.
template <typename T, class Layout, bool kCarryOnly>
struct ForwardScan : ScanThread<T, Layout> {
    using Base = ScanThread<T, Layout>;
    using Base::block, Base::first_chain, Base::for_chains, Base::p, Base::slices, Base::steps;
    // A tile's elements, on their way into registers: small ones early, large ones, and those of lanes with eight states, where
    // they are needed (early they are up to 6 % slower). The walk of states alone has room there for those of the next tile
    // while it works at this one.
    static constexpr bool kEarly = kIs16Bit<T> && (Layout::kStates < 8 || Layout::kSliced || kCarryOnly);
    static constexpr bool kAhead = kEarly && kCarryOnly && !Layout::kSliced;

    ForwardShared<T, Layout, kCarryOnly>& shared;
    const ElementRows<T, Layout> rows;
    T* const out;
    const bool gated, add;  // z, and `add` of the call
    const bool neighbours;  // see vectors_within
    float* checkpoint;      // where the next one goes, or null
    ForwardThread<Layout> thread;
    TileElements<T, Layout> u, delta, z;  // of the tile in hand

    __device__ __forceinline__ ForwardScan(const MambaSelectiveScan& params, ForwardShared<T, Layout, kCarryOnly>& memory,
                                           float* waiting, bool aligned)
        : Base(params, aligned, waiting, 0),
          shared(memory),
          rows(p, block),
          out(rows.at(static_cast<T*>(p.out), block, p.out_batch_stride, p.out_dim_stride)),
          gated(is_gated<Layout>(p)),
          add(!kCarryOnly && adds<Layout>(p)),
          neighbours(inputs_have_neighbours<Layout>(p, block)),
          checkpoint(nullptr) {
        unroll<Layout::kEach>([&](int c) {
            thread.row[c] = this->row(c);
            thread.dt_sum[c] = 0.0f;
        });
        unroll<Layout::kStates>([&](int s) { thread.state[s] = this->order.state(s); });
        thread.restarted = false;
        if (!kCarryOnly && p.checkpoints != nullptr) {
            const int64_t count = (p.seqlen - 1) / MAMBA_SCAN_CHECKPOINT;
            const int64_t first = block.batch * count + block.begin / MAMBA_SCAN_CHECKPOINT;
            checkpoint = p.checkpoints + first * this->parameters + this->first_parameter;
        }
        if (!Layout::kSliced) {
            this->load_A(thread.A, 0);
        }
    }

    // The tile's first loads: all but z, with B and C of the first slice.
    __device__ __forceinline__ void fetch_tile(int64_t first_step) {
        this->begin_tile(first_step, neighbours);
        const int64_t place = place_of<Layout>(p, first_step, Layout::kTile);
        this->with_tile_access([&](auto access) {
            constexpr Access kAccess = decltype(access)::kAccess;
            delta.template fetch<kAccess>(rows, rows.delta, p.delta_dim_stride, place, steps);
            u.template fetch<kAccess>(rows, rows.u, p.u_dim_stride, place, steps);
            this->template fetch_matrices<kAccess>(0, first_step, true, !kCarryOnly);
        });
    }

    // States before the segment: initial ones, and what earlier segments pass on. Before the tiles, not in the first of them:
    // ptxas lets such a load share a scoreboard with that of z, and the steps of every tile would then wait for z.
    __device__ __forceinline__ void load_states() {
        for (int slice = 0; slice < slices(); ++slice) {
            for_chains(slice, [&](int c, int s, bool exists, int parameter) {
                const bool given = !kCarryOnly && exists && p.initial_state != nullptr;
                thread.h[c][s] = given ? p.initial_state[first_chain + parameter] : 0.0f;
            });
            if (!kCarryOnly && block.segment > 0) {
                griddepcontrol_wait();
                this->pass_through_segments(thread.h, slice, 0, 1, static_cast<int>(block.segment));
            }
            this->put_away(thread.h, slice);
        }
    }

    // dt and dt * u of the warp's own rows. Steps past the end get dt = 0 and x = 0, which leaves the state as it is.
    __device__ __forceinline__ void stage_elements() {
        if (is_reverse<Layout>(p)) {
            delta.mirror();
            u.mirror();
        }
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            const int at = rows.row(pass) * Layout::kRow + rows.step;
            float dt[Layout::kVector], x[Layout::kVector];
            delta.read(dt, pass);
            u.read(x, pass);
            time_steps<T>(dt, shared.bias[rows.row(pass)], has_softplus<Layout>(p), rows.valid_steps(steps));
            unroll<Layout::kVector>([&](int i) { x[i] *= dt[i]; });
            write_row(shared.dt + at, dt);
            write_row(shared.x + at, x);
        }
    }

    __device__ __forceinline__ void stage_slice(int64_t first_step) {
        this->stage_matrices(shared.resets, first_step, [&] {
            if constexpr (kCarryOnly) {
                shared.BC.put_one(this->B_staged);
            } else {
                shared.BC.put(this->B_staged, this->C_staged);
            }
        });
    }

    // Loads that arrive while the slice runs: the next slice's, those of the tile's end, and what the next tile begins with.
    __device__ __forceinline__ void fetch_ahead(int slice, int64_t first_step) {
        const int64_t next_step = first_step + Layout::kTile;
        const int64_t place = place_of<Layout>(p, first_step, Layout::kTile);
        this->fetch_next_slice(slice, first_step, true, !kCarryOnly);
        if (kAhead && next_step < block.end) {
            fetch_tile(next_step);
        }
        const int most = is_reverse<Layout>(p) ? Layout::kVector - 1 : 0;  // then memory's first one must exist
        if (!kAhead && slice == 0 && next_step + rows.step + most < block.end) {
            // What comes next is asked for into the L2 cache only: registers are scarce.
            const int64_t next_place = place_of<Layout>(p, next_step, Layout::kTile);
            prefetch_elements(rows, rows.u, p.u_dim_stride, next_place);
            prefetch_elements(rows, rows.delta, p.delta_dim_stride, next_place);
        }
        if (add && slice == 0 && rows.step + Layout::kVector <= steps) {
            prefetch_elements(rows, static_cast<const T*>(out), p.out_dim_stride, place);
        }
        if (!kCarryOnly && slice + 1 == slices() && gated) {
            this->with_tile_access(
                [&](auto access) { z.template fetch<decltype(access)::kAccess>(rows, rows.z, p.z_dim_stride, place, steps); });
        }
    }

    // The states of a slice through `count` steps of the tile.
    __device__ __forceinline__ void run_states(int slice, int count) {
        if (Layout::kSliced) {
            this->load_A(thread.A, slice);
            this->take_back(thread.h, slice);
        }
        ConstantMatrices<Layout> constants;
        if (this->general) {
            this->load_constants(constants, slice);
            forward_tile<T, Layout, true, kCarryOnly>(thread, shared, constants, count, slice > 0);
        } else {
            forward_tile<T, Layout, false, kCarryOnly>(thread, shared, constants, count, slice > 0);
        }
    }

    // The states behind a tile, where somebody wants them: the next segment, backward, or the caller.
    __device__ __forceinline__ void store_states(int slice, int64_t next_step) {
        if (kCarryOnly) {
            if (next_step >= block.end) {
                this->store_carry(thread.h, thread.A, thread.dt_sum, thread.restarted, slice);
            }
        } else if (next_step < p.seqlen ? checkpoint != nullptr && next_step % MAMBA_SCAN_CHECKPOINT == 0
                                        : p.last_state != nullptr) {
            float* const to = next_step < p.seqlen ? checkpoint : p.last_state + first_chain;
            for_chains(slice, [&](int c, int s, bool exists, int parameter) {
                if (exists) {
                    to[parameter] = thread.h[c][s];
                }
            });
        }
        this->put_away(thread.h, slice);
    }

    // out = (y + D u) silu(z) of the warp's own rows.
    __device__ __forceinline__ void store_out(int64_t first_step) {
        const int64_t place = place_of<Layout>(p, first_step, Layout::kTile);
        __syncwarp();  // the sums of other lanes are in
        if (gated && is_reverse<Layout>(p)) {
            z.mirror();
        }
#pragma unroll
        for (int pass = 0; pass < Layout::kPasses; ++pass) {
            const float skip = shared.D[rows.row(pass)];
            float y[Layout::kVector], other[Layout::kVector];
            read_row(y, shared.y + rows.row(pass) * Layout::kRow + rows.step);
            u.read(other, pass);
            unroll<Layout::kVector>(
                [&](int i) { y[i] = Layout::kMamba || p.D != nullptr ? fmaf(skip, other[i], y[i]) : y[i]; });
            if (gated) {
                z.read(other, pass);
                unroll<Layout::kVector>([&](int i) { y[i] *= silu(other[i]); });
            }
            T* const to = out + place + pass * Layout::kPassRows * p.out_dim_stride;
            if (add) {
                add_steps<T, Layout::kVector>(to, rows.valid(pass, steps), Layout::kMamba || this->aligned, rows.reverse, y);
            }
            store_steps<T, Layout::kVector>(to, rows.valid(pass, steps), Layout::kMamba || this->aligned, rows.reverse, y);
        }
    }

    // Of a call without steps.
    __device__ __forceinline__ void pass_initial_state() {
        for (int slice = 0; slice < slices(); ++slice) {
            for_chains(slice, [&](int, int, bool exists, int parameter) {
                if (exists) {
                    const int64_t at = first_chain + parameter;
                    p.last_state[at] = p.initial_state != nullptr ? p.initial_state[at] : 0.0f;
                }
            });
        }
    }
};

template <typename T, class Layout, bool kCarryOnly>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kBlocks)
    selective_scan_forward_kernel(const MambaSelectiveScan p, bool aligned) {
    using Scan = ForwardScan<T, Layout, kCarryOnly>;
    __shared__ ForwardShared<T, Layout, kCarryOnly> shared;
    MAMBA_DYNAMIC_SHARED(4, float, waiting_h);  // of sliced layouts
    if (kCarryOnly) {
        griddepcontrol_launch_dependents();
    }
    Scan scan(p, shared, waiting_h, aligned);
    const ScanBlock& block = scan.block;
    scan.clear_resets(shared.resets);
    stage_parameter<Layout>(shared.bias, p.delta_bias, block);
    stage_parameter<Layout>(shared.D, p.D, block);
    if (Scan::kEarly) {
        scan.fetch_tile(block.begin);
    }
    __syncthreads();
    scan.load_states();

    for (int64_t first_step = block.begin; first_step < block.end; first_step += Layout::kTile) {
        const int64_t next_step = first_step + Layout::kTile;
        if (!Scan::kEarly) {
            scan.fetch_tile(first_step);
        }
        // Not by round_up: the compiler would make other code of the whole loop. So too in backward.cuh.
        const int rounded = (scan.steps + Layout::kSteps - 1) / Layout::kSteps * Layout::kSteps;
        scan.stage_elements();
        for (int slice = 0; slice < scan.slices(); ++slice) {
            scan.stage_slice(first_step);
            scan.fetch_ahead(slice, first_step);
            scan.run_states(slice, rounded);
            scan.store_states(slice, next_step);
        }
        if (scan.checkpoint != nullptr && next_step % MAMBA_SCAN_CHECKPOINT == 0) {
            scan.checkpoint += scan.parameters;
        }
        if (!kCarryOnly) {
            scan.store_out(first_step);
        }
        if (Scan::kEarly && !Scan::kAhead && next_step < block.end) {
            scan.fetch_tile(next_step);
        }
        __syncwarp();  // y and dt have been read before the next tile overwrites them
    }
    if (!kCarryOnly && p.seqlen == 0 && p.last_state != nullptr) {
        scan.pass_initial_state();
    }
}

// What the first `segments` segments pass on.
template <typename T, class Layout>
cudaError_t launch_forward_carry(const MambaSelectiveScan& p, bool aligned, int64_t segments) {
    const auto kernel = selective_scan_forward_kernel<T, Layout, true>;
    const int64_t shared_bytes = waiting_bytes<Layout>(p.dstate);
    const cudaError_t error = Layout::kSliced ? allow_shared(kernel, shared_bytes) : cudaSuccess;
    if (error != cudaSuccess) {
        return error;
    }
    return launch_kernel(kernel, scan_grid(p, Layout::kChannels, segments), Layout::kThreads, static_cast<size_t>(shared_bytes),
                         p.run.stream, p, aligned);
}

template <typename T, class Layout, class CarryLayout>
cudaError_t launch_forward(const MambaSelectiveScan& p, bool aligned) {
    const auto kernel = selective_scan_forward_kernel<T, Layout, false>;
    const int64_t shared_bytes = waiting_bytes<Layout>(p.dstate);
    cudaError_t error = Layout::kSliced ? allow_shared(kernel, shared_bytes) : cudaSuccess;
    const bool carries = p.segments > 1 && !p.carried;
    if (error == cudaSuccess && carries) {
        error = launch_forward_carry<T, CarryLayout>(p, aligned, p.segments - 1);  // the last one passes nothing on
    }
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t blocks = scan_grid(p, Layout::kChannels, p.segments);
    const size_t shared = static_cast<size_t>(shared_bytes);
    return carries ? launch_programmatic_dependent(kernel, blocks, Layout::kThreads, shared, p.run.stream, p, aligned)
                   : launch_kernel(kernel, blocks, Layout::kThreads, shared, p.run.stream, p, aligned);
}

template <typename T>
cudaError_t launch_scan_forward(const MambaSelectiveScan& p, bool aligned, int kernel) {
    return launch_row<T, kScanForwardKernels>(scan_forward_table, kernel, [&](auto row) {
        constexpr int kRow = decltype(row)::kRow;
        constexpr ScanKernel k = kScanForwardKernels[kRow];
        if constexpr (k.pipelined) {
            using Layout = PipelineLayout<k.walk.call, k.walk.warps, k.walk.tile, k.walk.steps / 4>;
            static_assert(Layout::kThreads == k.threads, "what the table says");
            return launch_pipeline<T, Layout, k.shared_bytes>(p);
        } else {
            using Layout = LayoutOf<Walk<kScanForwardKernels, kRow>>;
            static_assert(Layout::kThreads == k.threads && waiting_bytes<Layout>(MAMBA_MAX_DSTATE) <= k.shared_bytes,
                          "what the table says");
            return launch_forward<T, Layout, LayoutOf<CarryWalk<kScanForwardKernels, kRow>>>(p, aligned);
        }
    });
}

template <typename T>
cudaError_t launch_scan_forward_carry(const MambaSelectiveScan& p, bool aligned, int kernel) {
    return launch_row<T, kScanForwardKernels>(scan_forward_table, kernel, [&](auto row) {
        return launch_forward_carry<T, LayoutOf<CarryWalk<kScanForwardKernels, decltype(row)::kRow>>>(p, aligned, p.segments);
    });
}

}  // namespace mamba
