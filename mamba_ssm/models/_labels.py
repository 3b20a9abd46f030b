"""What each position of a language model is to predict, and by what weight."""

from __future__ import annotations  # ProcessGroup is not there in a torch built without distributed

import torch
import torch.distributed as dist
import torch.nn as nn

from mamba_ssm import _checks as checks
from mamba_ssm._torch import is_plain, weight_and_bias
from mamba_ssm.distributed.tensor_parallel import ColumnParallelLinear
from mamba_ssm.modules.padding import Padding
from mamba_ssm.modules.quantized import QuantizedLinear


def next_labels(
    input_ids: torch.Tensor, labels: torch.Tensor, ignore_index: int, padding: Padding | None
) -> torch.Tensor:
    """(B, L): the label of the next position, of labels (B, L); ignore_index at the last one, and at and of padding."""
    checks.check_tensor("MambaLMHeadModel", "labels", labels)
    if labels.shape != input_ids.shape:
        shapes = f"{tuple(input_ids.shape)}, got {tuple(labels.shape)}"
        raise ValueError(f"MambaLMHeadModel: labels must be (B, L) as input_ids, {shapes}")
    if padding is not None:
        labels = labels.masked_fill(~padding.real, ignore_index)
    labels = nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
    return labels if padding is None else labels.masked_fill(~padding.real, ignore_index)


def head_weight(head: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dist.ProcessGroup | None]:
    """The weight of a head that is nothing more, since a loss without logits calls no module; int8 is given as dtype.
    And the process group over whose ranks it is split.
    """
    if is_plain(head, QuantizedLinear) and head.bias is None:
        return head.dequantize(dtype), None
    group = None
    usable = is_plain(head, nn.Linear)
    what = "hooks or another forward" if isinstance(head, nn.Linear) else type(head).__name__
    if is_plain(head, ColumnParallelLinear):
        usable, group = not head.sequence_parallel and not head.shared, head.process_group or dist.group.WORLD
        what = "sequence_parallel=True" if head.sequence_parallel else "shared rows"
    if usable:
        weight, bias = weight_and_bias(head)
        if bias is None:
            return weight, group
        what = "a bias"
    raise ValueError(
        "MambaLMHeadModel: with labels lm_head must be an nn.Linear without bias, hooks or another forward, or such a "
        f"ColumnParallelLinear with sequence_parallel=False, got {what}: leave labels out and take the cross entropy "
        "of the logits"
    )
