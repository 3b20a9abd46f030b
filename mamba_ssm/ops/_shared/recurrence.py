"""A linear recurrence along the first dimension, in plain torch: second derivatives of scans are made of it.

h_t = a_t h_{t-1} + b_t. Its derivatives are recurrences again, so it has those of every order, forward mode and vmap.
"""

import math
import typing

import torch


class Recurrence(torch.autograd.Function):
    """h (L, ...) from a (L-1, ...) and b (L, ...): h[t] = a[t-1] h[t-1] + b[t], from h[0] = b[0] on. With reverse from
    the end: h[t] = a[t] h[t+1] + b[t].
    """

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, reverse: bool) -> torch.Tensor:
        return recur_(a, b.clone(memory_format=torch.contiguous_format), reverse)

    @staticmethod
    def setup_context(ctx: typing.Any, inputs: typing.Any, output: torch.Tensor) -> None:
        a, _, ctx.reverse = inputs
        ctx.save_for_backward(a, output)
        ctx.save_for_forward(a, output)

    @staticmethod
    def backward(ctx: typing.Any, dh: torch.Tensor) -> typing.Any:
        a, h = ctx.saved_tensors
        db = Recurrence.apply(a, dh, not ctx.reverse)
        return db[:-1] * h[1:] if ctx.reverse else db[1:] * h[:-1], db, None

    @staticmethod
    def jvp(ctx: typing.Any, da: torch.Tensor | None, db: torch.Tensor | None, _: None) -> torch.Tensor:
        a, h = ctx.saved_tensors
        if da is not None:
            first = torch.zeros_like(h[:1])
            of_a = torch.cat([da * h[1:], first] if ctx.reverse else [first, da * h[:-1]])
            db = of_a if db is None else db + of_a
        return Recurrence.apply(a, db, ctx.reverse)

    @staticmethod
    def vmap(
        info: typing.Any, in_dims: tuple[int | None, ...], a: torch.Tensor, b: torch.Tensor, reverse: bool
    ) -> tuple[torch.Tensor, int]:
        def columns(tensor, dim):
            """The mapped dimension second: the recurrence is the same for every column."""
            if dim is None:
                return tensor.unsqueeze(1).expand(-1, info.batch_size, *tensor.shape[1:])
            return tensor.movedim(dim, 1)

        return Recurrence.apply(columns(a, in_dims[0]), columns(b, in_dims[1]), reverse), 1


def recur_(a: torch.Tensor, h: torch.Tensor, reverse: bool = False) -> torch.Tensor:
    """Recurrence in place, from b to h; without a gradient.

    On the CPU step after step. On CUDA, where a launch takes longer than a step, the steps of about sqrt(L) pieces go
    together, and then what one piece passes on to the next.
    """
    if h.is_cuda and len(h) > 8:
        return _recur_in_pieces(a, h, reverse)
    rows, factors = list(h.unbind()), list(a.unbind())
    if reverse:
        rows.reverse()
        factors.reverse()
    for t, factor in enumerate(factors):
        rows[t + 1].addcmul_(factor, rows[t])
    return h


def _recur_in_pieces(a, h, reverse):
    if reverse:
        a, target, h = a.flip(0), h, h.flip(0)
    else:
        target = h
    steps = math.isqrt(len(h))
    pieces = -(-len(h) // steps)
    factors, states = h.new_zeros((2, pieces * steps, *h.shape[1:]))
    factors[1 : len(h)] = a
    states[: len(h)] = h
    factors, states = (tensor.unflatten(0, (pieces, steps)) for tensor in (factors, states))
    for t in range(1, steps):
        states[:, t].addcmul_(factors[:, t], states[:, t - 1])
        factors[:, t] *= factors[:, t - 1]  # from here on the product since the piece's beginning
    for k in range(1, pieces):
        states[k, -1].addcmul_(factors[k, -1], states[k - 1, -1])
    states[1:, :-1].addcmul_(factors[1:, :-1], states[:-1, -1:])
    states = states.flatten(0, 1)[: len(target)]
    return target.copy_(states.flip(0) if reverse else states)
