"""The backward operator of Mamba-3's scan: gradients of every input, from the inputs alone."""

import typing
from typing import Annotated

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import define, make, no_autocast, returns, signature, unpack
from mamba_ssm.ops._shared.spec import Arg
from mamba_ssm.ops.mamba3_scan.arguments import Inputs, Options, check, fill, kernel_layout, new_like, out_shape
from mamba_ssm.ops.mamba3_scan.chunks import scan_chunks
from mamba_ssm.ops.mamba3_scan.packed import scan_packed

_NAME = "mamba3_scan_backward"
MOST_CUDA_RANK = 16  # what the CUDA kernels take


class FinalGradients(typing.NamedTuple):
    """Those of the final states; None: zero."""

    dangle_final: Annotated[torch.Tensor | None, Arg("", "U, H, S", field="dfinal_angle")]
    dssm_final: Annotated[torch.Tensor | None, Arg("", "U, H, P, N", field="dfinal_ssm")]
    dk_final: Annotated[torch.Tensor | None, Arg("", "U, R, H, N", field="dfinal_k")]
    dv_final: Annotated[torch.Tensor | None, Arg("", "U, H, P", field="dfinal_v")]


class Incoming(typing.NamedTuple):
    dout: Annotated[torch.Tensor, Arg("", "B, L, H, P | B, L, R, H, P", "batch len head - | batch len rank head -")]


_QK, _BIAS, _PROJECTION = Arg("", "B, L, R, G, N"), Arg("", "H, R, N"), Arg("", "H, R, P")
_HEADS, _STEPS = Arg("", "B, L, H, P", ". step . ."), Arg("", "B, L, H", ". step .")
_ANGLES = Arg("", "B, L, S | B, L, H, S", ". step . | . step . .", field="dangles", stem="dangle")


class Gradients(typing.NamedTuple):
    """The operator's results, in the order of their inputs, None for those of absent ones."""

    dQ: Annotated[torch.Tensor, _QK._replace(field="dq")]
    dK: Annotated[torch.Tensor, _QK._replace(field="dk")]
    dV: Annotated[torch.Tensor, _HEADS._replace(field="dv")]
    dADT: Annotated[torch.Tensor, Arg("", "B, L, H", field="dadt")]
    dDT: Annotated[torch.Tensor, Arg("", "B, L, H", field="ddt")]
    dTrap: Annotated[torch.Tensor, _STEPS._replace(field="dtrap")]
    dQ_bias: Annotated[torch.Tensor, _BIAS._replace(field="dq_bias")]
    dK_bias: Annotated[torch.Tensor, _BIAS._replace(field="dk_bias")]
    dAngles: Annotated[torch.Tensor, _ANGLES]
    dD: Annotated[torch.Tensor | None, Arg("", "H")]
    dZ: Annotated[torch.Tensor | None, _HEADS._replace(field="dz")]
    dMIMO_V: Annotated[torch.Tensor | None, _PROJECTION._replace(field="dmimo_v")]
    dMIMO_Z: Annotated[torch.Tensor | None, _PROJECTION._replace(field="dmimo_z")]
    dMIMO_Out: Annotated[torch.Tensor | None, _PROJECTION._replace(field="dmimo_out")]
    dnorm_weight: Annotated[torch.Tensor | None, Arg("", "H, P")]
    dangle_state: Annotated[torch.Tensor | None, Arg("", "U, H, S")]
    dssm_state: Annotated[torch.Tensor | None, Arg("", "U, H, P, N")]
    dk_state: Annotated[torch.Tensor | None, Arg("", "U, R, H, N")]
    dv_state: Annotated[torch.Tensor | None, Arg("", "U, H, P")]


def _check(dout, finals, inputs):
    sizes, V = check(inputs), inputs.V
    shape = out_shape(sizes, inputs)
    checks.check_same(_NAME, "dout", dout, shape, V, "V", "(B, L, H, P) or (B, L, R, H, P)")
    for name, gradient, shape in zip(FinalGradients._fields, finals, sizes.states, strict=True):
        if gradient is not None:
            checks.check_float32(_NAME, name, gradient, shape, V, "V", "as the state")
    return sizes


def _allocate(inputs):
    """The operator's outputs, without values."""
    tensors = inputs[: len(Gradients._fields)]
    return make(Gradients, [None if tensor is None else new_like(tensor, inputs) for tensor in tensors])


def _backward(dout, *arguments):
    finals, inputs, options = unpack(arguments, FinalGradients, Inputs, Options)
    sizes = _check(dout, finals, inputs)
    grads = _allocate(inputs)
    if sizes.sequences == 0 or sizes.nheads == 0:
        for grad in grads:
            if grad is not None:
                grad.zero_()
        return grads
    dout, inputs = checks.unit_last_stride(dout), kernel_layout(inputs)
    finals = make(FinalGradients, [checks.contiguous(gradient) for gradient in finals])
    launch_backward(sizes, dout, finals, inputs, options, grads)
    return grads


def _backward_fake(dout, *arguments):
    finals, inputs, _ = unpack(arguments, FinalGradients, Inputs, Options)
    _check(dout, finals, inputs)
    return _allocate(inputs)


def launch_backward(sizes, dout, finals, inputs, options, grads):
    """Writes grads, of tensors in kernel layout; those of V, Z, Trap and Angles may be Views of one tensor, their steps
    apart by any stride.
    """
    params = abi.MambaMamba3Backward()
    functions = place(params, dout)
    fill(params, sizes, inputs, options, Incoming(dout), finals, grads)
    workspace = dout.new_empty(functions["mamba3_backward_workspace"](params.forward), dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    run(functions, "mamba3_backward", params)
    del workspace  # held until here: the kernels have it now


def gradients_by_torch(dout, dfinals, inputs, options):
    """The same by torch's operators, chunk by chunk: for what has no kernel."""
    with torch.enable_grad(), no_autocast(inputs.V):
        floating = [tensor is not None and tensor.is_floating_point() for tensor in inputs]
        leaves = [
            tensor.detach().requires_grad_() if is_floating else tensor
            for tensor, is_floating in zip(inputs, floating, strict=True)
        ]
        out, finals = scan_packed(scan_chunks, make(Inputs, leaves), options)
        given = [pair for pair in zip((out, *finals), (dout, *dfinals), strict=True) if pair[1] is not None]
        given = [(result, gradient) for result, gradient in given if result.requires_grad]
        wanted = [leaf for leaf, is_floating in zip(leaves, floating, strict=True) if is_floating]
        results, gradients = zip(*given, strict=True)
        found = iter(torch.autograd.grad(results, wanted, gradients, allow_unused=True, materialize_grads=True))
    grads = [next(found) if is_floating else None for is_floating in floating]
    return grads[: len(Gradients._fields)]


mamba3_scan_backward_op = define(
    f"mamba3_scan_backward(Tensor dout, {signature(FinalGradients, Inputs, Options)}) -> {returns(Gradients)}",
    _backward,
    _backward_fake,
    planned=(),
)
