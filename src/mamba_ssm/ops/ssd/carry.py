"""What a part of a sequence passes on to the next part, or in backward to the one before it, without its outputs.

For sequences that lie on several devices (mamba_ssm.distributed). Forward the kernels find the state; backward it is
one matrix product of torch's over the length.
"""

import torch
import torch.nn.functional as F

from mamba_ssm._torch import no_autocast
from mamba_ssm.ops.ssd.arguments import Options, Ungated, check, kernel_layout, with_gate
from mamba_ssm.ops.ssd.forward import launch_forward


def ssd_carry(inputs: Ungated, options: Options, dout: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """State (B, H, P, N) and factor (B, H, 1, 1), float32: the state after the last step if it starts from zero, and
    the product of all decays. With dout (B, L, H, P) the gradient of the states before the first step, if none comes
    from later parts, in place of the state. initial_states are not read; seq_idx must be None.
    """
    A, dt_bias = inputs.A, inputs.dt_bias
    with no_autocast(inputs.x):
        dt = inputs.dt.float()
        dt = dt if dt_bias is None else dt + dt_bias
        dt = F.softplus(dt) if options.dt_softplus else dt
        dt = dt.clamp(options.dt_min, options.dt_max)
        factor = torch.exp(A * dt.sum(1))[..., None, None]
        if dout is None:
            return _final_states(inputs, options), factor
        weight = torch.exp(A * _sums_up_to(dt))
        return _weighted_product(dout, weight, inputs.C), factor


def _final_states(inputs: Ungated, options: Options) -> torch.Tensor:
    """By the kernels, which compute states alone where no output is wanted."""
    given = with_gate(inputs._replace(initial_states=None), None)
    sizes = check(given, options)
    states = inputs.A.new_zeros(sizes.states)
    if inputs.x.numel():
        launch_forward(sizes, kernel_layout(given), options, None, states)
    return states


_PIECE = 2048  # steps of a piece of the length


def _pieces(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """(B, L, ...) as (B, L / size, size, ...), with zeros behind the end."""
    padding = -tensor.shape[1] % size
    tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, padding)) if padding else tensor
    return tensor.unflatten(1, (-1, size))


def _sums_up_to(dt: torch.Tensor) -> torch.Tensor:
    """The sums of dt (B, L, H) over each step and all before it: of pieces, as torch sums up few long rows slowly."""
    pieces = _pieces(dt, 64).movedim(3, 1).contiguous()  # (B, H, pieces, 64)
    within, totals = pieces.cumsum(3), pieces.sum(3)
    sums = within + (totals.cumsum(2) - totals)[..., None]
    return sums.flatten(2)[..., : dt.shape[1]].transpose(1, 2)


def _weighted_product(rows: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The sum over steps of weight * rows columns^T, (B, H, P, N) float32: rows (B, L, H, P), weight (B, L, H) float32,
    columns (B, L, G, N).
    """
    batch, seqlen, heads, headdim = rows.shape
    groups, dstate = columns.shape[2:]
    size = min(_PIECE, max(seqlen, 1))  # pieces, since one long product would keep few processors busy
    weighted = rows.new_empty((batch, seqlen + -seqlen % size, heads, headdim))
    torch.mul(rows, weight[..., None].to(rows.dtype), out=weighted[:, :seqlen])
    weighted[:, seqlen:] = 0
    left = weighted.unflatten(1, (-1, size)).unflatten(3, (groups, -1)).flatten(4)  # (B, pieces, size, G, H P / G)
    right = _pieces(columns, size)
    left, right = (tensor.movedim(3, 2).flatten(0, 2) for tensor in (left, right))
    product = _float32_product(left.transpose(1, 2), right)
    return product.view(batch, -1, heads, headdim, dstate).sum(1)


def _float32_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched, summed and returned in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        try:
            return torch.bmm(left, right, out_dtype=torch.float32)
        except TypeError:  # torch before 2.8
            pass
    return torch.bmm(left.float(), right.float())
