"""attention_mask: rows of different lengths in one batch, padded to one length, as transformers' tokenizers make them.

Padding never reaches a state: a layer's input is zero there, and so is what the convolution makes of it (a negative
seq_idx). A scan that would see something else restarts at the first real step (the same seq_idx).
Letters: B batch, L length.
"""

import typing
from collections.abc import Callable, Mapping

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import values_at_hand
from mamba_ssm.modules._inputs import is_continued
from mamba_ssm.modules.inference import InferenceCache

_INTEGERS = torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64


class Padding(typing.NamedTuple):
    """An attention_mask that was checked, in the forms that layers take: a model makes it once for all of them.

    A row that breaks the rules has no valid step and is filled with NaN: on a GPU, where looking at values would be a
    synchronisation, this is how the error shows.
    """

    real: torch.Tensor  # (B, L) bool: no padding
    seq_idx: torch.Tensor  # (B, L) int32: 0, or -1 at padding
    valid: torch.Tensor  # (B, L) bool: real, in a row that keeps the rules
    fill: torch.Tensor  # (B, L), of the input's dtype: what takes the place of an output that is not valid
    starts: bool = False  # whether padding is known to come before the real steps

    def zero(self, out: torch.Tensor) -> torch.Tensor:
        """out (B, L, ...), zero at padding; so is its gradient."""
        shape = *self.valid.shape, *(1,) * (out.dim() - 2)
        return torch.where(self.valid.view(shape), out, self.fill.to(out.dtype).view(shape))

    def lengths(self) -> torch.Tensor:
        """(B) int32, the real steps of each row."""
        return self.real.sum(1, dtype=torch.int32)

    def behind(self) -> torch.Tensor:
        """(B) int64, the padding behind the last real step of each row."""
        steps = torch.arange(1, self.real.shape[1] + 1, device=self.real.device)
        return self.real.shape[1] - (self.real * steps).amax(1)

    def move_to_start(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, L, ...) with the padding of each row before its real steps."""
        return x if self.starts or x.shape[1] == 0 else roll(x, self.behind())

    def move_back(self, x: torch.Tensor) -> torch.Tensor:
        """The reverse of move_to_start."""
        return x if self.starts or x.shape[1] == 0 else roll(x, -self.behind())

    def at_start(self) -> "Padding":
        """Of what move_to_start returns."""
        real, seq_idx, valid, fill = map(self.move_to_start, (self.real, self.seq_idx, self.valid, self.fill))
        return Padding(real, seq_idx, valid, fill, starts=True)


def padding_of(
    name: str,
    attention_mask: torch.Tensor | Padding,
    x: torch.Tensor,
    others: Mapping[str, object] | None = None,
    synchronize: bool = False,
) -> Padding | None:
    """What attention_mask (B, L) says of x (B, L, ...); None where it is seen that nothing is padding.

    others: the other arguments that it excludes. Values are looked at on the CPU alone, unless synchronize is set.

    Raises:
        TypeError: it is no tensor of bool or integers. ValueError: its shape, device or a value is wrong, a row has
        padding between real steps, or one of the others is given.
    """
    for argument, value in (others or {}).items():
        if value is not None:
            raise ValueError(f"{name}: attention_mask and {argument} cannot be given together: leave one of them out")
    if isinstance(attention_mask, Padding):
        return attention_mask
    checks.check_tensor(name, "the input", x)
    checks.check_tensor(name, "attention_mask", attention_mask)
    if attention_mask.dtype not in _INTEGERS:
        raise TypeError(
            f"{name}: attention_mask must be of bool or integers, 1 for a real step and 0 for padding, got "
            f"{checks.short(attention_mask.dtype)}"
        )
    if x.dim() < 2:
        raise ValueError(f"{name}: the input of an attention_mask must be (B, L, ...), got {tuple(x.shape)}")
    if attention_mask.shape != x.shape[:2]:
        expected, given = tuple(x.shape[:2]), tuple(attention_mask.shape)
        raise ValueError(f"{name}: attention_mask must have shape (B, L) = {expected} like the input, got {given}")
    if attention_mask.device != x.device:
        raise ValueError(f"{name}: attention_mask must be on {x.device} like the input, got {attention_mask.device}")
    real = attention_mask != 0
    runs = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
    wrong = (runs > 1) | (real & (attention_mask != 1)).any(1)
    if synchronize or values_at_hand(attention_mask):
        any_wrong, all_real = torch.stack([wrong.any(), real.all()]).tolist()
        if any_wrong:
            _refuse(name, attention_mask, int(wrong.nonzero()[0]))
        if all_real:
            return None
    fill = x.new_zeros((), dtype=x.dtype if x.is_floating_point() else torch.get_default_dtype())
    fill = torch.where(wrong, torch.full_like(fill, float("nan")), fill)[:, None].expand(real.shape).contiguous()
    return Padding(real, real.to(torch.int32) - 1, real & ~wrong[:, None], fill)


def _refuse(name: str, attention_mask: torch.Tensor, row: int) -> typing.NoReturn:
    for value in attention_mask[row].tolist():
        if value not in (0, 1):
            raise ValueError(f"{name}: attention_mask must be 1 for a real step and 0 for padding, got {value}")
    values = attention_mask[row].int().tolist()
    first = values.index(1)
    hole = values.index(0, first)
    raise ValueError(
        f"{name}: attention_mask must have a row's real steps side by side, with padding before or behind them, got "
        f"padding between them in row {row} at step {hole}: move it, or give the parts as packed sequences (seq_idx)"
    )


def masked(
    name: str,
    x: torch.Tensor,
    attention_mask: torch.Tensor | Padding,
    inference_params: InferenceCache | None,
    run: Callable[[torch.Tensor, Padding | None], torch.Tensor],
    others: Mapping[str, object],
    zero: bool = True,
) -> torch.Tensor:
    """run(x, padding) of x (B, L, ...). others: see padding_of, whose errors it raises.

    With inference_params run gets padding at the start of rows alone, so that the states after the last step are those
    after the last real one; what it returns is rolled back.

    zero: x and the result are zero at padding, and so are their gradients, whatever x holds there, NaN too.
    """
    padding = padding_of(name, attention_mask, x, others)
    if is_continued(name, inference_params):
        raise ValueError(
            f"{name}: attention_mask is for the first call with inference_params, not for one that continues: the "
            "states hold no padding, so leave it out"
        )
    if padding is None:
        return run(x, None)
    given = padding
    if inference_params is not None:
        x, padding = given.move_to_start(x), given.at_start()
    out = padding.zero(run(padding.zero(x), padding)) if zero else run(x, padding)
    return out if inference_params is None else given.move_back(out)


def roll(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x (B, L, ...), each row rolled along L by its shift (B): what leaves at the end comes in at the start."""
    batch, seqlen = x.shape[:2]
    steps = torch.arange(seqlen, device=x.device) - shift[:, None]
    rows = steps.remainder(seqlen) + torch.arange(batch, device=x.device)[:, None] * seqlen
    return x.flatten(0, 1).index_select(0, rows.flatten()).view(x.shape)
