// Causal convolution, decoding: a few new steps against the inputs kept in conv_state, which is updated in place. Which kernel
// runs.
#pragma once

#include "causal_conv1d/cuda/update_pairs.cuh"
#include "causal_conv1d/cuda/update_strided.cuh"

namespace mamba {

template <typename T>
cudaError_t launch_conv_update(const MambaCausalConv1dUpdate& params) {
    if (pairs_fit_time_last(params)) {
        if constexpr (sizeof(T) == 2) {
            if (has_many_pairs(params)) {
                return launch_update_pairs<T, false, kPairEntries>(params);
            }
        }
        return launch_update_pairs<T, false, 1>(params);
    }
    return pairs_fit_channel_last(params) ? launch_update_pairs<T, true, 1>(params) : launch_update_strided<T>(params);
}

}  // namespace mamba
