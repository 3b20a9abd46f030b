// One step of the convolution, on rows of floats, as the decode steps of mamba_cpu run it.
#pragma once

#include "mamba_kernels.h"

namespace mamba {

// x -> out, with silu: (batch, dim) rows at these strides. Step: a struct with the fields conv_* of MambaMambaStep.
template <typename Step>
int32_t step_convolution(const Step& p, int64_t dim, const float* x, int64_t x_stride, float* out, int64_t out_stride) {
    MambaCausalConv1dUpdate update = {};
    update.run = p.run;
    update.batch = update.state_rows = p.batch;
    update.seqlen = 1;
    update.dim = dim;
    update.state_len = p.state_len;
    update.width = p.width;
    update.silu = 1;
    update.dtype = MAMBA_FLOAT32;
    update.state_dtype = p.conv_state_dtype;
    update.weight_dtype = p.conv_weight_dtype;
    update.bias_dtype = p.conv_bias_dtype;
    update.x = x;
    update.conv_state = p.conv_state;
    update.weight = p.conv_weight;
    update.bias = p.conv_bias;
    update.out = out;
    update.x_batch_stride = x_stride;
    update.x_dim_stride = update.out_dim_stride = 1;
    update.state_row_stride = p.conv_state_batch_stride;
    update.state_dim_stride = p.conv_state_dim_stride;
    update.state_len_stride = p.conv_state_len_stride;
    update.out_batch_stride = out_stride;
    return mamba_causal_conv1d_update(&update);
}

}  // namespace mamba
