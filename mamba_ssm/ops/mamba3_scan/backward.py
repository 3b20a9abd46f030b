"""The backward operator of Mamba-3's scan: gradients of every input, from the inputs alone."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, pointer, run
from mamba_ssm._torch import define, make, no_autocast, returns, signature, unpack
from mamba_ssm.ops.mamba3_scan.arguments import Inputs, Options, check, fill, kernel_layout, new_like, out_shape
from mamba_ssm.ops.mamba3_scan.chunks import scan_chunks
from mamba_ssm.ops.mamba3_scan.packed import scan_packed

_NAME = "mamba3_scan_backward"
MOST_CUDA_RANK = 16  # what the CUDA kernels take


class FinalGradients(typing.NamedTuple):
    """Those of the final states; None: zero."""

    dangle_final: torch.Tensor | None
    dssm_final: torch.Tensor | None
    dk_final: torch.Tensor | None
    dv_final: torch.Tensor | None


class Gradients(typing.NamedTuple):
    """The operator's results, in the order of their inputs, None for those of absent ones."""

    dQ: torch.Tensor
    dK: torch.Tensor
    dV: torch.Tensor
    dADT: torch.Tensor
    dDT: torch.Tensor
    dTrap: torch.Tensor
    dQ_bias: torch.Tensor
    dK_bias: torch.Tensor
    dAngles: torch.Tensor
    dD: torch.Tensor | None
    dZ: torch.Tensor | None
    dMIMO_V: torch.Tensor | None
    dMIMO_Z: torch.Tensor | None
    dMIMO_Out: torch.Tensor | None
    dnorm_weight: torch.Tensor | None
    dangle_state: torch.Tensor | None
    dssm_state: torch.Tensor | None
    dk_state: torch.Tensor | None
    dv_state: torch.Tensor | None


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
    fill(params, sizes, inputs, options)
    workspace = dout.new_empty(functions["mamba3_backward_workspace"](params.forward), dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    params.dout = dout.data_ptr()
    if inputs.MIMO_Out is None:
        params.dout_batch_stride, params.dout_len_stride, params.dout_rank_stride, params.dout_head_stride, _ = (
            dout.stride()
        )
    else:
        params.dout_batch_stride, params.dout_len_stride, params.dout_head_stride, _ = dout.stride()
    params.dfinal_angle, params.dfinal_ssm, params.dfinal_k, params.dfinal_v = map(pointer, finals)
    params.dq = grads.dQ.data_ptr()
    params.dk = grads.dK.data_ptr()
    params.dv = grads.dV.data_ptr()
    params.dv_step_stride = grads.dV.stride()[1]
    params.dadt = grads.dADT.data_ptr()
    params.ddt = grads.dDT.data_ptr()
    params.dtrap = grads.dTrap.data_ptr()
    params.dtrap_step_stride = grads.dTrap.stride()[1]
    params.dq_bias = grads.dQ_bias.data_ptr()
    params.dk_bias = grads.dK_bias.data_ptr()
    params.dangles = grads.dAngles.data_ptr()
    params.dangle_step_stride = grads.dAngles.stride()[1]
    params.dD = pointer(grads.dD)
    if grads.dZ is not None:
        params.dz = grads.dZ.data_ptr()
        params.dz_step_stride = grads.dZ.stride()[1]
    params.dmimo_v = pointer(grads.dMIMO_V)
    params.dmimo_z = pointer(grads.dMIMO_Z)
    params.dmimo_out = pointer(grads.dMIMO_Out)
    params.dnorm_weight = pointer(grads.dnorm_weight)
    params.dangle_state = pointer(grads.dangle_state)
    params.dssm_state = pointer(grads.dssm_state)
    params.dk_state = pointer(grads.dk_state)
    params.dv_state = pointer(grads.dv_state)
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
