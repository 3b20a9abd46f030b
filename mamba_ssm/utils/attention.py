"""The matrix that a scan is: y = M x, a causal attention without softmax (Ali et al., arXiv 2403.01590).

A scan is linear in x, so row i of M is the gradient of y_i, which the kernels compute for all channels at once.
"""

import typing
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn

from mamba_ssm._torch import DispatchMode, reference
from mamba_ssm.ops.mamba3_scan import mamba3_scan
from mamba_ssm.ops.selective_scan import selective_scan_fn
from mamba_ssm.ops.ssd import mamba_chunk_scan_combined

Which = Sequence[int] | slice | None
# Elements of x that are repeated, once for each row of M that is computed at a time.
_AT_ONCE = 1 << 24


class AttentionMap(typing.NamedTuple):
    """One scan's matrix."""

    layer: str  # the module's name in the model, "" for the module itself
    reverse: bool  # whether the scan runs from the last step to the first: M is upper triangular then
    matrix: torch.Tensor  # (B, heads, rows, L) float32


def attention_maps(
    module: nn.Module,
    *inputs: typing.Any,
    rows: Which = None,
    heads: Which = None,
    channel: int = 0,
    **options: typing.Any,
) -> list[AttentionMap]:
    """The matrices M of all scans that module(*inputs, **options) runs, in the order of the calls.

    M maps a scan's input x to its output y before the gate and the norm: it holds B, C, the steps' sizes and decays, D
    on its diagonal, and zeros between packed sequences. What initial states add is not in it. Rows and columns are the
    scan's own steps: of the third map of Mamba(bimamba_type="v3") these go slice by slice (step i of the scan is step
    (i % nslices) * L / nslices + i // nslices of the layer).

    Args:
        module: a layer or model of this package's blocks, in eval mode if it has dropout.
        rows: which steps y_i, all if None. All rows of L steps take memory for B heads L^2 floats; a few rows of long
            sequences take one pass of the scan's backward each.
        heads: which heads (of Mamba: channels), all if None.
        channel: of a head, where they differ: in Mamba-3 MIMO, whose ranks are added up by weights of each channel, and
            in Mamba-2 with D_has_hdim.

    Raises:
        ValueError: no scan ran (no block of this package is in module), or a row, head or channel does not exist.
        RuntimeError: within torch.inference_mode() or plain_torch().
    """
    if DispatchMode is object:
        raise RuntimeError(f"attention_maps does not know how torch {torch.__version__} shows the operators that run")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("attention_maps takes gradients, which torch.inference_mode() forbids: call it outside")
    if reference.on:
        raise RuntimeError(
            "attention_maps records the kernels' operators, which plain_torch() does not call: call it outside"
        )
    found = _record(module, inputs, options)
    if not found:
        raise ValueError(f"attention_maps: {type(module).__name__} ran no scan of a block of mamba_ssm")
    maps = []
    for layer, name, given in found:
        reverse = bool(given.get("reverse"))
        maps.append(AttentionMap(layer, reverse, _matrix(*_SCANS[name](given, heads, channel), rows)))
    return maps


# ---- which scans run -------------------------------------------------------------------------------------------------


_Recorded = tuple[str, str, dict[str, typing.Any]]  # the layer, the operator, its arguments


class _Recorder(DispatchMode):
    """Keeps the arguments of each scan as {name: value}."""

    def __init__(self, layers: list[str]) -> None:
        super().__init__()
        self.layers = layers  # of the modules that are running, the innermost last
        self.scans: list[_Recorded] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        name = function.name().removeprefix("mamba_ssm::").removesuffix("_below_autograd")
        if name in _SCANS:
            declared = function._schema.arguments
            given = {one.name: one.default_value for one in declared}
            given.update(zip(given, arguments))  # noqa: B905  (defaults are dropped)
            self.scans.append((self.layers[-1] if self.layers else "", name, given))
        return function(*arguments, **(options or {}))


@torch.no_grad()
def _record(module: nn.Module, inputs: tuple[typing.Any, ...], options: dict[str, typing.Any]) -> list[_Recorded]:
    """Runs the module. Hooks on its submodules make a block call these and single operators, scans among them."""
    layers: list[str] = []
    handles = []
    for name, layer in module.named_modules():
        if isinstance(getattr(layer, "out_proj", None), nn.Module):
            inner = [part for part in layer.modules() if part is not layer and not isinstance(part, nn.Conv1d)]
            handles += [part.register_forward_hook(lambda *_: None) for part in inner]
            handles.append(layer.register_forward_pre_hook(lambda *_, name=name: layers.append(name)))
            handles.append(layer.register_forward_hook(lambda *_: layers.pop() and None))
    try:
        with _Recorder(layers) as recorder:
            module(*inputs, **options)
    finally:
        for handle in handles:
            handle.remove()
    return recorder.scans


# ---- a scan as a function of x (B, L, heads) alone -------------------------------------------------------------------

# y (B, L, heads) of x; the arguments whose first dimension is the batch are repeated with it.
_Scan = Callable[[torch.Tensor, dict[str, typing.Any]], torch.Tensor]
_Part = tuple[_Scan, dict[str, typing.Any], dict[str, typing.Any], tuple[int, int, int]]


def _chosen(which: Which, count: int, what: str) -> list[int]:
    """The indices from 0 on."""
    if which is None or isinstance(which, slice):
        return list(range(count))[which or slice(None)]
    for index in which:
        if not -count <= index < count:
            raise ValueError(f"attention_maps: {what} must lie in 0..{count - 1}, got {index}")
    return [index % count for index in which]


