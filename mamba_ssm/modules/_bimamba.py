"""What a Mamba layer has more where it sees a sequence from both ends, with the parameters of Vision Mamba (arXiv
2401.09417), VideoMamba and SegMamba: conv1d_b, x_proj_b, dt_proj_b, A_b_log, D_b backwards in time, and with "_s" over
slices.

Letters: B batch, D channels (d_inner), L length, N dstate.
"""

import typing

import torch
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm._arguments import shown
from mamba_ssm._torch import is_plain, weight_and_bias
from mamba_ssm.modules._inputs import check_projections
from mamba_ssm.modules._submodules import convolve
from mamba_ssm.modules.padding import Padding
from mamba_ssm.ops.mamba_block import Direction, mamba_inner_both, mamba_inner_fn
from mamba_ssm.ops.selective_scan import selective_scan_fn

TYPES = "none", "v1", "v2", "v3"


class Parts(typing.NamedTuple):
    """What a direction computes with."""

    conv1d: nn.Module
    x_proj: nn.Module
    dt_proj: nn.Module
    A_log: torch.Tensor
    D: torch.Tensor

    @property
    def plain(self) -> bool:
        """Whether it is all in the parameters that operators take."""
        plain = is_plain(self.x_proj, nn.Linear) and is_plain(self.dt_proj, nn.Linear) and self.x_proj.bias is None
        return plain and is_plain(self.conv1d, nn.Conv1d)

    def parameters(self) -> Direction:
        dt_weight, dt_bias = weight_and_bias(self.dt_proj)
        A = -torch.exp(self.A_log.float())
        projections = weight_and_bias(self.x_proj)[0], dt_weight
        return Direction(*weight_and_bias(self.conv1d), *projections, A, self.D.float(), dt_bias.float())


def type_of(bimamba_type: str, bimamba: bool) -> str:
    """bimamba_type; bimamba=True is VideoMamba's word for v2."""
    if bimamba_type not in TYPES:
        raise ValueError(f"Mamba: bimamba_type must be one of {', '.join(map(repr, TYPES))}, got {shown(bimamba_type)}")
    if bimamba and bimamba_type not in ("none", "v2"):
        raise ValueError(f"Mamba: bimamba=True is bimamba_type='v2', got also {bimamba_type!r}: give one of them")
    return "v2" if bimamba else bimamba_type


def parts_of(mixer: typing.Any, suffix: str = "") -> Parts:
    conv1d, x_proj, dt_proj = (getattr(mixer, name + suffix) for name in ("conv1d", "x_proj", "dt_proj"))
    return Parts(conv1d, x_proj, dt_proj, getattr(mixer, f"A{suffix}_log"), getattr(mixer, f"D{suffix}"))


