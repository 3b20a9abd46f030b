"""Pieces of a Mamba-3 step in plain torch, under upstream's names: for code that calls them one by one. The block's own
step is mamba3_step.

Letters: B batch, L length, R rank, H heads, P headdim, N dstate, S angles, U sequences.
"""

import functools
import itertools
import math

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm.ops.mamba3_scan.chunks import running_angles
from mamba_ssm.ops.mamba3_scan.parts import outer, rotate


def angle_dt_fwd(
    angle: torch.Tensor,
    dt: torch.Tensor,
    init_state: torch.Tensor | None = None,
    chunk_size: int = 64,
    return_output_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The angles of every step, in [0, 2 pi): running sums of pi tanh(angle) dt. It has gradients.

    angle (B, L, H, S); dt (B, H, L); init_state (U, H, S), zero if None. chunk_size has no effect. cu_seqlens is read,
    on a GPU with a synchronisation. Returns (B, L, H, S) of angle's dtype, with return_output_state also (U, H, S).

    Same as upstream's mamba_ssm.ops.triton.mamba3.angle_dt.angle_dt_fwd.
    """
    checks.check_dims("angle_dt_fwd", "angle", angle, 4, "(B, L, H, S)")
    batch, seqlen, heads, count = angle.shape
    checks.check_float("angle_dt_fwd", "dt", dt, (batch, heads, seqlen), angle, "angle", "(B, H, L)")
    steps = math.pi * torch.tanh(angle.float()) * dt.float().transpose(1, 2)[..., None]
    bounds = [0, seqlen] if cu_seqlens is None else cu_seqlens.tolist()
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"angle_dt_fwd: cu_seqlens is for sequences packed in one row, got a batch of {batch}")
        checks.check_bounds("angle_dt_fwd", bounds, seqlen)
    rows = batch if cu_seqlens is None else len(bounds) - 1
    if init_state is not None:
        _check("angle_dt_fwd", angle, "angle", (rows, heads, count), "(U, H, S)", init_state=init_state)
    start = steps.new_zeros(rows, heads, count) if init_state is None else init_state.float()
    parts, ends = [], []
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        before = start if cu_seqlens is None else start[row : row + 1]
        parts.append(running_angles(steps[:, begin:end], before))
        ends.append(parts[-1][:, -1] if end > begin else before)
    parts.append(steps.new_zeros(batch, seqlen - bounds[-1], heads, count))
    out = torch.cat(parts, 1).to(angle.dtype)
    return (out, torch.cat(ends).to(angle.dtype)) if return_output_state else out


def angle_dt_bwd(
    grad_out: torch.Tensor,
    angle: torch.Tensor,
    dt: torch.Tensor,
    has_init_state: bool = False,
    chunk_size: int = 64,
    grad_output_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of angle (B, L, H, S), dt (B, H, L) and, with has_init_state, init_state (U, H, S) float32, from
    those of angle_dt_fwd's results. chunk_size has no effect.

    Same as upstream's mamba_ssm.ops.triton.mamba3.angle_dt.angle_dt_bwd.
    """
    checks.check_dims("angle_dt_bwd", "angle", angle, 4, "(B, L, H, S)")
    rows = angle.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    start = angle.new_zeros(rows, *angle.shape[2:], dtype=torch.float32) if has_init_state else None
    angle, dt = (tensor.detach().requires_grad_() for tensor in (angle, dt))
    leaves = [angle, dt] if start is None else [angle, dt, start.requires_grad_()]
    with torch.enable_grad():
        results = angle_dt_fwd(angle, dt, start, return_output_state=True, cu_seqlens=cu_seqlens)
    pairs = [(out, grad) for out, grad in zip(results, (grad_out, grad_output_state), strict=True) if grad is not None]
    outputs, cotangents = [out for out, _ in pairs], [grad.to(out.dtype) for out, grad in pairs]
    found = torch.autograd.grad(outputs, leaves, cotangents)
    return found[0], found[1], found[2] if has_init_state else None


@torch.no_grad()
def apply_rotary_qk_inference_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    angle_state: torch.Tensor,
    angle_proj: torch.Tensor,
    dt: torch.Tensor,
    bias_q: torch.Tensor | None = None,
    bias_k: torch.Tensor | None = None,
    inplace: bool = False,
    conjugate: bool = False,
    rotate_pairwise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """apply_rotary_qk_inference_reference without a gradient. inplace: q, k and angle_state are written and returned.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step.apply_rotary_qk_inference_fwd.
    """
    given = q, k, angle_state
    results = apply_rotary_qk_inference_reference(*given, angle_proj, dt, bias_q, bias_k, conjugate, rotate_pairwise)
    if not inplace:
        return results
    for target, result in zip(given, results, strict=True):
        target.copy_(result)
    return given


def apply_rotary_qk_inference_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    angle_state: torch.Tensor,
    angle_proj: torch.Tensor,
    dt: torch.Tensor,
    bias_q: torch.Tensor | None = None,
    bias_k: torch.Tensor | None = None,
    conjugate: bool = False,
    rotate_pairwise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step's q and k (B, R, H, N), with their biases (R, H, N) added and turned by the angles after the step.

    angle_state, angle_proj (B, H, S), angle_proj before tanh; dt (B, H). conjugate: turn the other way. Returns q, k
    and the angles, which may be beyond 2 pi, each in the dtype that it came in.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step.apply_rotary_qk_inference_reference.
    """
    name = "apply_rotary_qk_inference"
    checks.check_dims(name, "q", q, 4, "(B, R, H, N)")
    checks.check_same(name, "k", k, q.shape, q, "q", "(B, R, H, N)")
    batch, rank, heads, dstate = q.shape
    checks.check_dims(name, "angle_state", angle_state, 3, "(B, H, S)")
    check = functools.partial(_check, name, q, "q")
    check((batch, heads, angle_state.shape[-1]), "(B, H, S)", angle_state=angle_state, angle_proj=angle_proj)
    check((batch, heads), "(B, H)", dt=dt)
    check((rank, heads, dstate), "(R, H, N)", **_given(bias_q=bias_q, bias_k=bias_k))
    nangles = angle_state.shape[-1]
    if dstate < 2 * nangles:
        raise ValueError(f"{name}: each angle rotates two of the {dstate} entries of q, got {nangles} angles")
    angle = angle_state.float() + math.pi * torch.tanh(angle_proj.float()) * dt.float()[..., None]
    turn = (-angle if conjugate else angle)[:, None]
    turned_q, turned_k = (
        rotate(x.float() if bias is None else x.float() + bias.float(), turn, rotate_pairwise)
        for x, bias in ((q, bias_q), (k, bias_k))
    )
    return turned_q.to(q.dtype), turned_k.to(k.dtype), angle.to(angle_state.dtype)


@torch.no_grad()
def mamba3_step_fn(
    state: torch.Tensor,
    Bstate: torch.Tensor,
    Xstate: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    trap: torch.Tensor,
    xproj: torch.Tensor,
    outproj: torch.Tensor | None = None,
    state_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    zproj: torch.Tensor | None = None,
    tile_D: int = 64,
    num_warps: int = 2,
) -> None:
    """A step of the state and its output, behind the rotation. Writes out, and state_out or, without it, state.

    state (B, H, P, N); Bstate, B, C (B, R, H, N), biased and turned; Xstate, x, z (B, H, P); A (not A dt), dt, and trap
    after the sigmoid (B, H); D (H); xproj, zproj, outproj (R, H, P). out (B, H, P), without outproj (B, R, H, P).
    Arithmetic is float32. tile_D and num_warps have no effect.

    Same as upstream's mamba_ssm.ops.cute.mamba3.mamba3_step_fn.mamba3_step_fn.
    """
    name = "mamba3_step_fn"
    checks.check_dims(name, "state", state, 4, "(B, H, P, N)")
    batch, heads, headdim, dstate = state.shape
    checks.check_dims(name, "xproj", xproj, 3, "(R, H, P)")
    rank = xproj.shape[0]
    check = functools.partial(_check, name, state, "state")
    check((batch, rank, heads, dstate), "(B, R, H, N)", Bstate=Bstate, B=B, C=C)
    check((batch, heads, headdim), "(B, H, P)", Xstate=Xstate, x=x, **_given(z=z))
    check((batch, heads), "(B, H)", A=A, dt=dt, trap=trap)
    check((heads,), "(H)", D=D)
    check((rank, heads, headdim), "(R, H, P)", xproj=xproj, **_given(outproj=outproj, zproj=zproj))
    check(state.shape, "(B, H, P, N)", **_given(state_out=state_out))
    shape = (batch, heads, headdim) if outproj is not None else (batch, rank, heads, headdim)
    if out is None or out.shape != shape:
        raise ValueError(
            f"{name}: out must be given, of shape {shape}, got {None if out is None else tuple(out.shape)}"
        )
    if z is not None and zproj is None:
        raise ValueError(f"{name}: a gate z needs zproj, got None")
    wide = state.float(), Bstate.float(), Xstate.float(), A.float(), B.float(), C.float(), x.float(), dt.float()
    h, k_before, v_before, rate, k, q, v, step = wide
    lam, weights = trap.float(), xproj.float()
    decay = torch.exp(rate * step)[..., None, None]
    gamma, nu = ((part * step)[..., None, None] for part in (lam, 1 - lam))
    rows = v[:, None] * weights
    h = decay * (h + nu * outer(v_before[:, None] * weights, k_before)) + gamma * outer(rows, k)
    y = torch.einsum("bhpn,brhn->brhp", h, q) + D.float()[:, None] * rows
    if z is not None and zproj is not None:
        y = y * F.silu(z.float()[:, None] * zproj.float())
    out.copy_(y if outproj is None else (y * outproj.float()).sum(1))
    (state if state_out is None else state_out).copy_(h)


def _check(op, like, like_name, shape, letters, **tensors):
    for name, tensor in tensors.items():
        checks.check_tensor(op, name, tensor)
        checks.check_float(op, name, tensor, shape, like, like_name, letters)


def _given(**tensors):
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
