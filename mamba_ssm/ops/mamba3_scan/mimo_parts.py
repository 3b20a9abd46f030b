"""The two directions of Mamba-3's MIMO scan alone, under the names and in the layouts of upstream's kernels.

Q and K are rotated in plain torch, by angles that are summed already, and the rest is mamba3_scan. mamba3_mimo is
faster and keeps less memory.
Letters: B batch, L length, R rank, H heads, P headdim, G groups, N dstate, S angles, U sequences.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm.ops.mamba3_scan.chunk_parts import steps_of_sums
from mamba_ssm.ops.mamba3_scan.forward import mamba3_scan
from mamba_ssm.ops.mamba3_scan.parts import per_head, rotate

_NAME = "mamba_mimo_forward"


class _Inputs(typing.NamedTuple):
    """What has a gradient, in the order in which upstream returns these."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    adt: torch.Tensor
    dt: torch.Tensor
    trap: torch.Tensor
    q_bias: torch.Tensor
    k_bias: torch.Tensor
    mimo_v: torch.Tensor
    mimo_z: torch.Tensor | None
    mimo_o: torch.Tensor | None
    angles: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None


def mimo_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_bias: torch.Tensor,
    k_bias: torch.Tensor,
    mimo_v: torch.Tensor,
    mimo_o: torch.Tensor | None,
    z: torch.Tensor | None,
    D: torch.Tensor | None,
    mimo_z: torch.Tensor | None,
    angles: torch.Tensor,
    dA_cs: torch.Tensor,
    dA_cs_rev: torch.Tensor,
    dt: torch.Tensor,
    trap: torch.Tensor,
    segsum: torch.Tensor,
    chunk_size: int,
    rotary_dim_divisor: float,
    dtype: torch.dtype | str | None,
    return_state: bool = False,
    threads: int = 128,
    num_stages: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """mamba3_mimo without a gradient, of angles and decays that are summed: (out, state, last k).

    Args:
        angles: (B, L, H, S), what angle_dt_fwd returns. dA_cs: (B, H, L), of chunks of chunk_size steps, as
            compute_dacs_segsum_triton has it. dA_cs_rev and segsum, which follow from it, are not read.
        dtype: of out and of the last k, v's if None. The rest is mamba3_mimo's. rotary_dim_divisor, threads and
            num_stages have no effect.

    Returns:
        out (B, L, H, P), without mimo_o (B, L, R, H, P); with return_state (U, H, N, P) float32 and (U, R, H, N), else
        None.

    Same as upstream's mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_fwd.mamba_mimo_forward.
    """
    return mimo_forward_varlen(
        q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, D, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap, segsum, chunk_size,
        rotary_dim_divisor, dtype, None, return_state,
    )  # fmt: skip


def mimo_forward_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_bias: torch.Tensor,
    k_bias: torch.Tensor,
    mimo_v: torch.Tensor,
    mimo_o: torch.Tensor | None,
    z: torch.Tensor | None,
    D: torch.Tensor | None,
    mimo_z: torch.Tensor | None,
    angles: torch.Tensor,
    dA_cs: torch.Tensor,
    dA_cs_rev: torch.Tensor,
    dt: torch.Tensor,
    trap: torch.Tensor,
    segsum: torch.Tensor,
    chunk_size: int,
    rotary_dim_divisor: float,
    dtype: torch.dtype | str | None,
    cu_seqlens: torch.Tensor | None = None,
    return_state: bool = False,
    threads: int = 128,
    num_stages: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """mimo_forward of sequences packed in one row. cu_seqlens (U + 1) is read, on a GPU with a synchronisation.

    Same as upstream's mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_fwd_varlen.mamba_mimo_forward_varlen.
    """
    adt = steps_of_sums(dA_cs, chunk_size, cu_seqlens)
    inputs = _Inputs(q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_o, angles, D, z)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.no_grad():
        out, finals = _scan(inputs, cu_seqlens)
    out = out if kind is None else out.to(kind)
    return (out, finals.ssm.mT.contiguous(), finals.k.to(out.dtype)) if return_state else (out, None, None)


