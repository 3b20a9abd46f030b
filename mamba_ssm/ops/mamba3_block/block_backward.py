"""The backward operator of mamba3_block: gradients of all its inputs, from these alone.

What the scan takes is prepared again. The gradient of zxBCdt is one tensor that each kernel writes its part of.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import define, make, returns, signature, unpack
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.mamba3_block.block_arguments import (
    Inputs,
    Options,
    check,
    cut,
    fill,
    kernel_layout,
    new_prepared,
    new_zxBCdt_like,
    out_shape,
    prepare,
    scan_inputs,
)
from mamba_ssm.ops.mamba3_scan.backward import FinalGradients, launch_backward
from mamba_ssm.ops.mamba3_scan.backward import Gradients as ScanGradients

_NAME = "mamba3_block_backward"


class Gradients(typing.NamedTuple):
    """The operator's results, in the order of their inputs, None for those of absent ones."""

    dzxBCdt: torch.Tensor
    ddt_bias: torch.Tensor
    dB_weight: torch.Tensor
    dC_weight: torch.Tensor
    dB_bias: torch.Tensor
    dC_bias: torch.Tensor
    dD: torch.Tensor | None
    dmimo_x: torch.Tensor | None
    dmimo_z: torch.Tensor | None
    dmimo_o: torch.Tensor | None
    dnorm_weight: torch.Tensor | None
    dangle_state: torch.Tensor | None
    dssm_state: torch.Tensor | None
    dk_state: torch.Tensor | None
    dv_state: torch.Tensor | None


def _check(dout, finals, inputs, options):
    sizes, zxBCdt = check(inputs, options), inputs.zxBCdt
    letters = "(B, L, H, P) or (B, L, R, H, P)"
    checks.check_same(_NAME, "dout", dout, out_shape(sizes, inputs), zxBCdt, "zxBCdt", letters)
    for name, gradient, shape in zip(FinalGradients._fields, finals, sizes.scan.states, strict=True):
        if gradient is not None:
            checks.check_float32(_NAME, name, gradient, shape, zxBCdt, "zxBCdt", "as the state")
    return sizes


def _allocate(inputs):
    """The operator's outputs, without values."""
    others = inputs[1 : len(Gradients._fields)]
    return make(Gradients, (new_zxBCdt_like(inputs), *(None if x is None else empty_like(x) for x in others)))


def _backward(dout, *arguments):
    finals, inputs, options = unpack(arguments, FinalGradients, Inputs, Options)
    sizes = _check(dout, finals, inputs, options)
    grads = _allocate(inputs)
    nothing = sizes.scan.sequences == 0 or sizes.scan.nheads == 0
    if nothing or sizes.scan.batch * sizes.scan.seqlen == 0:
        for grad in grads:
            if grad is not None:
                grad.zero_()
    if nothing:
        return grads
    finals = make(FinalGradients, [checks.contiguous(gradient) for gradient in finals])
    inputs, row_stride = kernel_layout(inputs)
    parts, dparts = cut(inputs.zxBCdt, row_stride, sizes), cut(grads.dzxBCdt, grads.dzxBCdt.shape[2], sizes)
    scan = scan_inputs(inputs, options, parts, prepare(sizes, inputs, options, parts, row_stride))
    zxBCdt = inputs.zxBCdt  # packed sequences may leave steps out at the end
    dprepared = new_prepared(sizes, zxBCdt.new_empty if inputs.cu_seqlens is None else zxBCdt.new_zeros)
    dz = dparts.z if options.gate else None
    if not options.gate:
        grads.dzxBCdt.narrow(2, 0, sizes.layer.columns[0]).zero_()
    steps = dprepared.C, dprepared.B, dparts.x, dprepared.ADT, dprepared.DT, dparts.trap
    projections = grads.dmimo_x, grads.dmimo_z, grads.dmimo_o, grads.dnorm_weight
    scan_grads = (*steps, grads.dC_bias, grads.dB_bias, dparts.angles, grads.dD, dz, *projections, *grads[11:])
    launch_backward(
        sizes.scan, checks.unit_last_stride(dout), finals, scan, options.scan, make(ScanGradients, scan_grads)
    )
    _prepare_backward(sizes, inputs, options, parts, row_stride, dprepared, dparts, grads)
    return grads


def _prepare_backward(sizes, inputs, options, parts, row_stride, dprepared, dparts, grads):
    """The gradients of B, C, dt and A in dzxBCdt, and of the parameters that make the scan's inputs of these."""
    params = abi.MambaMamba3InputsBackward()
    functions = place(params, inputs.zxBCdt)
    fill(params, sizes, inputs, options, parts, row_stride)
    workspace = dprepared.DT.new_empty(functions["mamba3_inputs_backward_workspace"](params.forward), dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    params.dq_out, params.dk_out, params.dadt_out, params.ddt_out = (tensor.data_ptr() for tensor in dprepared)
    params.dq, params.dk, params.ddt, params.da = dparts.C, dparts.B, dparts.dt, dparts.A
    params.dq_weight, params.dk_weight = grads.dC_weight.data_ptr(), grads.dB_weight.data_ptr()
    params.ddt_bias = grads.ddt_bias.data_ptr()
    params.drow_stride = grads.dzxBCdt.shape[2]
    run(functions, "mamba3_inputs_backward", params)
    del workspace  # held until here: the kernels have it now


def _backward_fake(dout, *arguments):
    finals, inputs, options = unpack(arguments, FinalGradients, Inputs, Options)
    _check(dout, finals, inputs, options)
    return _allocate(inputs)


mamba3_block_backward_op = define(
    f"{_NAME}(Tensor dout, {signature(FinalGradients, Inputs, Options)}) -> {returns(Gradients)}",
    _backward,
    _backward_fake,
    planned=(),
)
