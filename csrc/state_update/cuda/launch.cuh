// How the decode step's kernels share out the rows.
#pragma once

#include "common/kernel_launch.cuh"
#include "state_update/cuda/kernel.cuh"
#include "state_update/cuda/steps.cuh"
#include "state_update/kernels.h"
#include "state_update/launch.h"

namespace mamba {

// Blocks are smaller where they are fewer than this: over more multiprocessors.
constexpr int64_t kUpdateFewBlocks = 128;

// How many batch entries a warp takes. The last wave of warps takes as long as a full one, and a warp's start as an entry. Half
// a warp's walk more passes while fewer and fewer warps run, since they do not end together.
inline int64_t batches_of_warp(int64_t batch, int64_t units, int64_t warps_at_once) {
    constexpr int64_t kMost = 16;
    int64_t best = 1, least = INT64_MAX;
    for (int64_t batches = 1; batches <= kMost && batches <= batch; ++batches) {
        const int64_t waves = ceil_div(units * ceil_div(batch, batches), warps_at_once);
        const int64_t time = (2 * waves + 1) * (batches + 1);
        if (time < least) {
            least = time;
            best = batches;
        }
    }
    return best;
}

// Warps of a block, as a logarithm, at most `most`: blocks of four where there is room spread more evenly.
inline int block_warps_log2(int64_t warps, int64_t warps_at_once, int most) {
    int log2 = warps < warps_at_once && most > 2 ? 2 : most;
    while (log2 > 0 && warps >> log2 < kUpdateFewBlocks) {
        --log2;
    }
    return log2;
}

template <typename State, int kKernel>
cudaError_t launch_state_update_row(const MambaSelectiveStateUpdate& params, int processors) {
    constexpr StateUpdateKernel k = kStateUpdateKernels[kKernel];
    using Rows = StateRows<State, 16 / static_cast<int>(sizeof(State)), k.rows, k.vectors, k.whole_tiles>;
    StateUpdateLayout layout;
    layout.lanes_log2 = state_lanes_log2(params.dstate, params.state_dtype, k.rows, k.vectors);
    const int64_t parts = ceil_div(params.headdim, k.rows << (5 - layout.lanes_log2));
    const int64_t units = parts * params.nheads, at_once = int64_t{k.blocks} * (k.threads / 32) * processors;
    const int64_t batches = k.whole_tiles ? batches_of_warp(params.batch, units, at_once) : 1;
    const int64_t warps = units * ceil_div(params.batch, batches);
    const int warps_log2 = block_warps_log2(warps, at_once, ceil_log2(k.threads / 32, 0, 5));
    if (warps > INT32_MAX || params.headdim > INT32_MAX || params.batch > INT32_MAX) {
        return cudaErrorInvalidConfiguration;
    }
    layout.parts = Divisor(parts);
    layout.units = Divisor(units);
    layout.group_heads = Divisor(params.nheads / params.ngroups);
    layout.batches = static_cast<uint32_t>(batches);
    layout.tied_A = has_tied_A(params);
    layout.vectors = has_vectors(params);
    const auto launch = [&](auto kernel, const auto& given) {
        return launch_programmatic_dependent(kernel, ceil_div(warps, 1 << warps_log2), 32 << warps_log2, 0, params.run.stream,
                                             given, layout);
    };
    if constexpr (k.whole_tiles) {
        return launch(selective_state_update_kernel<Rows, k.tied_A, k.threads, k.blocks>,
                      StateUpdateOf16BitInputs<State>{{params}});
    } else {
        return launch(selective_state_update_steps_kernel<Rows, k.threads>, params);
    }
}

template <typename State>
cudaError_t launch_state_update(const MambaSelectiveStateUpdate& params, int kernel, int processors) {
    return launch_row<State, kStateUpdateKernels>(state_update_table, kernel, [&](auto row) {
        return launch_state_update_row<State, decltype(row)::kRow>(params, processors);
    });
}

template <typename State>
StateUpdateLaunchers StateUpdateLaunchers::of() {
    StateUpdateLaunchers launchers;
    launchers.update = launch_state_update<State>;
    return launchers;
}

}  // namespace mamba