def both_ways(
    mixer: typing.Any, xz: torch.Tensor, seq_idx: torch.Tensor | None, padding: Padding | None = None
) -> torch.Tensor:
    """A layer's output (B, L, d_model), before gamma, from its input projection's, xz (B, 2D, L)."""
    forwards = parts_of(mixer)
    if mixer.bimamba_type == "v1":
        check_projections("Mamba", mixer, xz, ("x_proj", "dt_proj"))
        y, y_b = _scans(forwards, ((mixer.A_log, False), (mixer.A_b_log, True)), xz, seq_idx, padding)
        return mixer.out_proj((y + y_b).transpose(1, 2))
    backwards = parts_of(mixer, "_b")
    sliced = parts_of(mixer, "_s") if mixer.bimamba_type == "v3" else None
    if sliced is not None:
        _check_slices(mixer.nslices, xz.shape[-1], seq_idx=seq_idx, attention_mask=padding)
    scale = 0.5 if mixer.if_divide_out and mixer.bimamba_type == "v2" else 1.0
    plain = forwards.plain and backwards.plain and (sliced is None or sliced.plain)
    whole = seq_idx is None and padding is None
    if mixer.use_fast_path and whole and plain and is_plain(mixer.out_proj, nn.Linear):
        weight, bias = weight_and_bias(mixer.out_proj)
        weight = weight if scale == 1.0 else weight * scale
        out = mamba_inner_both(xz, weight, bias, forwards.parameters(), backwards.parameters())
        if sliced is None:
            return out
        of = sliced.parameters()
        projections = of.x_proj_weight, of.delta_proj_weight, weight, None
        xz_s = _to_slices(xz, mixer.nslices, 2)
        out_s = mamba_inner_fn(
            xz_s, of.conv1d_weight, of.conv1d_bias, *projections, of.A, D=of.D, delta_bias=of.delta_bias
        )
        return out + _from_slices(out_s, mixer.nslices, 1)
    for suffix in ("", "_b", "_s") if sliced is not None else ("", "_b"):
        check_projections("Mamba", mixer, xz, (f"x_proj{suffix}", f"dt_proj{suffix}"))
    y, y_b = (
        _scans(parts, ((parts.A_log, reverse),), xz, seq_idx, padding)[0]
        for parts, reverse in ((forwards, False), (backwards, True))
    )
    y = y + y_b
    if sliced is not None:
        y_s = _scans(sliced, ((sliced.A_log, False),), _to_slices(xz, mixer.nslices, 2), None)[0]
        y = y + _from_slices(y_s, mixer.nslices, 2)
    return mixer.out_proj((y if scale == 1.0 else y * scale).transpose(1, 2))


def _scans(
    parts: Parts,
    A_logs: tuple[tuple[torch.Tensor, bool], ...],
    xz: torch.Tensor,
    seq_idx: torch.Tensor | None,
    padding: Padding | None = None,
) -> list[torch.Tensor]:
    """For each (A_log, whether backwards) the gated scan, (B, D, L), of one convolution, which goes as the first."""
    x, z = xz.chunk(2, dim=1)
    x = convolve(parts.conv1d, x, "silu", seq_idx, reverse=A_logs[0][1], padding=padding)
    dstate = parts.A_log.shape[1]
    x_dbl = parts.x_proj(x.transpose(1, 2))
    dt, B, C = torch.split(x_dbl, [x_dbl.shape[-1] - 2 * dstate, dstate, dstate], dim=-1)
    dt_bias = None
    if is_plain(parts.dt_proj, nn.Linear):  # the scan adds the bias, in float32
        dt, dt_bias = F.linear(dt, parts.dt_proj.weight), parts.dt_proj.bias
    else:
        dt = parts.dt_proj(dt)
    x, z = x.to(dt.dtype), z.to(dt.dtype)
    results: list[typing.Any] = [
        selective_scan_fn(
            x,
            dt.transpose(1, 2),
            -torch.exp(A_log.float()),
            B.transpose(1, 2),
            C.transpose(1, 2),
            parts.D.float(),
            z=z,
            delta_bias=dt_bias,
            delta_softplus=True,
            seq_idx=seq_idx,
            reverse=reverse,
        )
        for A_log, reverse in A_logs
    ]
    return results


# ---- slices ----------------------------------------------------------------------------------------------------------


def _check_slices(slices: int, seqlen: int, **given: object) -> None:
    if seqlen % slices:
        raise ValueError(
            f"Mamba: with bimamba_type='v3' the length must be a multiple of nslices = {slices}, got {seqlen}: pad the "
            "input, or choose another nslices"
        )
    for argument, value in given.items():
        if value is not None:
            raise ValueError(
                f"Mamba: bimamba_type='v3' takes no {argument}: slices would mix sequences with others or with "
                "padding. Give each a row, and rows of one length to a call"
            )


def _to_slices(x: torch.Tensor, slices: int, dim: int) -> torch.Tensor:
    """The first steps of all slices of the length, then all second ones, and so on."""
    return x.unflatten(dim, (slices, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _from_slices(x: torch.Tensor, slices: int, dim: int) -> torch.Tensor:
    """The reverse of _to_slices."""
    return x.unflatten(dim, (-1, slices)).transpose(dim, dim + 1).flatten(dim, dim + 1)
