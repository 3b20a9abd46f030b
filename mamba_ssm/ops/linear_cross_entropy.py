"""A head's product and the cross entropy of its logits, in pieces, so that the logits of all tokens never exist."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import autocast_dtype, is_compiling, no_autocast, values_at_hand

_NAME = "linear_cross_entropy"
# Bytes of one piece's float32 logits: some thousand tokens of a vocabulary of 50,000, which keep a GPU's products busy.
_PIECE = 1 << 28
# Tokens of a piece at most: what they add to weight's gradient is added up in its dtype, and float16 ends at 65504.
_ROWS = 4096


class _Options(typing.NamedTuple):
    ignore_index: int
    label_smoothing: float
    z_loss: float


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy of the logits hidden_states weight^T, which are computed in pieces, in forward and not again.

    Equal to ``F.cross_entropy((hidden_states @ weight.T).float(), labels, ...)`` up to rounding. Forward holds float32
    logits of a piece of the tokens and the gradients of hidden_states and weight, where these are wanted.

    Args:
        hidden_states: (..., E), and weight: (V, E), of one floating dtype; under autocast both are cast.
        labels: (...) int64, what each position is to predict: 0 to V - 1, or ignore_index for none.
        label_smoothing: in [0, 1]: so much of the probability is spread evenly over the vocabulary.
        z_loss: times log(sum(exp(logits)))^2 is added for each token (PaLM, arXiv 2204.02311, section 5).
        reduction: "mean" over the labels that are not ignored (NaN without any), or "sum".

    Returns:
        The loss, a scalar: float32, or float64 of float64.

    Raises:
        TypeError, ValueError: a shape, dtype, device or option is wrong, or on the CPU a label; on a GPU, where looking
            at labels would wait for it, a wrong label makes the loss and its gradients NaN.

    There are no second derivatives, and no torch.func transforms: F.cross_entropy of the logits has both.
    """
    options = _Options(ignore_index, label_smoothing, z_loss)
    _check(hidden_states, weight, labels, options, reduction)
    dtype = autocast_dtype(hidden_states)
    if dtype is not None:
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    if not torch.is_grad_enabled():  # an autograd.Function is told of gradients all the same
        hidden_states, weight = hidden_states.detach(), weight.detach()
    rows, labels = hidden_states.reshape(-1, weight.shape[1]), labels.reshape(-1)
    total = _LinearCrossEntropy.apply(rows, weight, labels, options)
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


def _check(hidden_states, weight, labels, options, reduction):
    for name, tensor in (("hidden_states", hidden_states), ("weight", weight), ("labels", labels)):
        checks.check_tensor(_NAME, name, tensor)
    checks.check_dims(_NAME, "weight", weight, 2, "(V, E)")
    vocabulary, width = weight.shape
    if vocabulary == 0:
        raise ValueError(f"{_NAME}: weight must be (V, E) with V of at least 1, got {_shape(weight)}")
    if hidden_states.dim() == 0 or hidden_states.shape[-1] != width:
        raise ValueError(
            f"{_NAME}: hidden_states must be (..., E) with weight's E = {width}, got {_shape(hidden_states)}"
        )
    if labels.shape != hidden_states.shape[:-1]:
        expected = f"{tuple(hidden_states.shape[:-1])} as hidden_states has tokens"
        raise ValueError(f"{_NAME}: labels must be {expected}, got {_shape(labels)}")
    if not hidden_states.is_floating_point() or not weight.is_floating_point():
        raise TypeError(
            f"{_NAME}: hidden_states and weight must be floats, got {hidden_states.dtype} and {weight.dtype}"
        )
    if hidden_states.dtype != weight.dtype and autocast_dtype(hidden_states) is None:
        raise TypeError(f"{_NAME}: weight must have hidden_states' dtype, {hidden_states.dtype}, got {weight.dtype}")
    if labels.dtype != torch.int64:
        raise TypeError(f"{_NAME}: labels must be int64, got {labels.dtype}")
    if not hidden_states.device == weight.device == labels.device:
        devices = f"{hidden_states.device}, {weight.device} and {labels.device}"
        raise ValueError(f"{_NAME}: hidden_states, weight and labels must be on one device, got {devices}")
    if not 0 <= options.label_smoothing <= 1:
        raise ValueError(f"{_NAME}: label_smoothing must lie in [0, 1], got {options.label_smoothing}")
    if not 0 <= options.z_loss < float("inf"):
        raise ValueError(f"{_NAME}: z_loss must be finite and not negative, got {options.z_loss}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{_NAME}: reduction must be 'mean' or 'sum', got {reduction!r}")
    if values_at_hand(labels):
        wrong = labels[(labels != options.ignore_index) & ((labels < 0) | (labels >= vocabulary))]
        if wrong.numel():
            what = f"in 0..{vocabulary - 1}, or ignore_index = {options.ignore_index}"
            raise ValueError(f"{_NAME}: labels must lie {what}, got {wrong[0].item()}")


