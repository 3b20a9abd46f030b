// Which of the decode step's kernels runs, and how its rows are shared out.
#pragma once

#include "common/alignment.h"
#include "common/cuda_device.h"
#include "state_update/cuda/kernel.cuh"
#include "state_update/cuda/steps.cuh"
#include "state_update/launch.h"

namespace mamba {

// Blocks are smaller where they are fewer than this: over more multiprocessors.
constexpr int64_t kUpdateFewBlocks = 128;

// How many batch entries a warp takes. The last wave of warps takes as long as a full one, and a warp's start as `start`
// entries. Half a warp's walk more goes by while fewer and fewer warps run, since they do not end together.
inline int64_t batches_of_warp(int64_t batch, int64_t units, int64_t warps_at_once, int64_t start) {
    constexpr int64_t kMost = 16;
    int64_t best = 1, least = INT64_MAX;
    for (int64_t batches = 1; batches <= kMost && batches <= batch; ++batches) {
        const int64_t waves = ceil_div(units * ceil_div(batch, batches), warps_at_once);
        const int64_t time = (2 * waves + 1) * (batches + start);
        if (time < least) {
            least = time;
            best = batches;
        }
    }
    return best;
}

inline bool is_several_steps(const MambaSelectiveStateUpdate& params) {
    return params.seqlen > 1 || params.dst_state_batch_indices != nullptr || params.step_states != nullptr;
}

template <class Rows, class Params>
cudaError_t launch_state_update_rows(const Params& params, bool scalar_A) {
    const bool steps = !Rows::kWhole && is_several_steps(params);
    const DeviceLimits device(params.run.device);
    if (device.error != cudaSuccess) {
        return device.error;
    }
    StateUpdateLayout layout;
    layout.lanes_log2 = ceil_log2(ceil_div(params.dstate, Rows::kStates), ceil_log2(Rows::kRows, 0, 5), 5);
    const int64_t parts = ceil_div(params.headdim, Rows::kRows << (5 - layout.lanes_log2));
    const int64_t units = parts * params.nheads;
    int64_t at_once = 4 * kUpdateFours<Rows, false> * static_cast<int64_t>(device.processors);
    int warps_log2 = kUpdateWarpsLog2<Rows, false>;
    if (scalar_A) {
        at_once = 4 * kUpdateFours<Rows, true> * static_cast<int64_t>(device.processors);
        warps_log2 = kUpdateWarpsLog2<Rows, true>;
    }
    const int64_t batches = steps ? 1 : batches_of_warp(params.batch, units, at_once, Rows::kWhole ? 1 : 2);
    const int64_t warps = units * ceil_div(params.batch, batches);
    if (warps < at_once && warps_log2 > 2) {  // where there is room, smaller blocks spread more evenly
        warps_log2 = 2;
    }
    while (warps_log2 > 0 && warps >> warps_log2 < kUpdateFewBlocks) {
        --warps_log2;
    }
    if (warps > INT32_MAX || params.headdim > INT32_MAX || params.batch > INT32_MAX) {
        return cudaErrorInvalidConfiguration;
    }
    layout.parts = Divisor(parts);
    layout.units = Divisor(units);
    layout.group_heads = Divisor(params.nheads / params.ngroups);
    layout.batches = static_cast<uint32_t>(batches);
    const auto launch = [&](auto kernel, const auto& given) {
        return launch_programmatic_dependent(kernel, ceil_div(warps, 1 << warps_log2), 32 << warps_log2, 0, params.run.stream,
                                             given, layout);
    };
    if constexpr (!Rows::kWhole) {
        if (steps) {
            return scalar_A ? launch(selective_state_update_steps_kernel<Rows, true>, params)
                            : launch(selective_state_update_steps_kernel<Rows, false>, params);
        }
    }
    return scalar_A ? launch(selective_state_update_kernel<Rows, true, Params>, params)
                    : launch(selective_state_update_kernel<Rows, false, Params>, params);
}

// Rows of whole vectors of 16 bytes.
template <typename State, int kRows, int kVectors>
cudaError_t launch_vector_rows(const MambaSelectiveStateUpdate& params, bool scalar_A) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(State));
    const int lanes_log2 = ceil_log2(ceil_div(params.dstate, kVector * kVectors), ceil_log2(kRows, 0, 5), 5);
    using Usual = UsualStateUpdate<State>;
    if (!is_several_steps(params) &&
        Usual::fits(params, kRows << (5 - lanes_log2), static_cast<int64_t>(kVector * kVectors) << lanes_log2)) {
        return launch_state_update_rows<StateRows<State, kVector, kRows, kVectors, true>>(Usual{{params}}, scalar_A);
    }
    return launch_state_update_rows<StateRows<State, kVector, kRows, kVectors>>(params, scalar_A);
}

template <typename State>
cudaError_t launch_state_update(const MambaSelectiveStateUpdate& params) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(State));
    const bool scalar_A = params.A_dstate_stride == 0 || params.dstate == 1;
    // Whether a tensor's rows of states are neighbours in memory, kVector of which can be read at once.
    const auto vectors = [&](const void* data, int32_t dtype, int64_t dstate_stride, auto... strides) {
        const int64_t bytes = dtype_size(dtype) * kVector;
        return dstate_stride == 1 && rows_aligned(data, dtype_size(dtype), bytes < 16 ? bytes : 16, strides...);
    };
    const int64_t heads = params.nheads, headdim = params.headdim, steps = params.seqlen;
    const bool all_vectors =
        params.dstate % kVector == 0 &&
        vectors(params.state, params.state_dtype, params.state_dstate_stride,
                used_stride(params.state_rows, params.state_row_stride), used_stride(heads, params.state_head_stride),
                used_stride(headdim, params.state_dim_stride)) &&
        vectors(params.step_states, params.state_dtype, params.step_states == nullptr ? 1 : params.step_states_dstate_stride,
                used_stride(params.batch, params.step_states_batch_stride), used_stride(steps, params.step_states_len_stride),
                used_stride(heads, params.step_states_head_stride), used_stride(headdim, params.step_states_dim_stride)) &&
        vectors(params.B, params.BC_dtype, params.B_dstate_stride, used_stride(params.batch, params.B_batch_stride),
                used_stride(steps, params.B_len_stride), used_stride(params.ngroups, params.B_group_stride)) &&
        vectors(params.C, params.BC_dtype, params.C_dstate_stride, used_stride(params.batch, params.C_batch_stride),
                used_stride(steps, params.C_len_stride), used_stride(params.ngroups, params.C_group_stride)) &&
        (scalar_A || vectors(params.A, params.A_dtype, params.A_dstate_stride, used_stride(heads, params.A_head_stride),
                             used_stride(headdim, params.A_dim_stride)));
    if (!all_vectors) {
        return launch_state_update_rows<StateRows<State, 1, 1, 8>>(params, scalar_A);
    }
    if (params.dstate <= 2 * kVector) {  // two lanes a row
        return launch_vector_rows<State, 2, 1>(params, scalar_A);
    }
    if constexpr (32 * kVector < MAMBA_MAX_DSTATE) {
        if (params.dstate > 32 * kVector) {
            return launch_vector_rows<State, 2, 2>(params, scalar_A);
        }
    }
    return launch_vector_rows<State, 4, 1>(params, scalar_A);
}

template <typename State>
StateUpdateLaunchers StateUpdateLaunchers::of() {
    StateUpdateLaunchers launchers;
    launchers.update = launch_state_update<State>;
    return launchers;
}

}  // namespace mamba
