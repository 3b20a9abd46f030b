"""Gradients of the pieces of Mamba-2's chunked scan (chunks.py), in plain torch, with upstream's arguments and layouts.

Upstream computes backward from these; here kernels do, so these serve code that takes the pieces. Each differentiates
the piece by autograd. A gradient of dA is one of the steps' exponents dt A, one of dA_cumsum of their running sums.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate, K chunks, Q chunk size.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm.ops.ssd.arguments import NAME
from mamba_ssm.ops.ssd.chunks import (
    chunk_cumsum,
    chunk_decay,
    chunk_products,
    chunk_scan_of_products,
    chunk_state,
    chunked,
)

_Optional = torch.Tensor | None


def _gradients(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    arguments: Sequence[torch.Tensor],
    grads: torch.Tensor | tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    """Of function's arguments, zero where it does not depend on one."""
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    with torch.enable_grad():
        outputs = function(*leaves)
        return torch.autograd.grad(outputs, leaves, grads, materialize_grads=True)


def _of_steps(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of dA from that of dA_cumsum: each step is in all later sums of its chunk."""
    return gradient.flip(-1).cumsum(-1).flip(-1)


# ---- products within a chunk -----------------------------------------------------------------------------------------


def products_forward(
    a: torch.Tensor,
    b: torch.Tensor,
    chunk_size: int,
    seq_idx: _Optional = None,
    causal: bool = False,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """a b^T within each chunk, (B, K, Q, Q) of a, b (B, L, N), or (B, K, G, Q, Q) of (B, L, G, N); zero where seq_idx
    (B, L) differs. causal: the part above the diagonal is not needed, and is there all the same.
    """
    grouped = a.dim() == 4
    left, right = (t.float() if grouped else t.float()[:, :, None] for t in (a, b))
    products = chunk_products(left, right, chunk_size)
    if seq_idx is not None:
        numbers = chunked(seq_idx, chunk_size)[:, :, None]
        products = products.masked_fill(numbers[..., :, None] != numbers[..., None, :], 0)
    return (products if grouped else products.squeeze(2)).to(output_dtype or a.dtype)


def products_backward(
    a: torch.Tensor, dout: torch.Tensor, residual: _Optional = None, out: _Optional = None
) -> torch.Tensor:
    """The gradient of b for dout of products_forward(a, b), like a; residual is added to it. out: written if given."""
    grouped = a.dim() == 4
    chunks = chunked(a if grouped else a[:, :, None], dout.shape[-1]).float()
    dout = dout.float() if grouped else dout.float()[:, :, None]
    gradient = torch.einsum("bkgts,bktgn->bksgn", dout, chunks).flatten(1, 2)[:, : a.shape[1]]
    gradient = gradient if grouped else gradient.squeeze(2)
    if residual is not None:
        gradient = gradient + residual
    return checks.into(NAME, "out", out, gradient.to(a.dtype))


# ---- sums of dA ------------------------------------------------------------------------------------------------------


def cumsum_backward(
    ddA: torch.Tensor,
    ddt_out: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    dt_bias: _Optional = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    ddt: _Optional = None,
) -> tuple[torch.Tensor, torch.Tensor, _Optional]:
    """(ddt (B, L, H), dA (H), ddt_bias (H)) from the gradients of the steps' dA and dt (B, H, K, Q)."""
    chunk_size = ddA.shape[-1]
    bias = A.new_zeros(A.shape) if dt_bias is None else dt_bias

    def steps(dt, A, bias):
        _, out = chunk_cumsum(dt, A, chunk_size, bias, dt_softplus, dt_limit)
        return out * A[:, None, None], out

    gradients = _gradients(steps, (dt, A.float(), bias.float()), (ddA.float(), ddt_out.float()))
    return checks.into(NAME, "ddt", ddt, gradients[0]), gradients[1], None if dt_bias is None else gradients[2]


# ---- what a chunk adds to the state ----------------------------------------------------------------------------------


def state_backward_dx(
    B: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    dstates: torch.Tensor,
    dx: _Optional = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, ddt, ddA_cumsum) of chunk_state."""
    gradient, ddt, ddA = _gradients(lambda *t: chunk_state(B, *t), (x, dt, dA_cumsum), dstates.float())
    return checks.into(NAME, "dx", dx, gradient), ddt, ddA


def state_backward_db(
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    dstates: torch.Tensor,
    seq_idx: _Optional = None,
    B: _Optional = None,
    ngroups: int = 1,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """dB (B, L, G, N) float32 of chunk_state; where B is given (dB, the gradient of dA)."""
    given = x.new_zeros((*x.shape[:2], ngroups, dstates.shape[-1])) if B is None else B

    def states(B, dA_cumsum):
        return chunk_state(B, x, dt, dA_cumsum, seq_idx=seq_idx)

    dB, ddA = _gradients(states, (given.float(), dA_cumsum), dstates.float())
    return dB if B is None else (dB, _of_steps(ddA))


def state_backward_dA(
    B: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    dstates: torch.Tensor,
    seq_idx: _Optional = None,
) -> torch.Tensor:
    """The gradient of dA (B, H, K, Q) of chunk_state."""
    _, ddA = state_backward_db(x, dt, dA_cumsum, dstates, seq_idx, B)
    return ddA


def passing_backward(
    states: torch.Tensor,
    dA_chunk_cumsum: torch.Tensor,
    dout: torch.Tensor,
    dfinal_states: _Optional = None,
    seq_idx: _Optional = None,
    has_initial_states: bool | None = None,
    dstates_dtype: torch.dtype | None = None,
    states_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
) -> tuple[_Optional, ...]:
    """(dstates (B, K, H, S), ddA_chunk_cumsum (B, H, K), dinitial_states (B, H, S) or None) of state_passing, and with
    states_dtype states in that dtype. states: those that enter the chunks, state_passing's result.
    """
    wide, grads = states.float(), dout.float()
    decay = chunk_decay(dA_chunk_cumsum.float(), seq_idx, chunk_size)
    gradient = torch.zeros_like(wide[:, 0]) if dfinal_states is None else dfinal_states.float()
    dstates, ddA = torch.empty_like(grads), torch.empty_like(decay)
    for k in reversed(range(states.shape[1])):
        dstates[:, k] = gradient  # of what chunk k adds, which is in the state that leaves it
        gradient = decay[:, :, k, None] * gradient
        ddA[:, :, k] = (gradient * wide[:, k]).sum(-1)
        gradient = gradient + grads[:, k]
    dinitial = gradient.to(dstates_dtype or dout.dtype) if has_initial_states else None
    results = dstates.to(dstates_dtype or dout.dtype), ddA.to(dA_chunk_cumsum.dtype), dinitial
    return results if states_dtype is None else (*results, states.to(states_dtype))


# ---- the output ------------------------------------------------------------------------------------------------------


def scan_forward(
    cb: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    C: torch.Tensor,
    states: torch.Tensor,
    D: _Optional = None,
    z: _Optional = None,
    seq_idx: _Optional = None,
) -> tuple[torch.Tensor, _Optional]:
    """(out, out before the gate or None) of chunk_scan from cb = products_forward(C, B, chunk_size)."""
    arguments = cb, x, dt, dA_cumsum, C, states, D
    out = chunk_scan_of_products(*arguments, z, seq_idx)
    return out, None if z is None else chunk_scan_of_products(*arguments, None, seq_idx)


def scan_backward_dz(
    x: torch.Tensor,
    z: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    chunk_size: int,
    has_ddAcs: bool = True,
    D: _Optional = None,
    dz: _Optional = None,
    recompute_output: bool = False,
) -> tuple[_Optional, ...]:
    """(dz, dout before the gate, dD or None), with has_ddAcs the part of ddA_cumsum (B, H, K, Q) from the steps
    that look back, and with recompute_output out after the gate. out: before the gate.
    """
    gradient, dungated = _gradients(lambda z, y: y.float() * F.silu(z.float()), (z, out), dout.float())
    dD = None if D is None else _of_D(x, dungated, D)
    results: tuple[_Optional, ...] = checks.into(NAME, "dz", dz, gradient), dungated, dD
    if has_ddAcs:
        results = *results, _looking_back(x, out, dungated, D, chunk_size)
    return (*results, (out.float() * F.silu(z.float())).to(x.dtype)) if recompute_output else results


def scan_backward_dstates(
    C: torch.Tensor,
    dA_cumsum: torch.Tensor,
    dout: torch.Tensor,
    seq_idx: _Optional = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The gradient of the states that enter each chunk, (B, K, H, P, N), of chunk_scan."""
    states = C.new_zeros((*dA_cumsum.shape[:3], dout.shape[-1], C.shape[-1]), dtype=torch.float32).transpose(1, 2)
    (gradient,) = _gradients(lambda s: _of_states(s, dA_cumsum, C, dout, seq_idx), (states,), dout.float())
    return gradient.to(dtype or C.dtype)


def scan_backward_dC(
    prev_states: torch.Tensor,
    dA_cumsum: torch.Tensor,
    dout: torch.Tensor,
    seq_idx: _Optional = None,
    C: _Optional = None,
    ngroups: int = 1,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The part of dC (B, L, G, N) float32 from the states; if C is given, also that of ddA_cumsum."""
    given = dout.new_zeros((*dout.shape[:2], ngroups, prev_states.shape[-1])) if C is None else C

    def out(C, dA_cumsum):
        return _of_states(prev_states, dA_cumsum, C, dout, seq_idx)

    dC, ddA = _gradients(out, (given.float(), dA_cumsum), dout.float())
    return dC if C is None else (dC, ddA)


def scan_backward_dA_of_states(
    prev_states: torch.Tensor,
    C: torch.Tensor,
    dout: torch.Tensor,
    dA_cumsum: torch.Tensor,
    seq_idx: _Optional = None,
) -> torch.Tensor:
    """The part of ddA_cumsum (B, H, K, Q) from the states."""
    _, ddA = scan_backward_dC(prev_states, dA_cumsum, dout, seq_idx, C)
    return ddA


def scan_backward_dcb(
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    dout: torch.Tensor,
    seq_idx: _Optional = None,
    CB: _Optional = None,
    ngroups: int = 1,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the products (B, K, G, Q, Q) float32; where CB is given also their part of the gradient of dA."""
    batch, _, nchunks, size = dt.shape
    given = dt.new_zeros((batch, nchunks, ngroups, size, size)) if CB is None else CB

    def out(cb, dA_cumsum):
        return _of_products(cb, x, dt, dA_cumsum, seq_idx)

    dcb, ddA = _gradients(out, (given.float(), dA_cumsum), dout.float())
    return dcb if CB is None else (dcb, _of_steps(ddA))


def scan_backward_dA_of_products(
    x: torch.Tensor, dt: torch.Tensor, dA_cumsum: torch.Tensor, dout: torch.Tensor, cb: torch.Tensor
) -> torch.Tensor:
    """The products' part of the gradient of dA (B, H, K, Q)."""
    _, ddA = scan_backward_dcb(x, dt, dA_cumsum, dout, None, cb)
    return ddA


def scan_backward_dx(
    cb: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    dout: torch.Tensor,
    D: _Optional = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, ddt (B, H, K, Q)) that come by the products, and dx by D."""
    dx, ddt = _gradients(lambda x, dt: _of_products(cb, x, dt, dA_cumsum), (x.float(), dt), dout.float())
    if D is not None:
        dx = dx + dout.float() * (D[:, None] if D.dim() == 1 else D)
    return dx.to(x.dtype), ddt


def scan_backward_dA_unstable(
    x: torch.Tensor,
    dt: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    ddt: torch.Tensor,
    D: _Optional = None,
    subtract_ddtdt: bool = True,
) -> tuple[torch.Tensor, _Optional]:
    """(ddA_cumsum, dD) from the output before the gate and ddt of the products: a difference of sums, cheap and less
    exact than scan_backward_dA_of_products.
    """
    ddA = _looking_back(x, out, dout, D, dt.shape[-1])
    return ddA - ddt * dt if subtract_ddtdt else ddA, None if D is None else _of_D(x, dout, D)


def scan_and_state_backward_dx(
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    B: torch.Tensor,
    CB: torch.Tensor,
    dout: torch.Tensor,
    dstates: torch.Tensor,
    D: _Optional = None,
    seq_idx: _Optional = None,
    dx: _Optional = None,
) -> tuple[torch.Tensor, torch.Tensor, _Optional]:
    """(dx, ddt, dD) of the products, the states that chunks add, and D together."""

    def both(x, dt):
        return _of_products(CB, x, dt, dA_cumsum, seq_idx), chunk_state(B, x, dt, dA_cumsum, seq_idx=seq_idx)

    gradient, ddt = _gradients(both, (x.float(), dt), (dout.float(), dstates.float()))
    if D is not None:
        gradient = gradient + dout.float() * (D[:, None] if D.dim() == 1 else D)
    return checks.into(NAME, "dx", dx, gradient.to(x.dtype)), ddt, None if D is None else _of_D(x, dout, D)


def _of_products(cb, x, dt, dA_cumsum, seq_idx=None):
    """The part of the output that steps of the same chunk give."""
    C = cb.new_zeros((*x.shape[:2], cb.shape[2], 1), dtype=torch.float32)
    states = cb.new_zeros((*dt.shape[:3], x.shape[-1], 1), dtype=torch.float32).transpose(1, 2)
    return chunk_scan_of_products(cb.float(), x.float(), dt, dA_cumsum, C, states, seq_idx=seq_idx)


def _of_states(states, dA_cumsum, C, dout, seq_idx):
    """The part of the output that the states that enter each chunk give."""
    batch, _, nchunks, size = dA_cumsum.shape
    products = C.new_zeros((batch, nchunks, C.shape[2], size, size), dtype=torch.float32)
    nothing = torch.zeros_like(dout, dtype=torch.float32), torch.zeros_like(dA_cumsum)
    return chunk_scan_of_products(products, *nothing, dA_cumsum, C.float(), states.float(), seq_idx=seq_idx)


def _of_D(x, dout, D):
    """The gradient of D (H) or (H, P)."""
    product = (x.float() * dout.float()).sum((0, 1))
    return (product if D.dim() == 2 else product.sum(-1)).to(D.dtype)


def _looking_back(x, out, dout, D, chunk_size):
    """Of ddA_cumsum, (B, H, K, Q): what each step has of the steps and the state before it."""
    if D is not None:
        out = out.float() - x.float() * (D[:, None] if D.dim() == 1 else D)
    return chunked((out.float() * dout.float()).sum(-1), chunk_size).permute(0, 3, 1, 2)
