"""The inside of a Mamba block as copies of upstream's 1.x have it (Vim, VideoMamba, ...): one autograd function on both
modules, which computes convolution and delta again in backward and writes into parts of one gradient.
"""

import pytest
import torch
import torch.nn.functional as F
from _helpers.cases import DTYPES, assert_close_to_truth, dtype_id, outputs_and_gradients

import causal_conv1d_cuda
import selective_scan_cuda
from mamba_ssm.ops.causal_conv1d import causal_conv1d_ref
from mamba_ssm.ops.selective_scan_interface import selective_scan_ref

BATCH, DIM, LENGTH, RANK, DSTATE = 2, 6, 67, 3, 5


def split(x_dbl, delta_weight, batch):
    """delta, B and C of x_proj's output (B * L, R + 2N)."""
    delta = (delta_weight @ x_dbl[:, :RANK].t()).unflatten(1, (batch, -1)).transpose(0, 1)
    B, C = (part.unflatten(0, (batch, 1, -1)).transpose(2, 3) for part in x_dbl[:, RANK:].split(DSTATE, 1))
    return delta, B.contiguous(), C.contiguous()


class InnerWithoutOutProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, xz, conv_weight, conv_bias, x_weight, delta_weight, A, D, delta_bias):
        x, z = xz.chunk(2, dim=1)
        conv_out = causal_conv1d_cuda.causal_conv1d_fwd(x, conv_weight, conv_bias, None, True)
        x_dbl = F.linear(conv_out.transpose(1, 2).flatten(0, 1), x_weight)
        delta, B, C = split(x_dbl, delta_weight, len(xz))
        out, states, out_z = selective_scan_cuda.fwd(conv_out, delta, A, B, C, D, z, delta_bias, True)
        ctx.save_for_backward(xz, conv_weight, conv_bias, x_weight, delta_weight, A, D, delta_bias)
        ctx.kept = x_dbl, B, C, states, out
        return out_z

    @staticmethod
    def backward(ctx, dout):
        xz, conv_weight, conv_bias, x_weight, delta_weight, A, D, delta_bias = ctx.saved_tensors
        x_dbl, B, C, states, out = ctx.kept
        x, z = xz.chunk(2, dim=1)
        conv_out = causal_conv1d_cuda.causal_conv1d_fwd(x, conv_weight, conv_bias, None, True)
        delta = split(x_dbl, delta_weight, len(xz))[0]
        dxz = torch.empty_like(xz)
        dx, dz = dxz.chunk(2, dim=1)
        dconv_out, ddelta, dA, dB, dC, dD, ddelta_bias, dz, out_z = selective_scan_cuda.bwd(
            conv_out, delta, A, B, C, D, z, delta_bias, dout, states, out, dz, True, True
        )
        assert out_z.shape == dout.shape
        ddelta = ddelta.transpose(0, 1).flatten(1)
        dmatrices = [grad.transpose(2, 3).flatten(0, 2) for grad in (dB, dC)]
        dx_dbl = torch.cat([ddelta.t() @ delta_weight, *dmatrices], dim=1)
        flat = conv_out.transpose(1, 2).flatten(0, 1)
        dconv_out = dconv_out + (dx_dbl @ x_weight).unflatten(0, (len(xz), -1)).transpose(1, 2)
        dx, dconv_weight, dconv_bias = causal_conv1d_cuda.causal_conv1d_bwd(
            x, conv_weight, conv_bias, dconv_out, None, dx, True
        )
        assert dx.data_ptr() == dxz.data_ptr()
        return dxz, dconv_weight, dconv_bias, dx_dbl.t() @ flat, ddelta @ x_dbl[:, :RANK], dA, dD, ddelta_bias


def compiled(**tensors):
    return InnerWithoutOutProjection.apply(*tensors.values())


def reference(xz, conv_weight, conv_bias, x_weight, delta_weight, A, D, delta_bias):
    x, z = xz.chunk(2, dim=1)
    conv_out = causal_conv1d_ref(x, conv_weight, conv_bias, activation="silu")
    delta, B, C = split(F.linear(conv_out.transpose(1, 2).flatten(0, 1), x_weight), delta_weight, len(xz))
    return selective_scan_ref(conv_out, delta, A, B, C, D, z, delta_bias, True)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_one_function_over_both_modules(dtype, device):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=dtype, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).to(device, dtype)

    f32 = torch.float32
    tensors = {
        "xz": normal(BATCH, 2 * DIM, LENGTH),
        "conv_weight": normal(DIM, 4, scale=0.5),
        "conv_bias": normal(DIM),
        "x_weight": normal(RANK + 2 * DSTATE, DIM, scale=0.4),
        "delta_weight": normal(DIM, RANK, scale=0.5),
        "A": -normal(DIM, DSTATE, dtype=f32).abs() - 0.1,
        "D": normal(DIM, dtype=f32),
        "delta_bias": normal(DIM, dtype=f32, scale=0.1),
    }
    found = outputs_and_gradients(compiled, tensors)
    plain = outputs_and_gradients(reference, tensors)
    truth = outputs_and_gradients(reference, tensors, torch.float64)
    # results are rounded to their dtype between the steps, in backward more often than by plain torch
    assert_close_to_truth(found, plain, truth, atol=max(2e-5, 4 * torch.finfo(dtype).eps))
