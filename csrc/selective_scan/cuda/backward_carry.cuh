// The first launch of a CUDA backward scan whose length is split into segments, or over several devices.
#pragma once

#include "selective_scan/cuda/backward_elements.cuh"

namespace mamba {

template <typename T, class Layout>
struct alignas(16) BackwardCarryShared {
    MatrixTile<T, Layout> BC;
    float dt[Layout::kChannels * Layout::kRow];
    float dy[Layout::kChannels * Layout::kRow];
    int resets[Layout::kTile];
    float bias[Layout::kChannels];
};

template <class Layout>
struct BackwardCarryThread {
    Chains<Layout> w, A;  // w = a_t g_t
    ConstantMatrices<Layout> constants;
    float dt_sum[Layout::kEach];
    bool restarted;
};

// Takes w back through a tile. kGeneral as in forward_tile; count_dt: once for all slices.
template <bool kGeneral, typename T, class Layout>
__device__ __forceinline__ void carry_tile(const ScanThread<T, Layout>& scan, BackwardCarryThread<Layout>& thread,
                                           const BackwardCarryShared<T, Layout>& shared, bool count_dt) {
#pragma unroll 2
    for (int step = Layout::kTile - 4; step >= 0; step -= 4) {
        Steps4 C[Layout::kStates];
        unroll<Layout::kStates>(
            [&](int s) { C[s] = shared.BC.read_one(shared.BC.words + scan.order.state(s) * Layout::kRow + step); });
#pragma unroll
        for (int c = 0; c < Layout::kEach; ++c) {
            const Steps4 dt = read4(shared.dt + scan.row(c) * Layout::kRow + step);
            const Steps4 dy = read4(shared.dy + scan.row(c) * Layout::kRow + step);
            if (count_dt) {
                thread.dt_sum[c] += (dt.at[0] + dt.at[1]) + (dt.at[2] + dt.at[3]);
            }
#pragma unroll
            for (int s = 0; s < Layout::kStates; ++s) {
#pragma unroll
                for (int j = 3; j >= 0; --j) {
                    float& w = thread.w[c][s];
                    const float C_now = kGeneral && !scan.p.variable_C ? thread.constants.C[c][s] : C[s].at[j];
                    w = exp2_fast(dt.at[j] * thread.A[c][s]) * fmaf(C_now, dy.at[j], w);
                    if (kGeneral) {
                        w = shared.resets[step + j] ? 0.0f : w;
                        thread.restarted |= shared.resets[step + j] != 0;
                    }
                }
            }
        }
    }
}

// Fills the workspace for all segments from first_segment on: a_t g_t of the segment's first step if nothing came from later
// ones.
template <typename T, class Layout>
__global__ void __launch_bounds__(Layout::kThreads)
    selective_scan_backward_carry_kernel(const ScanBackward q, bool aligned, int64_t first_segment) {
    __shared__ BackwardCarryShared<T, Layout> shared;
    MAMBA_DYNAMIC_SHARED(4, float, waiting_w);  // of sliced layouts
    griddepcontrol_launch_dependents();
    const MambaSelectiveScan& p = q.forward;
    ScanThread<T, Layout> scan(p, aligned, waiting_w, first_segment);
    const ScanBlock& block = scan.block;
    const BackwardRows<T, Layout> rows(q, block);
    BackwardCarryThread<Layout> thread = {};
    for (int slice = 0; slice < scan.slices(); ++slice) {
        scan.put_away(thread.w, slice);
    }
    scan.clear_resets(shared.resets);
    stage_parameter<Layout>(shared.bias, p.delta_bias, block);
    __syncthreads();

    for (int64_t tile = ceil_div(block.end, Layout::kTile) - 1; tile >= block.begin / Layout::kTile; --tile) {
        const int64_t first_step = tile * Layout::kTile;
        scan.begin_tile(first_step, false);
        BackwardInputs<T, Layout> in;
        scan.with_tile_access([&](auto access) {
            constexpr Access kAccess = decltype(access)::kAccess;
            in.template fetch<kAccess>(rows, q, place_of<Layout>(p, first_step, Layout::kTile), scan.steps);
            scan.template fetch_matrices<kAccess>(0, first_step, false, true);
        });
        if (is_reverse<Layout>(p)) {
            in.mirror(is_gated<Layout>(p));
        }
        stage_time_and_gradient<T, Layout>(shared.dt, shared.dy, shared.bias, in, rows, p, scan.steps);
        if (first_step > block.begin) {
            prefetch_inputs(rows, q, place_of<Layout>(p, first_step - Layout::kTile, Layout::kTile));
        }
        for (int slice = 0; slice < scan.slices(); ++slice) {
            scan.stage_matrices(shared.resets, first_step, [&] { shared.BC.put_one(scan.C_staged); });
            scan.fetch_next_slice(slice, first_step, false, true);
            scan.load_A(thread.A, slice);
            scan.take_back(thread.w, slice);
            if (scan.general) {
                scan.load_constants(thread.constants, slice);
                carry_tile<true>(scan, thread, shared, slice == 0);
            } else {
                carry_tile<false>(scan, thread, shared, slice == 0);
            }
            scan.put_away(thread.w, slice);
            if (first_step == block.begin) {
                scan.store_carry(thread.w, thread.A, thread.dt_sum, thread.restarted, slice);
            }
        }
        __syncwarp();  // the rows have been read before the next tile overwrites them
    }
}

}  // namespace mamba
