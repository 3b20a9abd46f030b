"""Checks of what a block is called with, shared by the blocks."""

import typing

import torch
import torch.nn as nn

from mamba_ssm import _checks as checks
from mamba_ssm._torch import autocast_dtype, is_plain, parameters_of, reference, values_at_hand
from mamba_ssm.distributed.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from mamba_ssm.modules.inference import InferenceCache


def check_input(
    name: str,
    block: nn.Module,
    x: torch.Tensor,
    d_model: int,
    projections: tuple[str, ...],
    dims: int = 3,
    seq_idx: torch.Tensor | None = None,
    in_torch: bool = False,
) -> None:
    """x is (B, L, d_model), or with dims=2 (B * L, d_model); seq_idx is a tensor on its device or None, whose rest
    operators check. projections, in_torch: see check_projections.
    """
    checks.check_tensor(name, "the input", x)
    if x.dim() != dims or x.shape[-1] != d_model:
        letters = "(B, L, d_model)" if dims == 3 else "(B * L, d_model) where seqlen is given"
        raise ValueError(f"{name}: the input must be {letters} with d_model = {d_model}, got {tuple(x.shape)}")
    if seq_idx is not None:
        checks.check_tensor(name, "seq_idx", seq_idx)
        if seq_idx.device != x.device:
            raise ValueError(f"{name}: seq_idx must be on {x.device} like the input, got {seq_idx.device}")
    check_projections(name, block, x, projections, in_torch)


def check_projections(
    name: str, block: nn.Module, x: torch.Tensor, projections: tuple[str, ...], in_torch: bool = False
) -> None:
    """The weights and biases of block's submodules of these names are on x's device. The first takes x and has its
    dtype, which is one of the kernels' unless the block is all torch's (in_torch) or plain_torch is on.

    torch multiplies a meta tensor by one of the CPU without an error, and returns memory that nobody has written. A
    module that is more than its weight (see is_plain) may move or cast its input, so it is not looked at.
    """
    device, takes_x = x.device, True
    for projection in projections:
        for parameter, tensor in parameters_of(block, projection).items():
            if tensor is None:
                continue
            if tensor.device != device and _is_plain(block, projection):
                raise ValueError(
                    f"{name}: the input must be on {tensor.device} like {projection}.{parameter}, got {device}: "
                    f"{checks.cure_of_devices(tensor.is_meta, x.is_meta)}"
                )
            known = tensor.dtype == x.dtype and x.dtype in checks.FLOAT_DTYPES
            if takes_x and not known and parameter == "weight" and _is_plain(block, projection):
                _check_dtype(name, x, projection, tensor, in_torch or reference.on)
        takes_x = False


def _is_plain(block: nn.Module, projection: str) -> bool:
    module = getattr(block, projection)
    plain = is_plain(module, nn.Linear) or is_plain(module, nn.Conv1d)
    return plain or is_plain(module, ColumnParallelLinear) or is_plain(module, RowParallelLinear)


def _check_dtype(name: str, x: torch.Tensor, projection: str, weight: torch.Tensor, in_torch: bool) -> None:
    """x has the weight's dtype or one that autocast makes the same, and one of the kernels unless torch computes."""
    own, given = checks.short(weight.dtype), checks.short(x.dtype)
    if x.dtype != weight.dtype:
        floats = x.dtype in checks.FLOAT_DTYPES and weight.dtype in checks.FLOAT_DTYPES
        if floats and autocast_dtype(x) is not None:
            return
        cure = f"convert it with .to(torch.{own})" + (", or call the layer under torch.autocast" if floats else "")
        raise TypeError(f"{name}: the input must have the dtype of {projection}.weight, {own}, got {given}: {cure}")
    if not in_torch:
        raise TypeError(
            f"{name}: the input must be float32, float16 or bfloat16, got {given}: convert the input and the layer "
            "with .float(), or use mamba_ssm.utils.reference.plain_torch(), which computes in float64"
        )


def is_continued(name: str, inference_params: InferenceCache | None) -> bool:
    """Whether a call goes on from the states that earlier ones left."""
    if inference_params is None:
        return False
    offset = inference_params.seqlen_offset
    if offset < 0:
        raise ValueError(
            f"{name}: seqlen_offset must be the number of tokens that went in before, 0 first, got {offset}"
        )
    return offset > 0


def refuse_decoding(name: str, option: str = "") -> typing.NoReturn:
    """What decodes goes from one step to the next; in these layers each depends on those that follow."""
    raise ValueError(
        f"{name}: {option or 'the layer'} is not causal, so it has no states and no step to decode with: call it on "
        "whole sequences, or take a causal layer to generate"
    )


def check_cu_seqlens(
    name: str, cu_seqlens: torch.Tensor, x: torch.Tensor, synchronize: bool = False
) -> list[int] | None:
    """cu_seqlens bounds sequences packed in the one row of x (1, L, ...). Returns its values, or None.

    They are looked at on the CPU alone, unless synchronize is set: on a GPU that would be a synchronisation.
    """
    checks.check_tensor(name, "cu_seqlens", cu_seqlens)
    if x.shape[0] != 1:
        raise ValueError(f"{name}: cu_seqlens takes sequences packed in a batch of 1, got a batch of {x.shape[0]}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: cu_seqlens must be (sequences + 1,) of int32, got {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        )
    if cu_seqlens.layout != torch.strided:
        raise TypeError(f"{name}: cu_seqlens must be a dense tensor, got {cu_seqlens.layout}")
    if cu_seqlens.device != x.device:
        raise ValueError(f"{name}: cu_seqlens must be on {x.device} like the input, got {cu_seqlens.device}")
    if not synchronize and not values_at_hand(cu_seqlens):
        return None
    bounds = cu_seqlens.tolist()
    checks.check_bounds(name, bounds, x.shape[1])
    return bounds


def refuse_with_context_parallel(name: str, **given: object) -> None:
    """Raises on arguments that say more of a sequence than one rank's part of it knows."""
    for argument, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}: {argument} is not supported with context_parallel, whose sequence lies on several ranks: "
                f"leave it out, or call context_parallel(model, None) first"
            )
