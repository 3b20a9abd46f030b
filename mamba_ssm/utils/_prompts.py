"""Prompts of different lengths in one batch, as decode gives them to a model."""

import typing

import torch

from mamba_ssm.modules.padding import padding_of


class Prompts(typing.NamedTuple):
    """Prompts (B, L), and what only rows with padding need; None where there is none."""

    tokens: torch.Tensor  # (B, L), padding before the tokens of a row
    mask: torch.Tensor | None  # (B, L) bool, of tokens
    skipped: torch.Tensor | None  # (B) int32, the padding of each row
    seen: torch.Tensor  # (B, L) tokens of each row, in any order and number

    def positions(self, offset: int) -> int | torch.Tensor:
        """(B) int32, of the tokens after offset others, padding among them; an integer where there is no padding."""
        return offset if self.skipped is None else offset - self.skipped

    @property
    def first_call(self) -> dict[str, torch.Tensor]:
        """What the model's first call takes more."""
        return {} if self.mask is None else {"attention_mask": self.mask}


def prompts_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Prompts:
    """Raises TypeError or ValueError on a wrong mask, whose values are looked at, and on a row without tokens."""
    padding = None
    if attention_mask is not None:
        padding = padding_of("generate", attention_mask, input_ids, synchronize=True)
    if padding is None:
        return Prompts(input_ids, None, None, input_ids)
    lengths = padding.lengths()
    if not lengths.all():
        row = int((lengths == 0).nonzero()[0])
        raise ValueError(f"generate: attention_mask must have a token in each row to continue, got none in row {row}")
    tokens, mask = padding.move_to_start(input_ids), padding.at_start().real
    return Prompts(tokens, mask, input_ids.shape[1] - lengths, torch.where(mask, tokens, tokens[:, -1:]))
