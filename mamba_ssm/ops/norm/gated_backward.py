"""The backward operator of the gated norm."""

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import define, make, returns, signature, unpack
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.norm import arguments as common
from mamba_ssm.ops.norm.gated_arguments import Gradients, Inputs, Kept, Options, check, fill, kernel_layout

_NAME = "layernorm_gated_backward"


def _check(dout, inputs, kept, options):
    x = inputs.x
    groups = check(_NAME, inputs, options)
    checks.check_same(_NAME, "dout", dout, x.shape, x, "x", "(..., N)")
    common.check_statistics(_NAME, x, groups, kept.mean, kept.rstd, options.is_rms_norm)


def _allocate(inputs):
    """Backward's outputs, without values."""
    return make(Gradients, [None if tensor is None else empty_like(tensor) for tensor in inputs])


def _backward(dout, *arguments):
    inputs, kept, options = unpack(arguments, Inputs, Kept, Options)
    _check(dout, inputs, kept, options)
    grads = dx, dweight, dbias, dz = _allocate(inputs)
    if dout.numel() == 0:
        for grad in (dweight, dbias):
            if grad is not None:
                grad.zero_()
        return grads
    width = dout.shape[-1]
    kept = Kept(checks.contiguous(kept.mean), kept.rstd.contiguous())
    into = Gradients((dx, width), dweight, dbias, None if dz is None else (dz, width))
    launch_backward(dout.numel() // width, common.in_rows(dout), kernel_layout(inputs), kept, options, into)
    return grads


def launch_backward(rows, dout, inputs, kept, options, grads):
    """Runs the kernels, which write grads. dout, x and z of inputs, dx and dz of grads: (tensor or View, stride of its
    rows); the others contiguous.
    """
    params = abi.MambaNormBackward()
    functions = place(params, inputs.weight)
    fill(params, rows, inputs, options)
    dout, params.dout_row_stride = dout
    params.dout = dout.data_ptr()
    dx, params.dx_row_stride = grads.dx
    params.dx = dx.data_ptr()
    if grads.dz is not None:
        dz, params.dz_row_stride = grads.dz
        params.dz = dz.data_ptr()
    workspace = common.fill_gradients(params, functions, kept.mean, kept.rstd, grads.dweight, grads.dbias)
    run(functions, "norm_backward", params)
    del workspace  # until here


def _backward_fake(dout, *arguments):
    inputs, kept, options = unpack(arguments, Inputs, Kept, Options)
    _check(dout, inputs, kept, options)
    return _allocate(inputs)


gated_norm_backward_op = define(
    f"gated_norm_backward(Tensor dout, {signature(Inputs, Kept, Options)}) -> {returns(Gradients)}",
    _backward,
    _backward_fake,
    planned=(),
)
