"""A head's product and the cross entropy of its logits, in pieces, so that the logits of all tokens never exist."""

from __future__ import annotations  # ProcessGroup is not there in a torch built without distributed

import weakref

import torch
import torch.distributed as dist

from mamba_ssm import _checks as checks
from mamba_ssm._arguments import check_process_group
from mamba_ssm._torch import (
    autocast_dtype,
    is_traced,
    may_be_batched,
    no_autocast,
    outside_graphs,
    planned,
    reference,
    values_at_hand,
)
from mamba_ssm.ops._shared.gradients import HAS_OUT_DTYPE
from mamba_ssm.ops.cross_entropy import Inputs, Options, VocabularyPart, cross_entropy_

_NAME = "linear_cross_entropy"
# A piece has at most _MANY logits: 4,000 tokens of a vocabulary of 50,000, which keep a GPU's products busy. More than
# _FEW logits are cut in two at least, so that a small batch saves memory too.
_MANY, _FEW = 200 << 20, 32 << 20
# So many pieces are added up in bfloat16, which takes half the memory and up to 1.6 times the error of one rounding.
_NARROW = 4
# Tokens of a piece at most: torch before 2.8 rounds what they add to weight's gradient, and float16 ends at 65504.
_ROWS = 4096


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Cross entropy of the logits hidden_states weight^T, which are computed in pieces, in forward and not again.

    Equal to ``F.cross_entropy((hidden_states @ weight.T).float(), labels, ...)`` up to rounding. Forward holds the
    logits of a piece of the tokens, and the gradients of hidden_states and weight, where these are wanted: weight's in
    float32, or of up to four pieces in bfloat16.

    Args:
        hidden_states: (..., E), and weight: (V, E), of one floating dtype; under autocast both are cast.
        labels: (...) int64, what each position is to predict: 0 to V - 1, or ignore_index for none.
        label_smoothing: in [0, 1]: so much of the probability is spread evenly over the vocabulary.
        z_loss: times log(sum(exp(logits)))^2 is added for each token (PaLM, arXiv 2204.02311, section 5).
        reduction: "mean" over the labels that are not ignored (NaN without any, with gradients of zero), or "sum".
        process_group: weight is this rank's (V / ranks, E) part of the rows, as ColumnParallelLinear and
            VocabParallelEmbedding have it, while hidden_states and labels are whole and the same on all ranks. So are
            the loss and the gradient of hidden_states, which backward sums over the ranks. All ranks call forward and
            backward.

    Returns:
        The loss, a scalar: float32, or float64 of float64.

    Raises:
        TypeError, ValueError: a shape, dtype, device or option is wrong, or on the CPU a label; on a GPU, where looking
            at labels would wait for it, a wrong label makes the loss and its gradients NaN.

    There are no second derivatives, and no torch.func transforms: F.cross_entropy of the logits has both.
    """
    ignore_index = checks.check_integer(_NAME, "ignore_index", ignore_index)
    label_smoothing = checks.check_number(_NAME, "label_smoothing", label_smoothing)
    options = Options(ignore_index, label_smoothing, checks.check_number(_NAME, "z_loss", z_loss))
    check_process_group(_NAME, process_group)
    ranks = 1 if process_group is None else dist.get_world_size(process_group)
    _check(hidden_states, weight, labels, options, reduction, ranks)
    dtype = autocast_dtype(hidden_states)
    if dtype is not None:
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    if not torch.is_grad_enabled():  # an autograd.Function is told of gradients all the same
        hidden_states, weight = hidden_states.detach(), weight.detach()
    rows, labels = hidden_states.reshape(-1, weight.shape[1]), labels.reshape(-1)
    sum_of = _LinearCrossEntropy.apply if process_group is None else _across_ranks
    total = sum_of(rows, weight, labels, options, process_group)
    if reduction == "sum":
        return total
    count = (labels != ignore_index).sum()  # of none the mean is NaN, but its gradients are zero, as torch's
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def _check(hidden_states, weight, labels, options, reduction, ranks):
    for name, tensor in (("hidden_states", hidden_states), ("weight", weight), ("labels", labels)):
        checks.check_tensor(_NAME, name, tensor)
    checks.check_dims(_NAME, "weight", weight, 2, "(V, E)")
    vocabulary, width = ranks * weight.shape[0], weight.shape[1]
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


def _cut(tokens, vocabulary):
    """Tokens of a piece, whole tiles of 128 where there are so many."""
    logits = tokens * vocabulary
    pieces = max(1, -(-logits // _MANY), 2 if logits > _FEW else 1, -(-tokens // _ROWS))
    piece = max(1, -(-tokens // pieces))
    return piece if piece <= 128 else -(-piece // 128) * 128


class _LinearCrossEntropy(torch.autograd.Function):
    """(rows (T, E), weight (V, E), labels (T)) -> the sum of the tokens' losses. part: weight's, if it is one.

    The gradients of that sum are formed beside it, while a piece's logits are there. Of the sum, and not of the mean:
    divided by the count, a rare token's probability would be too small for float16.
    """

    @staticmethod
    def forward(ctx, rows, weight, labels, options, part):
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        rows, weight = rows.detach(), weight.detach()  # torch 2.4's compiler does not know that forward has no grad
        tokens, vocabulary = rows.shape[0], weight.shape[0]
        piece = _cut(tokens, vocabulary if part is None else 3 * vocabulary)  # with float32 logits beside its own
        exact = torch.promote_types(rows.dtype, torch.float32)
        narrow = tokens <= piece or (rows.dtype == torch.bfloat16 and tokens <= _NARROW * piece)
        summed = weight.dtype if narrow and rows.dtype != torch.float16 else exact  # float16 ends at 65504
        drows = torch.empty_like(rows) if wants_rows else None
        dweight = torch.zeros_like(weight, dtype=summed) if wants_weight else None
        losses = rows.new_empty(tokens, dtype=exact)
        with no_autocast(rows):
            for begin in range(0, tokens, piece):
                of_piece = slice(begin, begin + piece)
                of_rows = rows[of_piece], labels[of_piece], losses[of_piece], drows[of_piece] if wants_rows else None
                if part is not None or reference.on:
                    _form(*of_rows, weight, dweight, options, part)
                else:
                    _form_by_plan(*of_rows, weight, dweight, tuple(options))
        total = losses.sum()
        ctx.save_for_backward(drows, dweight)
        ctx.dtype, ctx.part = weight.dtype, part
        return total

    @staticmethod
    def backward(ctx, dtotal):
        if torch.is_grad_enabled() and not is_traced():
            raise RuntimeError(
                f"{_NAME} cannot be differentiated: second derivatives (create_graph=True) are not implemented; take "
                "F.cross_entropy of the logits, which has them"
            )
        drows, dweight = ctx.saved_tensors
        with no_autocast(dtotal):
            drows = None if drows is None else _scaled(drows, dtotal, drows.dtype)
            dweight = None if dweight is None else _scaled(dweight, dtotal, ctx.dtype)
            if drows is not None and ctx.part is not None:
                if not is_traced() and may_be_batched():
                    raise RuntimeError(f"{_NAME}: with process_group gradients cannot be batched: take one at a time")
                dist.all_reduce(drows, group=ctx.part.group)
        return drows, dweight, None, None, None


def _form(rows, labels, losses, drows, weight, dweight, options, part=None):
    """Writes a piece's losses and, where there is memory for them, the gradients of their sum: weight's is added."""
    options, logits = Options(*options), torch.mm(rows, weight.t())
    want_gradient = drows is not None or dweight is not None
    cross_entropy_(Inputs(logits, losses, labels), options, want_gradient, part)
    if drows is not None:
        _product_into(drows, logits, weight)
    if dweight is not None:  # what is ignored may be NaN, and its gradient of zero times that too
        ignored = labels == options.ignore_index
        _add_product(dweight, logits.t(), rows.masked_fill(ignored[:, None], 0))
    return ()


_form_by_plan = planned("linear_cross_entropy", _form)


# The (rows of weight, tokens) that all ranks of a group were found to have.
_alike: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, int]]] = weakref.WeakKeyDictionary()


@outside_graphs
def _across_ranks(rows, weight, labels, options, process_group):
    """_LinearCrossEntropy of parts of one size, for the same tokens: else ranks would cut these into other pieces, and
    hang, or add up the losses of different ones.
    """
    sizes = weight.shape[0], labels.shape[0]
    extremes = _compare(sizes, labels, process_group)
    known = _alike.setdefault(process_group, set())
    if values_at_hand(labels) or sizes not in known:  # a GPU is waited for where sizes are new
        most, least = extremes.tolist()
        for index, (what, cure) in enumerate(
            (
                ("every rank's weight must have as many rows", "pad the vocabulary to a multiple of the ranks"),
                ("every rank must have as many tokens", "give all ranks the same batch"),
                ("every rank must have the same labels, of which a checksum is", "give all ranks the same batch"),
            )
        ):
            if most[index] != -least[index]:
                mine = f"{-least[index]} to {most[index]} on all"
                mine = f"{sizes[index]} on this one and {mine}" if index < len(sizes) else mine
                raise ValueError(f"{_NAME}: with process_group {what}, got {mine}: {cure}")
        known.add(sizes)
    ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    part = VocabularyPart(rank * sizes[0], ranks * sizes[0], process_group)
    total = _LinearCrossEntropy.apply(rows, weight, labels, options, part)
    return total * torch.where((extremes[0] == -extremes[1]).all(), 1.0, torch.nan).to(total.dtype)


def _compare(sizes, labels, process_group):
    """(2, 3): the most of both sizes and of a checksum of labels over all ranks, and the most of their negatives."""
    places = torch.arange(1, labels.shape[0] + 1, device=labels.device)
    mine = torch.stack([labels.new_full((), sizes[0]), labels.new_full((), sizes[1]), (labels * places).sum()])
    extremes = torch.stack([mine, -mine])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, process_group)
    return extremes


def _product_into(out, a, b):
    if is_traced():
        out.copy_(torch.mm(a, b))
    else:
        torch.mm(a, b, out=out)


def _add_product(total, a, b):
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif HAS_OUT_DTYPE and a.is_cuda and not is_traced():
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(a, b)


def _scaled(tensor, factor, dtype):
    """In one pass. With dimensions factor stays float32: in float16 a loss scale of 65536 would be infinite."""
    factor = factor.reshape(1, 1)
    if not is_traced() and may_be_batched():  # out= has no batching rule
        return (tensor * factor).to(dtype)
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))
