"""State space duality in a few lines of plain torch, to read and to compare with (arXiv 2405.21060, section 6).

Within a block the scan is a masked matrix product; one state a block carries it on to the next.
"""

import torch

from mamba_ssm import _checks as checks
from mamba_ssm.ops.ssd.formula import scan_in_chunks, segsum

__all__ = ["segsum", "ssd_minimal_discrete"]


def segsum_unstable(x: torch.Tensor) -> torch.Tensor:
    """segsum as differences of one running sum, which loses digits and is NaN after an infinity: for comparison."""
    total = x.cumsum(-1)
    above = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(above, -torch.inf)


def ssd_minimal_discrete(
    X: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    block_len: int,
    initial_states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h_t = exp(A_t) h_{t-1} + X_t B_t^T;  Y_t = h_t C_t.

    Args (of one floating-point dtype):
        X: (B, L, H, P), already times dt. A: (B, L, H), already times dt.
        B, C: (B, L, H, N), or (B, L, G, N) where G divides H.
        block_len: steps of a block; has no effect on the result.
        initial_states: (B, 1, H, P, N) or (B, H, P, N), zero if None.

    Returns:
        Y (B, L, H, P), and the state after the last step (B, H, P, N).

    Same as upstream's mamba_ssm.modules.ssd_minimal.ssd_minimal_discrete, which needs L to be a multiple of block_len.
    """
    for name, tensor in (("X", X), ("A", A), ("B", B), ("C", C)):
        checks.check_tensor("ssd_minimal_discrete", name, tensor)
        if tensor.dtype != X.dtype:
            raise TypeError(f"ssd_minimal_discrete: {name} must have X's dtype, {X.dtype}, got {tensor.dtype}")
    if not isinstance(block_len, int) or block_len < 1:
        raise ValueError(f"ssd_minimal_discrete: block_len must be a positive integer, got {block_len!r}")
    batch, _, nheads, headdim = X.shape
    if nheads % B.shape[2] or nheads % C.shape[2]:
        raise ValueError(
            f"ssd_minimal_discrete: X's {nheads} heads must be a multiple of the groups of B and C, got "
            f"{B.shape[2]} and {C.shape[2]}"
        )
    if initial_states is not None:
        initial_states = initial_states.reshape(batch, nheads, headdim, B.shape[-1])
    return scan_in_chunks(X, A, B, C, block_len, initial_states)
