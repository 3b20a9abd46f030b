// Causal convolution, decoding: a few new steps against the inputs kept in conv_state, which is updated in place. Which kernel
// runs.
#pragma once

#include "causal_conv1d/cuda/update_pairs.cuh"
#include "causal_conv1d/cuda/update_strided.cuh"

namespace mamba {

template <typename T, int kSteps, bool kChannelLast, int kChannels = 2>
bool launch_if_pairs_fit(const MambaCausalConv1dUpdate& params, cudaError_t* error) {
    const bool fit = pairs_fit<PairState<T, kSteps, kChannelLast, kChannels>>(params, kSteps, kChannelLast);
    if (fit) {
        *error = launch_update_pairs<T, kSteps, kChannelLast, kChannels>(params);
    }
    return fit;
}

template <typename T>
cudaError_t launch_conv_update(const MambaCausalConv1dUpdate& params) {
    cudaError_t error = cudaSuccess;
    const bool launched = launch_if_pairs_fit<T, 4, false>(params, &error) || launch_if_pairs_fit<T, 4, true>(params, &error) ||
                          launch_if_pairs_fit<T, 3, false>(params, &error) || launch_if_pairs_fit<T, 3, true>(params, &error) ||
                          launch_if_pairs_fit<T, 4, false, 1>(params, &error);
    return launched ? error : launch_update_strided<T>(params);
}

}  // namespace mamba