def _shape(tensor):
    return f"{tuple(tensor.shape)}"


class _LinearCrossEntropy(torch.autograd.Function):
    """(rows (T, E), weight (V, E), labels (T)) -> the sum of the tokens' losses.

    The gradients of that sum are formed beside it, while a piece's logits are there. Of the sum, and not of the mean:
    divided by the count, a rare token's probability would be too small for float16.
    """

    @staticmethod
    def forward(ctx, rows, weight, labels, options):
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        exact = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros((), dtype=exact)
        drows = torch.empty_like(rows) if wants_rows else None
        dweight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        size = max(1, min(_ROWS, _PIECE // (4 * weight.shape[0])))
        with no_autocast(rows):
            for begin in range(0, rows.shape[0], size):
                piece = rows[begin : begin + size]
                loss, dlogits = _piece(piece, weight, labels[begin : begin + size], options, wants_rows or wants_weight)
                total += loss
                if wants_rows:
                    drows[begin : begin + size] = torch.mm(dlogits, weight)
                if wants_weight:
                    dweight += torch.mm(dlogits.t(), piece)
        ctx.save_for_backward(drows, dweight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, dtotal):
        if torch.is_grad_enabled() and not is_compiling():
            raise RuntimeError(
                f"{_NAME} cannot be differentiated: second derivatives (create_graph=True) are not implemented; take "
                "F.cross_entropy of the logits, which has them"
            )
        drows, dweight = ctx.saved_tensors
        with no_autocast(dtotal):
            # With dimensions dtotal stays float32: rounded to drows' dtype, a loss scale of 65536 would be infinite.
            drows = None if drows is None else (drows * dtotal.reshape(1, 1)).to(drows.dtype)
            dweight = None if dweight is None else (dweight * dtotal).to(ctx.dtype)
        return drows, dweight, None, None


def _piece(rows, weight, labels, options, wants_gradient):
    """(the sum of the losses of these rows, its gradient by the logits or None)."""
    logits = torch.mm(rows, weight.t()).to(torch.promote_types(rows.dtype, torch.float32))
    vocabulary = logits.shape[1]
    counts = (labels != options.ignore_index)[:, None]
    there = (labels >= 0) & (labels < vocabulary)
    index = torch.where(there, labels, 0)[:, None]
    log_sum = logits.logsumexp(1, keepdim=True)
    smooth = options.label_smoothing
    loss = log_sum - (1 - smooth) * logits.gather(1, index) + options.z_loss * log_sum.square()
    if smooth:
        loss = loss - smooth * logits.mean(1, keepdim=True)
    loss = torch.where(there[:, None], loss, torch.nan)  # a label that is none, which ignore_index may be, too
    loss = torch.where(counts, loss, 0).sum()
    if not wants_gradient:
        return loss, None
    # In the logits' memory: probabilities, then what is subtracted from them.
    dlogits = logits.sub_(log_sum).exp_()
    if options.z_loss:
        dlogits *= 1 + 2 * options.z_loss * log_sum
    if smooth:
        dlogits -= smooth / vocabulary
    dlogits.scatter_add_(1, index, torch.where(there[:, None], smooth - 1, torch.nan).to(dlogits.dtype))
    return loss, torch.where(counts, dlogits, 0).to(rows.dtype)
