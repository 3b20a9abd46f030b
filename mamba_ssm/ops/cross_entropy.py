"""The cross entropy of rows of logits, and its gradient in their place, for ops/linear_cross_entropy.py."""

from __future__ import annotations  # ProcessGroup is not there in a torch built without distributed

import typing

import torch
import torch.distributed as dist

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, place, run
from mamba_ssm._torch import call, define, reference, signature, unpack, wrote_in_place

_NAME = "cross_entropy"


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order. It writes the first two."""

    logits: torch.Tensor
    losses: torch.Tensor
    labels: torch.Tensor


class Options(typing.NamedTuple):
    """What the loss is."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


class VocabularyPart(typing.NamedTuple):
    """What this rank's logits are of a vocabulary of `size` words: from `first` on."""

    first: int
    size: int
    group: dist.ProcessGroup


def cross_entropy_(inputs: Inputs, options: Options, want_gradient: bool, part: VocabularyPart | None = None) -> None:
    """Writes each row's loss, and if wanted the gradient of the losses' sum in place of the logits.

    lse = log(sum_j exp(l_j)) of a row l with label y, s = label_smoothing, z = z_loss:

        loss       = -(1 - s) (l_y - lse) - s (mean_j l_j - lse) + z lse^2
        gradient_j = exp(l_j - lse) (1 + 2 z lse) - s / V - [j = y] (1 - s)

    A row whose label is ignore_index has a loss and gradient of 0, whatever is in it. One whose label is neither that
    nor in 0..V - 1 has NaN for both, as one has that holds a NaN.

    Args:
        inputs: logits (R, V) float32, float16 or bfloat16, with rows of neighbours; float64 runs in torch operators.
            losses (R) contiguous, float32, or float64 of float64. labels (R) int64.
        part: the rows are divided over the ranks of a group, and torch operators compute them: each rank has some of a
            row's logits and all of its label and loss.
    """
    if part is not None or reference.on or inputs.logits.dtype == torch.float64:
        _in_torch(inputs, options, want_gradient, part)
    else:
        call(_cross_entropy_op, *inputs, *options, want_gradient)


def _in_torch(inputs, options, want_gradient, part):
    """The same in torch operators. Nothing is computed from lse where l - max will do, as in the kernels."""
    (logits, losses, labels), smooth, z_loss = inputs, options.label_smoothing, options.z_loss
    here = logits.shape[1]
    first, vocabulary, group = (0, here, None) if part is None else part
    labels = labels[:, None]
    ignored = labels == options.ignore_index
    wrong = ~ignored & ((labels < 0) | (labels >= vocabulary))
    mine = (labels >= first) & (labels < first + here)
    index = torch.where(mine, labels - first, 0)
    largest = logits.amax(1, keepdim=True).to(losses.dtype).clamp(min=torch.finfo(losses.dtype).min)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    x = logits - largest
    logit = torch.where(mine, x.gather(1, index), 0.0)
    above = x.sum(1, keepdim=True) if smooth else torch.zeros_like(logit)
    exponentials = x.exp_()
    sums = torch.cat([exponentials.sum(1, keepdim=True), logit, above], 1)
    if group is not None:
        dist.all_reduce(sums, group=group)
    total, logit, above = sums.split(1, 1)
    log_sum = total.log()
    log_prob, lse = logit - log_sum, largest + log_sum
    loss = z_loss * lse.square() - (1 - smooth) * log_prob
    if smooth:  # zero times a mean of -inf is NaN
        loss -= smooth * (above / vocabulary - log_sum)
    losses.copy_(loss.masked_fill_(wrong, torch.nan).masked_fill_(ignored, 0)[:, 0])
    if want_gradient:
        slope, share = 2 * z_loss * lse, smooth / vocabulary
        entry = log_prob.expm1() + slope * log_prob.exp() + smooth - share
        gradient = exponentials.mul_((1 + slope) / total).sub_(share)
        gradient.scatter_(1, index, torch.where(mine, entry, gradient.gather(1, index)))
        logits.copy_(gradient.masked_fill_(wrong, torch.nan).masked_fill_(ignored, 0))


def _check(inputs):
    """Raises on any tensor that the kernels do not take."""
    logits, losses, labels = inputs
    checks.check_dims(_NAME, "logits", logits, 2, "(R, V)")
    checks.check_activation_dtype(_NAME, "logits", logits)
    rows, vocabulary = logits.shape
    if vocabulary == 0:
        raise ValueError(f"{_NAME}: logits must be (R, V) with V of at least 1, got {tuple(logits.shape)}")
    if vocabulary > 1 and logits.stride(1) != 1:
        raise ValueError(f"{_NAME}: the elements of a row of logits must be neighbours, got stride {logits.stride(1)}")
    checks.check_float32(_NAME, "losses", losses, (rows,), logits, "logits", "(R,)")
    if not losses.is_contiguous():
        raise ValueError(f"{_NAME}: losses must be contiguous, got stride {losses.stride(0)}")
    checks.check_is(_NAME, "labels", labels, torch.int64, (rows,), logits, "logits", "(R,)")


def _cross_entropy(*arguments):
    *arguments, want_gradient = arguments
    inputs, options = unpack(arguments, Inputs, Options)
    _check(inputs)
    logits, losses, labels = inputs
    if logits.shape[0] == 0:
        return
    labels = labels.contiguous()
    params = abi.MambaCrossEntropy()
    functions = place(params, logits)
    params.rows, params.vocabulary = logits.shape
    params.dtype = DTYPE_CODES[logits.dtype]
    params.gradient = want_gradient
    params.ignore_index, params.label_smoothing, params.z_loss = options
    params.logits = logits.data_ptr()
    params.logits_row_stride = logits.stride(0)
    params.labels = labels.data_ptr()
    params.losses = losses.data_ptr()
    run(functions, _NAME, params)
    wrote_in_place(losses)
    if want_gradient:
        wrote_in_place(logits)


def _cross_entropy_fake(*arguments):
    _check(Inputs(*arguments[:3]))


_cross_entropy_op = define(
    f"{_NAME}({signature(Inputs, Options, written=['logits', 'losses'])}, bool want_gradient) -> ()",
    _cross_entropy,
    _cross_entropy_fake,
    differentiable=False,
)