def mimo_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_bias: torch.Tensor,
    k_bias: torch.Tensor,
    mimo_v: torch.Tensor,
    mimo_o: torch.Tensor | None,
    z: torch.Tensor | None,
    mimo_z: torch.Tensor | None,
    angles: torch.Tensor,
    dA_cs: torch.Tensor,
    dA_cs_rev: torch.Tensor,
    dt: torch.Tensor,
    trap: torch.Tensor,
    D: torch.Tensor | None,
    segsum: torch.Tensor,
    chunk_size: int,
    rotary_dim_divisor: float,
    dtype: torch.dtype | str | None,
    bf_threads: int = 128,
    bf_num_stages: int = 0,
    bb_threads: int = 256,
    bb_num_stages: int = 0,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of mimo_forward's inputs, None for those that are absent.

    Returns:
        (dq, dk, dv, dADT, ddt, dtrap, dq_bias, dk_bias, dmimo_v, dmimo_z, dmimo_o, dangles, dD, dz), each as its input;
        dADT (B, H, L) float32 is of a step's own decay, and dangles of the summed angle.

    Same as upstream's mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd.mamba_mimo_bwd_combined, which takes 1 or H groups.
    """
    return mimo_backward_varlen(
        dout, q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap, D, segsum,
        chunk_size, rotary_dim_divisor, dtype,
    )  # fmt: skip


def mimo_backward_varlen(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_bias: torch.Tensor,
    k_bias: torch.Tensor,
    mimo_v: torch.Tensor,
    mimo_o: torch.Tensor | None,
    z: torch.Tensor | None,
    mimo_z: torch.Tensor | None,
    angles: torch.Tensor,
    dA_cs: torch.Tensor,
    dA_cs_rev: torch.Tensor,
    dt: torch.Tensor,
    trap: torch.Tensor,
    D: torch.Tensor | None,
    segsum: torch.Tensor,
    chunk_size: int,
    rotary_dim_divisor: float,
    dtype: torch.dtype | str | None,
    cu_seqlens: torch.Tensor | None = None,
    bf_threads: int = 128,
    bf_num_stages: int = 0,
    bb_threads: int = 256,
    bb_num_stages: int = 0,
) -> tuple[torch.Tensor | None, ...]:
    """mimo_backward of sequences packed in one row. cu_seqlens (U + 1) is read, on a GPU with a synchronisation.

    Same as upstream's mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd_varlen.mamba_mimo_bwd_combined_varlen.
    """
    adt = steps_of_sums(dA_cs, chunk_size, cu_seqlens)
    given = _Inputs(q, k, v, adt, dt, trap, q_bias, k_bias, mimo_v, mimo_z, mimo_o, angles, D, z)
    copies: typing.Any = (None if tensor is None else tensor.detach().requires_grad_() for tensor in given)
    leaves = _Inputs(*copies)
    with torch.enable_grad():
        out, _ = _scan(leaves, cu_seqlens)
    found = iter(torch.autograd.grad(out, [leaf for leaf in leaves if leaf is not None], dout.to(out.dtype)))
    return tuple(None if leaf is None else next(found) for leaf in leaves)


def _scan(inputs, cu_seqlens):
    checks.check_dims(_NAME, "v", inputs.v, 4, "(B, L, H, P)")
    checks.check_dims(_NAME, "q", inputs.q, 5, "(B, L, R, G, N)")
    (batch, seqlen, heads, _), rank, dstate = inputs.v.shape, inputs.q.shape[2], inputs.q.shape[4]
    checks.check_same(_NAME, "k", inputs.k, inputs.q.shape, inputs.q, "q", "(B, L, R, G, N)")
    checks.check_groups(_NAME, "heads", heads, inputs.q.shape[3])
    checks.check_dims(_NAME, "angles", inputs.angles, 4, "(B, L, H, S)")
    count = inputs.angles.shape[-1]
    checks.check_float(_NAME, "angles", inputs.angles, (batch, seqlen, heads, count), inputs.v, "v", "(B, L, H, S)")
    if 2 * count > dstate:
        raise ValueError(f"{_NAME}: each angle rotates two of the {dstate} entries of q, got {count} angles")
    angle = inputs.angles.float()[:, :, None]
    q, k = (
        rotate(per_head(matrix, heads).float() + bias.float().transpose(0, 1), angle, False).to(inputs.v.dtype)
        for matrix, bias in ((inputs.q, inputs.q_bias), (inputs.k, inputs.k_bias))
    )
    adt, dt, trap = (tensor.transpose(1, 2) for tensor in (inputs.adt, inputs.dt, inputs.trap))
    none, still = inputs.v.new_zeros(heads, rank, dstate, dtype=torch.float32), angle.new_zeros(batch, seqlen, 0)
    bounds = None if cu_seqlens is None else cu_seqlens.to(torch.int32)
    return mamba3_scan(
        q, k, inputs.v, adt, dt, trap, none, none, still, inputs.D, inputs.z, inputs.mimo_v, inputs.mimo_z,
        inputs.mimo_o, cu_seqlens=bounds, pairwise=False, return_final_states=True,
    )  # fmt: skip
