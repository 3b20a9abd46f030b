"""What selective_scan_cuda, _core and _oflex call: the scan as the CUDA modules of upstream and of VMamba have it.

Their checkpoints are a tensor x (B, D, chunks, 2N) float32: a chunk for each 2048 steps, the state after it in its odd
elements. Callers read the last of these states, and hand x to backward.
"""

import math

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._torch import call, is_compiling
from mamba_ssm.ops.selective_scan.arguments import NAME
from mamba_ssm.ops.selective_scan.backward import Gradients, selective_scan_backward_op
from mamba_ssm.ops.selective_scan.forward import selective_scan_op

_CHUNK = 2048


@torch.no_grad()
def forward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, x); arguments as those of selective_scan_fn. As with a compiled module, no gradient passes."""
    options = bool(delta_softplus), True, True, False
    out, last_state, checkpoints = call(selective_scan_op, u, delta, A, B, C, D, None, delta_bias, None, None, *options)
    return out, _with_checkpoints(last_state, checkpoints, u.shape[2])


@torch.no_grad()
def gated(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
) -> torch.Tensor:
    """forward's out before it was rounded, times silu(z): from a scan of its own, which is exact and about as fast as
    reading and gating what has been written.
    """
    options = bool(delta_softplus), False, False, False
    return call(selective_scan_op, u, delta, A, B, C, D, z, delta_bias, None, None, *options)[0]


def backward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    dout: torch.Tensor,
    x: torch.Tensor,
    delta_softplus: bool,
    recompute_out: bool = False,
) -> Gradients:
    """The gradients, in the dtypes of their inputs; with recompute_out the output as well, gated where z is given."""
    inputs = u, delta, A, B, C, D, z, delta_bias, None, None
    softplus = bool(delta_softplus)
    checkpoints = _checkpoints_behind(x, u)
    if checkpoints is None:
        *_, checkpoints = call(selective_scan_op, *inputs, softplus, False, True, False)
    options = softplus, False, bool(recompute_out), False
    return Gradients(*call(selective_scan_backward_op, dout, None, *inputs, checkpoints, *options))


# ---- x ---------------------------------------------------------------------------------------------------------------


def _with_checkpoints(last_state, checkpoints, seqlen):
    """x, whose storage goes on after its last element: there lie the checkpoints, which our backward reads."""
    batch, dim, dstate = last_state.shape
    shape = batch, dim, max(1, -(-seqlen // _CHUNK)), 2 * dstate
    size = math.prod(shape)
    memory = checkpoints.new_empty(size + checkpoints.numel())
    memory[size:] = checkpoints
    x = memory[:size].zero_().view(shape)
    every = abi.SCAN_CHECKPOINT
    states = checkpoints[:-2].view(batch, max(0, seqlen - 1) // every, dim, dstate)
    x[:, :, :-1, 1::2] = states[:, _CHUNK // every - 1 :: _CHUNK // every].transpose(1, 2)
    x[:, :, -1, 1::2] = last_state
    return x


def _checkpoints_behind(x, u):
    """What lies behind x, or None: a copy of x, such as hooks make that keep saved tensors on the CPU, has x alone."""
    checks.check_tensor(NAME, "x", x)
    checks.check_dims(NAME, "x", x, 4, "(B, D, chunks, 2N)")
    if is_compiling():
        return None  # compilers keep values, not the memory that they lie in
    batch, dim, seqlen = u.shape
    count = batch * dim * (x.shape[3] // 2) * (max(0, seqlen - 1) // abi.SCAN_CHECKPOINT) + 2
    whole = x.dtype == torch.float32 and x.is_contiguous() and x.storage_offset() == 0
    if not whole or x.untyped_storage().nbytes() != 4 * (x.numel() + count):
        return None
    return x.as_strided((count,), (1,), x.numel())


# ---- VMamba's --------------------------------------------------------------------------------------------------------


def flexible_forward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    out_float: bool,
) -> list[torch.Tensor]:
    """[out, x]. delta, and delta_bias with it, may have fewer rows than u, each for as many neighbouring channels; with
    out_float the output is float32, whatever u is.
    """
    delta, delta_bias = row_for_each_channel(u, delta, delta_bias)
    if out_float:
        u, delta, B, C = _widened(u, delta, B, C)
    return list(forward(u, delta, A, B, C, D, delta_bias, delta_softplus))


def flexible_backward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    dout: torch.Tensor,
    x: torch.Tensor,
    delta_softplus: bool,
    nrows: int = 1,
) -> list[torch.Tensor | None]:
    """[du, ddelta, dA, dB, dC, dD, ddelta_bias], each as its input; dout may be float32, whatever u is. nrows has no
    meaning here.
    """
    given = u, delta, A, B, C, D, delta_bias
    delta, delta_bias = row_for_each_channel(u, delta, delta_bias)
    if dout.dtype == torch.float32:
        u, delta, B, C = _widened(u, delta, B, C)
    grads = backward(u, delta, A, B, C, D, None, delta_bias, dout, x, delta_softplus)
    wanted = grads.du, grads.ddelta, grads.dA, grads.dB, grads.dC, grads.dD, grads.ddelta_bias
    return [None if grad is None else summed(grad, tensor) for grad, tensor in zip(wanted, given, strict=True)]


def row_for_each_channel(u, delta, delta_bias):
    for name, tensor in (("u", u), ("delta", delta)):
        checks.check_tensor(NAME, name, tensor)
        checks.check_dims(NAME, name, tensor, 3, "(B, D, L)")
    dim, rows = u.shape[1], delta.shape[1]
    if dim == rows:
        return delta, delta_bias
    if rows == 0 or dim % rows:
        raise ValueError(f"{NAME}: delta's rows must divide u's channels, {dim}, got {rows}")
    if delta_bias is not None and delta_bias.shape == (rows,):
        delta_bias = delta_bias.repeat_interleave(dim // rows)
    return delta.repeat_interleave(dim // rows, dim=1), delta_bias


def _widened(u, delta, B, C):
    return (tensor.float() for tensor in (u, delta, B, C))


def summed(grad, tensor):
    """The gradient of a tensor whose rows were repeated, or widened."""
    if grad.shape != tensor.shape:
        rows = 0 if tensor.dim() == 1 else 1
        grad = grad.float().unflatten(rows, (tensor.shape[rows], -1)).sum(rows + 1)
    return grad.to(tensor.dtype)
