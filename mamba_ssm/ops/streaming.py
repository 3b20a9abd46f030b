"""Selective scan over a stream of chunks, in channel-last layout."""

import typing

import torch
import torch.nn as nn

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm.ops.selective_scan import selective_scan_fn

_NAME = "SelectiveScan"


class SelectiveScan(nn.Module):
    """h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t;  y_t = C_t . h_t + D u_t, without parameters of its own.

    Chunks chained through the state equal one call on the whole:
    ``y, h = scan.forward_with_state(u, delta, A, B, C, D, h)``. Differentiable once in every argument.
    """

    def forward(
        self,
        u: torch.Tensor,
        delta: torch.Tensor,
        A: torch.Tensor,
        B_ssm: torch.Tensor,
        C_ssm: torch.Tensor,
        D_ssm: torch.Tensor | None,
        h_prev: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y (B, L, D) of u's dtype; see forward_with_state."""
        return self.forward_with_state(u, delta, A, B_ssm, C_ssm, D_ssm, h_prev)[0]

    def forward_with_state(
        self,
        u: torch.Tensor,
        delta: torch.Tensor,
        A: torch.Tensor,
        B_ssm: torch.Tensor,
        C_ssm: torch.Tensor,
        D_ssm: torch.Tensor | None,
        h_prev: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scan of one chunk.

        Args:
            u, delta: (B, L, D), and B_ssm, C_ssm: (B, L, N), of one dtype: float32, float16 or bfloat16; any N.
            A: (D, N), D_ssm: (D) or None; float32, or narrower and widened.
            h_prev: (B, D, N) float32, float16 or bfloat16, the state before this chunk; zero if None.

        Returns:
            (y, h_last): y (B, L, D) of u's dtype; h_last (B, D, N), the state after this chunk, of h_prev's dtype, or
            of u's without h_prev. A stream that carries its state in float32 loses nothing between chunks.

        Raises:
            TypeError, ValueError: a dtype or a shape is wrong.
        """
        tensors = {"u": u, "delta": delta, "A": A, "B_ssm": B_ssm, "C_ssm": C_ssm, "D_ssm": D_ssm, "h_prev": h_prev}
        for name, tensor in tensors.items():
            if tensor is not None or name not in ("D_ssm", "h_prev"):
                checks.check_tensor(_NAME, name, tensor)
        checks.check_dims(_NAME, "u", u, 3, "(B, L, D)")
        checks.check_activation_dtype(_NAME, "u", u)
        checks.check_dims(_NAME, "A", A, 2, "(D, N)")
        checks.no_complex(_NAME, "A", A)
        batch, seqlen, dim = u.shape
        dstate = A.shape[1]
        checks.check_same(_NAME, "delta", delta, (batch, seqlen, dim), u, "u", "(B, L, D)")
        checks.check_float(_NAME, "A", A, (dim, dstate), u, "u", "(D, N)")
        checks.check_same(_NAME, "B_ssm", B_ssm, (batch, seqlen, dstate), u, "u", "(B, L, N)")
        checks.check_same(_NAME, "C_ssm", C_ssm, (batch, seqlen, dstate), u, "u", "(B, L, N)")
        if D_ssm is not None:
            checks.check_float(_NAME, "D_ssm", D_ssm, (dim,), u, "u", "(D,)")
        if h_prev is not None:
            checks.check_float(_NAME, "h_prev", h_prev, (batch, dim, dstate), u, "u", "(B, D, N)")
        u_time, delta_time = u.transpose(1, 2), delta.transpose(1, 2)
        B_time, C_time = B_ssm.transpose(1, 2), C_ssm.transpose(1, 2)
        y: typing.Any = None
        states = []
        # States do not see each other: a wide N is a sum of narrower scans.
        for start in range(0, dstate, abi.MAX_DSTATE):
            part = slice(start, start + abi.MAX_DSTATE)
            part_y, part_state = selective_scan_fn(
                u_time,
                delta_time,
                A[:, part],
                B_time[:, part],
                C_time[:, part],
                D_ssm if start == 0 else None,
                return_last_state=True,
                initial_state=None if h_prev is None else h_prev[:, :, part],
            )
            y = part_y if y is None else y + part_y
            states.append(part_state)
        h_last = states[0] if len(states) == 1 else torch.cat(states, dim=2)
        return y.transpose(1, 2), h_last.to(u.dtype if h_prev is None else h_prev.dtype)
