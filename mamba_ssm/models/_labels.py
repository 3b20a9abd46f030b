"""What each position of a language model is to predict."""

import torch
import torch.nn as nn

from mamba_ssm import _checks as checks
from mamba_ssm.modules.padding import Padding


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