def _of_groups(tensor: torch.Tensor, heads: list[int], nheads: int, dim: int) -> torch.Tensor:
    """B or C with a group for each of these heads."""
    groups = torch.tensor(heads, dtype=torch.int64, device=tensor.device) // (nheads // tensor.shape[dim])
    return tensor.float().index_select(dim, groups)


def _selective_scan(given: dict[str, typing.Any], heads: Which, channel: int) -> _Part:
    batch, dim, seqlen = given["u"].shape
    chosen = _chosen(heads, dim, "heads")
    same = {name: None if given[name] is None else given[name][chosen] for name in ("A", "D", "delta_bias")}
    of_batch = {"delta": given["delta"][:, chosen].float(), "seq_idx": given["seq_idx"]}
    for name in ("B", "C"):
        tensor = given[name]
        if tensor.dim() == 2:
            same[name] = tensor[chosen]
        else:
            of_batch[name] = _of_groups(tensor if tensor.dim() == 4 else tensor[:, None], chosen, dim, 1)
    options = {"delta_softplus": given["delta_softplus"], "reverse": given["reverse"]}

    def scan(x: torch.Tensor, rest: dict[str, typing.Any]) -> torch.Tensor:
        y = selective_scan_fn(x.transpose(1, 2).contiguous(), **rest, **options)
        return typing.cast(torch.Tensor, y).transpose(1, 2)

    return scan, of_batch, same, (batch, seqlen, len(chosen))


def _ssd(given: dict[str, typing.Any], heads: Which, channel: int) -> _Part:
    batch, seqlen, nheads, headdim = given["x"].shape
    chosen = _chosen(heads, nheads, "heads")
    same = {name: None if given[name] is None else given[name][chosen] for name in ("A", "D", "dt_bias")}
    if same["D"] is not None and same["D"].dim() == 2:
        (column,) = _chosen([channel], headdim, "channel")
        same["D"] = same["D"][:, column]
    of_batch = {name: _of_groups(given[name], chosen, nheads, 2) for name in ("B", "C")}
    of_batch |= {"dt": given["dt"][:, :, chosen].float(), "seq_idx": given["seq_idx"]}
    options = {name: given[name] for name in ("dt_softplus", "reverse")}

    def scan(x: torch.Tensor, rest: dict[str, typing.Any]) -> torch.Tensor:
        limits = given["dt_min"], given["dt_max"]
        y = mamba_chunk_scan_combined(x[..., None], chunk_size=64, dt_limit=limits, **rest, **options)
        return typing.cast(torch.Tensor, y)[..., 0]

    return scan, of_batch, same, (batch, seqlen, len(chosen))


def _mamba3_scan(given: dict[str, typing.Any], heads: Which, channel: int) -> _Part:
    batch, seqlen, nheads, headdim = given["V"].shape
    chosen = _chosen(heads, nheads, "heads")
    (column,) = _chosen([channel], headdim, "channel")
    same = {name: None if given[name] is None else given[name][chosen] for name in ("Q_bias", "K_bias", "D")}
    for name in ("MIMO_V", "MIMO_Out"):
        same[name] = None if given[name] is None else given[name][chosen, :, column : column + 1]
    of_batch = {name: _of_groups(given[name], chosen, nheads, 3) for name in ("Q", "K")}
    of_batch |= {name: given[name][:, :, chosen].float() for name in ("ADT", "DT", "Trap")}
    angles = given["Angles"].float()
    of_batch |= {"Angles": angles if angles.dim() == 3 else angles[:, :, chosen], "seq_idx": given["seq_idx"]}
    if given["cu_seqlens"] is not None:
        same["cu_seqlens"] = given["cu_seqlens"]

    def scan(x: torch.Tensor, rest: dict[str, typing.Any]) -> torch.Tensor:
        y = typing.cast(torch.Tensor, mamba3_scan(V=x[..., None], pairwise=given["pairwise"], **rest))
        return (y if y.dim() == 4 else y.sum(2))[..., 0]

    return scan, of_batch, same, (batch, seqlen, len(chosen))


_SCANS = {"selective_scan": _selective_scan, "ssd": _ssd, "mamba3_scan": _mamba3_scan}


# ---- its matrix ------------------------------------------------------------------------------------------------------


def _matrix(
    scan: _Scan, of_batch: dict[str, typing.Any], same: dict[str, typing.Any], sizes: tuple[int, int, int], rows: Which
) -> torch.Tensor:
    """(B, heads, rows, L), some rows at a time: of a batch that is repeated, each copy gives the gradient of one."""
    batch, seqlen, heads = sizes
    chosen = _chosen(rows, seqlen, "rows")
    at_once = max(1, _AT_ONCE // max(1, batch * seqlen * heads))
    parts = [of_batch["delta" if "delta" in of_batch else "DT" if "DT" in of_batch else "dt"].new_zeros(0, *sizes)]
    for begin in range(0, len(chosen), at_once):
        piece = chosen[begin : begin + at_once]
        rest = {
            name: None if tensor is None else tensor.repeat(len(piece), *(1 for _ in tensor.shape[1:]))
            for name, tensor in of_batch.items()
        }
        x = parts[0].new_zeros(len(piece) * batch, seqlen, heads, requires_grad=True)
        wanted = torch.zeros_like(x)
        for copy, row in enumerate(piece):
            wanted[copy * batch : (copy + 1) * batch, row] = 1
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(scan(x, rest | same), x, wanted)
        parts.append(gradient.view(len(piece), *sizes))
    return torch.cat(parts).permute(1, 3, 0, 2)
