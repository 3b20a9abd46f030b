// The CUDA forward scan. tile.cuh explains the layout.
//
// Where channels are too few to fill the GPU, the length is split into segments (MambaSelectiveScan::segments): one launch
// finds what every segment passes on, a second one runs them all from the right states.
#pragma once

#include "common/kernel_launch.cuh"
#include "selective_scan/cuda/few_states_forward.cuh"
#include "selective_scan/cuda/forward_elements.cuh"
#include "selective_scan/cuda/forward_pipeline.cuh"
#include "selective_scan/cuda/forward_tile.cuh"
#include "selective_scan/launch.h"

namespace mamba {

// Calls function(c, s, whether the chain exists, its parameter's number among the block's) for the lane's chains of a slice.
template <class Layout, class Function>
__device__ __forceinline__ void for_chains(const MambaSelectiveScan& p, const ScanBlock& block,
                                           const ForwardThread<Layout>& thread, int slice, const Function& function) {
#pragma unroll
    for (int c = 0; c < Layout::kEach; ++c) {
#pragma unroll
        for (int s = 0; s < Layout::kStates; ++s) {
            const int n = slice * Layout::kSlice + thread.state[s];
            const bool exists = Layout::kWhole || (thread.row[c] < block.channels && n < p.dstate);
            function(c, s, exists, thread.row[c] * static_cast<int>(p.dstate) + n);
        }
    }
}

template <class Layout>
__device__ __forceinline__ void load_constants(ForwardConstants<Layout>& constants, const MambaSelectiveScan& p,
                                               const ScanBlock& block, const ForwardThread<Layout>& thread, int slice,
                                               int64_t first_parameter) {
    constants.variable_B = p.variable_B;
    constants.variable_C = p.variable_C;
    for_chains(p, block, thread, slice, [&](int c, int s, bool exists, int parameter) {
        const int64_t at = first_parameter + parameter;
        constants.B[c][s] = exists && !p.variable_B ? static_cast<const float*>(p.B)[at] : 0.0f;
        constants.C[c][s] = exists && !p.variable_C ? static_cast<const float*>(p.C)[at] : 0.0f;
    });
}

template <class Layout>
__device__ __forceinline__ void load_decays(ForwardThread<Layout>& thread, const MambaSelectiveScan& p, const ScanBlock& block,
                                            int slice, int64_t first_parameter) {
    for_chains(p, block, thread, slice, [&](int c, int s, bool exists, int parameter) {
        thread.A[c][s] = exists ? decay_exponent(p.A[first_parameter + parameter]) : 0.0f;
    });
}

// A slice's states to where they wait, and back.
template <class Layout>
__device__ __forceinline__ void put_states(float* waiting, const MambaSelectiveScan& p, const ScanBlock& block,
                                           const ForwardThread<Layout>& thread, int slice) {
    for_chains(p, block, thread, slice,
               [&](int c, int s, bool, int) { waiting_place<Layout>(waiting, slice, c, s) = thread.h[c][s]; });
}
template <class Layout>
__device__ __forceinline__ void take_states(float* waiting, const MambaSelectiveScan& p, const ScanBlock& block,
                                            ForwardThread<Layout>& thread, int slice) {
    for_chains(p, block, thread, slice,
               [&](int c, int s, bool, int) { thread.h[c][s] = waiting_place<Layout>(waiting, slice, c, s); });
}

template <class Layout>
__device__ __forceinline__ void store_states(float* to, const ForwardThread<Layout>& thread, const MambaSelectiveScan& p,
                                             const ScanBlock& block, int slice) {
    for_chains(p, block, thread, slice, [&](int c, int s, bool exists, int parameter) {
        if (exists) {
            to[parameter] = thread.h[c][s];
        }
    });
}

// Of a sequence without steps.
template <class Layout>
__device__ __forceinline__ void pass_initial_states(const ForwardThread<Layout>& thread, const MambaSelectiveScan& p,
                                                    const ScanBlock& block, int slices, int64_t first_chain) {
    for (int slice = 0; slice < slices; ++slice) {
        for_chains(p, block, thread, slice, [&](int, int, bool exists, int parameter) {
            if (exists) {
                const int64_t at = first_chain + parameter;
                p.last_state[at] = p.initial_state != nullptr ? p.initial_state[at] : 0.0f;
            }
        });
    }
}

// The first of the block's checkpoints.
__device__ __forceinline__ float* first_checkpoint(const MambaSelectiveScan& p, const ScanBlock& block, int64_t parameters,
                                                   int64_t first_parameter) {
    const int64_t count = (p.seqlen - 1) / MAMBA_SCAN_CHECKPOINT;
    return p.checkpoints + (block.batch * count + block.begin / MAMBA_SCAN_CHECKPOINT) * parameters + first_parameter;
}

// The states that the block starts from.
template <class Layout, bool kCarryOnly>
__device__ __forceinline__ void start_states(ForwardThread<Layout>& thread, const MambaSelectiveScan& p, const ScanBlock& block,
                                             int slice, int64_t first_chain) {
    for_chains(p, block, thread, slice, [&](int c, int s, bool exists, int parameter) {
        const bool given = !kCarryOnly && exists && p.initial_state != nullptr;
        thread.h[c][s] = given ? p.initial_state[first_chain + parameter] : 0.0f;
    });
    if (!kCarryOnly && block.segment > 0) {
        griddepcontrol_wait();
        SegmentStates<Layout> at;
        for_chains(p, block, thread, slice, [&](int c, int s, bool exists, int parameter) {
            at.exists[c][s] = exists;
            at.state[c][s] = first_chain + parameter;
        });
        pass_through_segments<Layout>(p, thread.h, at, 0, 1, static_cast<int>(block.segment));
    }
}

// What the segment passes on, to the workspace.
template <class Layout>
__device__ __forceinline__ void pass_on_states(const ForwardThread<Layout>& thread, const MambaSelectiveScan& p,
                                               const ScanBlock& block, int slice, int64_t parameters, int64_t first_chain) {
    for_chains(p, block, thread, slice, [&](int c, int s, bool exists, int parameter) {
        if (exists) {
            const int64_t at = workspace_at(p, block.segment, first_chain + parameter);
            p.workspace[at] = thread.h[c][s];
            p.workspace[at + p.batch * parameters] = thread.restarted ? -1.0f : exp2_fast(thread.A[c][s] * thread.dt_sum[c]);
        }
    });
}

// The states after a tile that ends before next_step, where they are wanted.
template <class Layout, bool kCarryOnly>
__device__ __forceinline__ void keep_states(const ForwardThread<Layout>& thread, const MambaSelectiveScan& p,
                                            const ScanBlock& block, int slice, int64_t next_step, float* checkpoint,
                                            int64_t parameters, int64_t first_chain) {
    if (kCarryOnly) {
        if (next_step >= block.end) {
            pass_on_states(thread, p, block, slice, parameters, first_chain);
        }
    } else if (next_step < p.seqlen ? checkpoint != nullptr && next_step % MAMBA_SCAN_CHECKPOINT == 0
                                    : p.last_state != nullptr) {
        store_states(next_step < p.seqlen ? checkpoint : p.last_state + first_chain, thread, p, block, slice);
    }
}

// A slice's states through a tile. general: see forward_tile.
template <typename T, class Layout, bool kCarryOnly>
__device__ __forceinline__ void run_tile(ForwardThread<Layout>& thread, ForwardShared<T, Layout, kCarryOnly>& tile,
                                         const MambaSelectiveScan& p, const ScanBlock& block, int slice,
                                         int64_t first_parameter, const int* resets, int steps, bool general) {
    ForwardConstants<Layout> constants;
    if (general) {
        load_constants(constants, p, block, thread, slice, first_parameter);
        forward_tile<T, Layout, true, kCarryOnly>(thread, tile, constants, resets, steps, slice > 0);
    } else {
        forward_tile<T, Layout, false, kCarryOnly>(thread, tile, constants, resets, steps, slice > 0);
    }
}

// Of a sliced layout states wait in shared memory between slices. kCarryOnly: fills the workspace for the segments of its
// blocks.
template <typename T, class Layout, bool kCarryOnly>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kBlocks)
    selective_scan_forward_kernel(const MambaSelectiveScan p, bool aligned) {
    __shared__ __align__(16) ForwardShared<T, Layout, kCarryOnly> tile;
    __shared__ int resets[Layout::kTile];
    __shared__ float bias[Layout::kChannels];  // of delta
    __shared__ float D[Layout::kChannels];
    MAMBA_DYNAMIC_SHARED(4, float, waiting_h);  // (slices, a lane's chains, kThreads), sliced only

    if (kCarryOnly) {
        griddepcontrol_launch_dependents();
    }
    const ScanBlock block = scan_block(p, Layout::kChannels, 0);
    const int slices = Layout::kSliced ? static_cast<int>(ceil_div(p.dstate, Layout::kSlice)) : 1;
    const int64_t parameters = p.dim * p.dstate;
    const LaneOrder<Layout> order(threadIdx.x % 32);
    ForwardThread<Layout> thread(order);
    const int64_t first_parameter = block.first_channel * p.dstate;
    const int64_t first_chain = block.batch * parameters + first_parameter;  // of (batch, parameter)
    if (!Layout::kSliced) {
        load_decays(thread, p, block, 0, first_parameter);
    }
    // Where the next checkpoint goes.
    float* checkpoint = nullptr;
    if (!kCarryOnly && p.checkpoints != nullptr) {
        checkpoint = first_checkpoint(p, block, parameters, first_parameter);
    }

    const ElementRows<T, Layout> rows(p, block);
    T* const out = rows.at(static_cast<T*>(p.out), block, p.out_batch_stride, p.out_dim_stride);
    stage_parameter<Layout>(bias, p.delta_bias, block);
    stage_parameter<Layout>(D, p.D, block);
    const MatrixRows<T, Layout> matrix_rows(p, block);
    const bool all_exist = Layout::kWhole || (block.channels == Layout::kChannels && p.dstate % Layout::kSlice == 0);
    const int32_t* seq_idx = !Layout::kMamba && p.seq_idx != nullptr ? p.seq_idx + block.batch * p.seqlen : nullptr;
    const bool general = !Layout::kMamba && (!p.variable_B || !p.variable_C || seq_idx != nullptr);
    const bool neighbours = inputs_have_neighbours<Layout>(p, block);
    if (general && seq_idx == nullptr) {
        clear_resets<Layout>(resets);
    }

    // Small elements are fetched early, large ones, and those of lanes with eight states, where they are needed (early they are
    // up to 6 % slower). The walk of states alone has room for those of the next tile while it works at this one.
    constexpr bool kEarly = kIs16Bit<T> && (Layout::kStates < 8 || Layout::kSliced || kCarryOnly);
    constexpr bool kAhead = kEarly && kCarryOnly && !Layout::kSliced;
    TileExtent extent;
    ForwardInputs<T, Layout, kCarryOnly> in;
    const auto fetch_tile = [&](int64_t first_step) {
        extent = tile_extent<Layout>(p, block, first_step, all_exist, neighbours);
        in.fetch(p, rows, matrix_rows, place_of<Layout>(p, first_step, Layout::kTile), extent, aligned);
    };
    if (kEarly) {
        fetch_tile(block.begin);
    }
    __syncthreads();

    // Before the tiles, not in the first of them: ptxas lets such a load share a scoreboard with that of z, and the steps of
    // every tile would then wait for z.
    for (int slice = 0; slice < slices; ++slice) {
        start_states<Layout, kCarryOnly>(thread, p, block, slice, first_chain);
        if (Layout::kSliced) {
            put_states(waiting_h, p, block, thread, slice);
        }
    }

    for (int64_t first_step = block.begin; first_step < block.end; first_step += Layout::kTile) {
        const int64_t next_step = first_step + Layout::kTile;
        const int64_t place = place_of<Layout>(p, first_step, Layout::kTile);
        if (!kEarly) {
            fetch_tile(first_step);
        }
        // Not by round_up: the compiler would make other code of the whole loop. So too in backward.cuh.
        const int rounded = (extent.steps + Layout::kSteps - 1) / Layout::kSteps * Layout::kSteps;
        in.stage(tile, bias, rows, p, extent.steps);

        for (int slice = 0; slice < slices; ++slice) {
            stage_matrices<T, Layout, kCarryOnly>(tile.BC, in.B, in.C, resets, seq_idx, first_step, p);
            if (Layout::kSliced && slice + 1 < slices) {
                in.fetch_slice(p, matrix_rows, (slice + 1) * Layout::kSlice, place, extent, aligned);
            }
            if (kAhead && next_step < block.end) {
                fetch_tile(next_step);
            }
            if (!kAhead && slice == 0) {
                prefetch_tile(rows, p, block, next_step);  // not into registers, which are scarce
            }
            if (!kCarryOnly && adds<Layout>(p) && slice == 0 && rows.step + Layout::kVector <= extent.steps) {
                prefetch_elements(rows, static_cast<const T*>(out), p.out_dim_stride, place);
            }
            if (!kCarryOnly && slice + 1 == slices && is_gated<Layout>(p)) {
                in.fetch_gate(p, rows, place, extent, aligned);
            }
            if (Layout::kSliced) {
                load_decays(thread, p, block, slice, first_parameter);
                take_states(waiting_h, p, block, thread, slice);
            }

            run_tile(thread, tile, p, block, slice, first_parameter, resets, rounded, general);
            keep_states<Layout, kCarryOnly>(thread, p, block, slice, next_step, checkpoint, parameters, first_chain);
            if (Layout::kSliced) {
                put_states(waiting_h, p, block, thread, slice);
            }
        }
        if (checkpoint != nullptr && next_step % MAMBA_SCAN_CHECKPOINT == 0) {
            checkpoint += parameters;
        }

        if (!kCarryOnly) {
            in.finish(tile, D, rows, p, out, place, extent.steps, aligned);
        }
        if (kEarly && !kAhead && next_step < block.end) {
            fetch_tile(next_step);
        }
        __syncwarp();  // y and dt have been read before the next tile overwrites them
    }

    if (!kCarryOnly && p.seqlen == 0 && p.last_state != nullptr) {
        pass_initial_states(thread, p, block, slices, first_chain);
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
        if constexpr (k.code == ScanCode::kFewStates) {
            static_assert(k.walk.tile == kFewStatesTile && k.walk.lanes == kChannelLanes && k.threads == 32 * k.walk.warps,
                          "what the table says");
            return launch_few_states_forward<T, k.walk.warps, k.walk.blocks>(p);
        } else if constexpr (k.code == ScanCode::kPipeline) {
            using Layout = PipelineLayout<k.walk.call, k.walk.warps, k.walk.tile, k.walk.steps / 4, k.walk.states>;
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

template <typename T>
ScanForwardLaunchers ScanForwardLaunchers::of() {
    return {launch_scan_forward<T>, launch_scan_forward_carry<T>};
}

}  // namespace mamba
